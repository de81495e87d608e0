"""What state slots must hold, where some layers have a state instead of KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pool_books import Books
from pool_content import full_tags, tags_of, values_of
from pool_turns import Apart, Entry


def state_after(tags: Iterable[int], state: int = 0) -> int:
    """The state that has taken in this content, token by token; 0 has taken in nothing."""
    for tag in tags:
        state = hash((state, tag))
    return state


class StateBooks(Books):
    """The books of a ``StateWorld``.

    Attributes:
        states: request id -> the state that its tokens make, evicted or not.
        tree_states: slot that the tree was given -> the state that the key makes.
    """

    def __init__(self, **how: Any) -> None:
        self.states: dict[str, int] = {}
        self.tree_states: dict[int, int] = {}
        super().__init__(**how)

    # -- the device

    def _state_buffers(self) -> list[torch.Tensor]:
        """Of the only layer with states [slots, 4] each: a convolution's, and a recurrent one's."""
        layer = self.req_to_token_pool.mamba2_layer_cache(1)
        return [layer.conv[0][..., 0], layer.temporal[:, 0, 0]]

    def _stored(self) -> list[tuple[int, int]]:
        """What every slot holds of both."""
        both = (tags_of(buffer.reshape(-1, 1, 4)) for buffer in self._state_buffers())
        return list(zip(*both, strict=True))

    def _store_state(self, slot: int, conv: int, recurrent: int) -> None:
        for buffer, state in zip(self._state_buffers(), (conv, recurrent), strict=True):
            buffer[slot] = values_of([state]).flatten()

    # -- rows

    def _matched(self, req: Any) -> list[Entry]:
        row = super()._matched(req)
        self.states[req.rid] = state_after(entry.tag for entry in row)
        return row

    def book_insert(self, params: Any, result: Any) -> None:
        """The tree was given a state, and keeps it."""
        if params.mamba_value is None or result.mamba_exist:
            return
        key = params.key
        tags = full_tags([*key.token_ids], (key.extra_key, key.cache_salt))
        self.tree_states[int(params.mamba_value)] = state_after(tags)
        self.count["states kept"] += 1

    def _in_tree(self, key: Sequence[int], apart: Apart) -> list[int]:
        """A match ends where the tree has a state."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        found = super()._in_tree(key, apart)
        if found:
            node = self._match(key, apart).best_match_node
            slot = self.tree_cache.tree_core.get_component_device_value(node, ComponentType.MAMBA)
            state = state_after(found)
            assert self._stored()[int(slot)] == (state, state), "a prefix with another state"
        return found

    # -- invariants

    def check(self) -> None:
        super().check()
        pool, stored = self.req_to_token_pool, self._stored()
        free = pool.mamba_allocator.free_slots.tolist()
        in_tree = self.tree_cache.tree_core.all_mamba_values_flatten().tolist()
        owned: list[int] = []
        for req in self.owners():
            own = int(req.kv.mamba_pool_idx)
            assert int(pool.req_index_to_mamba_index_mapping[req.kv.req_pool_idx]) == own
            state = self.states[req.rid]
            assert stored[own] == (state, state), "not the state of the request's tokens"
            owned.append(own)
            if self.copies_states:
                owned += req.kv.mamba_ping_pong_track_buffer.tolist()
        for req in self.waiting_queue:
            assert not req.kv.holds_mamba, "a state of who waits"
        for slot in in_tree:
            state = self.tree_states[slot]
            assert stored[slot] == (state, state), "a prefix with the state of other tokens"
        everywhere = free + in_tree + owned
        assert len(everywhere) == pool.mamba_pool.size, "accounting of states"
        assert set(everywhere) == set(range(1, pool.mamba_pool.size + 1)), "a slot has two owners"
        evictable = self.tree_cache.mamba_evictable_size()
        locked = self.tree_cache.mamba_protected_size()
        assert evictable + locked == len(in_tree)
        assert owned or not locked, "a lock of nobody"
        if not owned:
            self.tree_cache.sanity_check()

    def check_empty(self) -> None:
        super().check_empty()
        pool = self.req_to_token_pool
        assert pool.mamba_allocator.available_size() == pool.mamba_pool.size

"""What two pools must hold, where window layers have one of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pool_books import Books
from pool_content import keys_of, values_of
from pool_turns import Apart, Entry, Left


class Read(NamedTuple):
    """What a step sees of a row: its entries from the first one on, and their slots when the step
    was launched, in both pools."""

    rid: str
    first: int
    slots: list[int]
    windows: list[int]


class WindowBooks(Books):
    """The books of a ``WindowWorld``.

    Attributes:
        window_tokens: that a query sees, itself among them; window_pool: slots of the second pool.
        window_content: slot of the second pool -> hash of what was last written there.
        reading: what the step that was launched last sees; writing: where it writes, in the second
            pool.
    """

    window_tokens: int
    window_pool: int

    def __init__(self, **how: Any) -> None:
        self.window_content: dict[int, int] = {}
        self.reading: list[Read] = []
        self.writing: list[int] = []
        super().__init__(**how)

    def window_slots(self, slots: Sequence[int]) -> list[int]:
        """Their slots in the second pool; 0: it has none."""
        found: list[int] = self._mapping()[list(slots)].tolist()
        return found

    def cursor_of(self, req: Any) -> int:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        entry: int = req.kv.get_evicted_seqlen(ComponentType.SWA)
        return entry

    def _mapping(self) -> torch.Tensor:
        mapping: torch.Tensor = self.token_to_kv_pool_allocator.full_to_swa_index_mapping
        return mapping

    def _free_slots(self) -> list[int]:
        free: list[int] = self._free_of("full_attn_allocator")
        return free

    def _free_of(self, name: str) -> list[int]:
        slots: list[int] = getattr(self.token_to_kv_pool_allocator, name).free_pages.tolist()
        return slots

    # -- the device

    def _window_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        return pool.get_key_buffer(1), pool.get_value_buffer(1)

    def _store_windows(self, at: list[int], tags: list[int]) -> None:
        for buffer, content in zip(
            self._window_buffers(), (keys_of(tags), values_of(tags)), strict=True
        ):
            buffer[at] = self.widened(content).to(self.device)

    def _check_stored(self, slots: list[int], tags: Sequence[int]) -> None:
        """Of whatever has a slot in the second pool, too."""
        super()._check_stored(slots, tags)
        found = zip(self.window_slots(slots), tags, strict=True)
        self._check_windows_stored([one for one in found if one[0]])

    def _check_windows_stored(self, expected: list[tuple[int, int]]) -> None:
        at, tags = [slot for slot, _ in expected], [tag for _, tag in expected]
        keys, values = (buffer[at].cpu() for buffer in self._window_buffers())
        assert torch.equal(keys, self.widened(keys_of(tags))), "another window"
        assert torch.equal(values, self.widened(values_of(tags))), "another window"

    def _check_read(self, read: Read) -> None:
        """A step reads; it is not looked at what comes of a request that has lost its row."""
        if read.rid in self.rows:
            stop = read.first + len(read.slots)
            tags = [entry.tag for entry in self.rows[read.rid][read.first : stop]]
            super()._check_stored(read.slots, tags)
            self._check_windows_stored(list(zip(read.windows, tags, strict=True)))
            self.count["windows read"] += 1

    # -- rows

    def _goes_on_from(self, history: Any, left: Left, cut: int) -> bool:
        """If a whole window ends there."""
        row_tokens = len(left.row_before(cut))
        is_whole = super()._goes_on_from(history, left, cut)
        return is_whole and self._has_all(history.key[:row_tokens], left.apart, row_tokens)

    def _restored(self, req: Any) -> list[Entry]:
        held = super()._restored(req)
        shared = req.kv.cache_protected_len
        own = self._row(req)[shared : req.prefix_len]
        at = self.window_slots(own)
        assert sum(map(bool, at)) == min(len(own), self.window_tokens - 1), "another window"
        new = {slot: entry.tag for slot, entry in zip(at, held[shared:], strict=True) if slot}
        self.window_content.update(new)
        self.count["restored, window shared"] += len(own) < self.window_tokens - 1
        self.count["restored, compacted"] += req.skipkv.kv.evicted_tokens > 0
        return held

    def _book_compaction(self, req: Any, before: list[int]) -> None:
        old = self.rows[req.rid]
        super()._book_compaction(req, before)
        seen, left = old[-self.window_tokens :], self.rows[req.rid]
        assert left[-self.window_tokens :] == seen, "a window was evicted from"
        self.count["compactions beside a prompt in the window"] += (
            seen[0].position < self.talks[req.rid].prompt_tokens
        )

    def _in_tree(self, key: Sequence[int], apart: Apart) -> list[int]:
        """A match ends where the tree has a whole window."""
        found = super()._in_tree(key, apart)
        match = self._match(key, apart)
        slots = self.tree_cache.path_device_indices(match.last_device_node).tolist()[: len(found)]
        seen = min(len(found), self.window_tokens - 1)
        at = self.window_slots(slots[len(slots) - seen :])
        assert [self.window_content.get(slot) for slot in at] == found[len(found) - seen :]
        return found

    # -- invariants

    def check(self) -> None:
        super().check()
        owners, mapping = self.owners(), self._mapping().tolist()
        free, tree = self._free_of("swa_attn_allocator"), self.tree_cache
        in_tree = [mapping[slot] for slot in tree.all_values_flatten().tolist() if mapping[slot]]
        private: list[int] = []
        for req in owners:
            private += self._check_windows(req, mapping)
        assert not any(mapping[slot] for slot in [0, *self._free_slots()]), "a window of nobody"
        locked = tree.swa_protected_size()
        assert tree.swa_evictable_size() + locked == len(in_tree)
        assert owners or not locked, "a lock of nobody"
        if not owners:
            tree.sanity_check()
        everywhere = free + in_tree + private
        assert len(everywhere) == self.window_pool, "window pool accounting"
        assert set(everywhere) == set(range(1, self.window_pool + 1)), "a slot has two owners"

    def _check_windows(self, req: Any, mapping: list[int]) -> list[int]:
        """One request's slots in the second pool; those that are its own."""
        slots, row = self._row(req), self.rows[req.rid]
        shared, cursor = req.kv.cache_protected_len, self.cursor_of(req)
        at = [mapping[slot] for slot in slots]
        behind = max(cursor, shared)
        assert cursor <= len(row) and not any(at[shared:behind]), "in front of the cursor"
        assert all(at[behind:]), "behind the cursor"
        assert all(at[1 - self.window_tokens :]), "the next query has no window"
        content = [self.window_content.get(slot) for slot in at if slot]
        tags = [entry.tag for entry, slot in zip(row, at, strict=True) if slot]
        assert content == tags, "another window"
        return at[behind:]

    def check_empty(self) -> None:
        super().check_empty()
        assert len(self._free_of("swa_attn_allocator")) == self.window_pool
        assert not self._mapping()[:-1].any()

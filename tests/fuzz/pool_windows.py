"""Window layers with a KV pool of their own, of a ``World``: SGLang's pools, allocator and tree.

The model has two layers: the first sees the whole row, the second a window. Both write the same
content, so what a forward pass reads of a window is checked when it reads it, as late as on a GPU.
Slots are translated at a step's beginning. By the time that SGLang plans the next one it has begun,
because SGLang has waited for the end of the one before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from pool_beside import WorldBeside
from pool_content import KV_HEADS, POOL, ROWS
from pool_window_books import Read, WindowBooks

from sgl_skipkv.request.pages import page_ceil


@contextmanager
def window_flags(
    *,
    radix: bool = True,
    chunk: int | None = None,
    every: int = 1,
    unlocks: bool = False,
) -> Iterator[None]:
    """A published configuration, and SGLang's variables.

    Args:
        radix: whether there is a radix cache.
        every: how many tokens leave a window before SGLang gives their slots back.
        unlocks: whether the windows of a prompt may leave the tree while its request runs.
    """
    from sglang.srt.runtime_context import get_memory, get_schedule

    variables = {
        "SGLANG_SWA_EVICTION_INTERVAL": str(every),
        "SGLANG_OPT_RELEASE_PREFILL_SWA": str(unlocks),
    }
    with (
        patch.dict(os.environ, variables),
        get_memory().override(disable_radix_cache=not radix),
        get_schedule().override(chunked_prefill_size=-1 if chunk is None else chunk),
    ):
        yield


def window_pool_tokens(
    window_tokens: int, chunk: int | None, every: int, running: int = ROWS, page: int = 1
) -> int:
    """How large SGLang's own worst case is for so many running requests
    (``compute_swa_request_cap``), and what one prefix locks. Without chunks a prompt must fit."""
    if chunk is None:
        return POOL
    window, chunk = page_ceil(window_tokens, page), page_ceil(chunk, page)
    return min(running * (window + page_ceil(every, page) + page) + 2 * chunk + page + window, POOL)


class WindowWorld(WindowBooks, WorldBeside):
    """A world with two pools.

    Args:
        window_tokens: that a query sees, itself among them.
        window_pool: slots of the second pool; None: as many as the first one has.
        radix: whether the tree keeps anything.
    """

    layers = 2

    def __init__(
        self,
        *,
        window_tokens: int = 4,
        window_pool: int | None = None,
        radix: bool = True,
        **how: Any,
    ) -> None:
        self.window_tokens, self.has_tree = window_tokens, radix
        self.window_pool = POOL if window_pool is None else window_pool
        self.sliding_window_size = window_tokens - 1  # as SGLang counts: before the query
        super().__init__(**how)

    def _allocator(self) -> Any:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        shared = {"page_size": self.page_size, "dtype": torch.float32, "device": self.device}
        sizes = {"size": POOL, "size_swa": self.window_pool}
        pool = SWAKVPool(
            **shared,
            **sizes,
            head_num=KV_HEADS,
            head_dim=self.head_dim,
            full_attention_layer_ids=[0],
            swa_attention_layer_ids=[1],
        )
        allocator = SWATokenToKVPoolAllocator(**shared, **sizes, kvcache=pool, need_sort=False)
        has_room = allocator.check_decode_capacity

        def counted(*, num_tokens: int, **how: Any) -> bool:
            enough = bool(has_room(num_tokens=num_tokens, **how))
            short = allocator.swa_available_size() < num_tokens
            self.count["window pool full"] += short and not enough
            return enough

        allocator.check_decode_capacity = counted
        return allocator

    def _slot_lists(self) -> list[Any]:
        allocator = self.token_to_kv_pool_allocator
        return [allocator.full_attn_allocator, allocator.swa_attn_allocator]

    def _tree_components(self) -> tuple[Any, ...]:
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

        return (ComponentType.FULL, ComponentType.SWA)

    def _bind(self, **given: Any) -> None:
        super()._bind(**given)
        limits = replace(
            self.skipkv.limits,
            model_window_tokens=self.window_tokens,
            without_budget_reuse="window layers in a pool of their own",
        )
        bound = replace(self.skipkv, limits=limits)
        self.skipkv = self.req_to_token_pool.skipkv = bound

    def evict_tree(self, tokens: int, windows: int | None = None) -> None:
        """windows: how many of the second pool; None: as many."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        windows = tokens if windows is None else windows
        self.tree_cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=windows))

    # -- the forward pass

    def _forward(self, batch: Any) -> list[int | None]:
        self.forward_stream.run()  # it reads the rows that it was launched with
        counts = [1] * len(batch.reqs)
        if not batch.forward_mode.is_decode():
            counts = batch.extend_lens
        self.reading = [
            self._read_of(req, count) for req, count in zip(batch.reqs, counts, strict=True)
        ]
        slots = batch.out_cache_loc.tolist()
        self.writing = self.window_slots(slots)
        assert all(self.writing), "a new token has no slot in the window pool"
        written = self.writing
        tokens = super()._forward(batch)
        tags = [self.content[slot] for slot in slots]
        self.window_content.update(zip(written, tags, strict=True))
        return tokens

    def _read_of(self, req: Any, count: int) -> Read:
        slots = self._row(req)
        first = max(len(slots) - count - self.window_tokens + 1, 0)
        at = self.window_slots(slots[first:])
        assert all(at), "a window without KV"
        return Read(req.rid, first, slots[first:], at)

    def _store(self, slots: list[int], written: list[Any]) -> None:
        super()._store(slots, written)
        self._store_windows(self.writing, [entry.tag for entry in written])
        for read in self.reading:
            self._check_read(read)

"""Window layers with a KV pool of their own (SGLang's ``SWAKVPool``: gpt-oss).

A row of the page table names slots of the pool of the other layers. SGLang maps such a slot to one
of the window pool while a window can see its token, and then gives that one back: of a request's
own row entries those in front of a border have none, and those behind it have one each. SGLang
counts the border in row entries and moves it by the request's tokens.

A compaction keeps the last tokens, as many as a window holds. So the border moves there first, and
the compaction evicts only what has no slot in the window pool any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.patches.engine.binding import state_of


def has_window_pool(allocator: Any) -> bool:
    """Whether window layers have a pool of their own."""
    return hasattr(allocator, "full_to_swa_index_mapping")


def window_buffers(allocator: Any) -> list[Tensor]:
    """Keys of every window layer, then values, [window slots, Hkv, d] each; none where all layers
    have one pool."""
    if not has_window_pool(allocator):
        return []
    pool = allocator.get_kvcache().swa_kv_pool
    return [*pool.k_buffer, *pool.v_buffer]


def window_slots(allocator: Any, slots: Tensor) -> Tensor:
    """int64, of the same shape: their slots in the window pool; all of them must have one."""
    mapped: Tensor = allocator.full_to_swa_index_mapping[slots]
    return mapped


def move_border(
    original: Callable[..., None], batch: Any, req: Any, pre_len: int, **options: Any
) -> None:
    """AROUND ``ScheduleBatch._evict_swa``: in a decode step SGLang takes a row to be as long as
    the request's tokens."""
    state = state_of(req)
    if state is not None and batch.forward_mode.is_decode():
        pre_len -= state.kv.evicted_tokens
    original(batch, req, pre_len, **options)


def leave_windows(tree_cache: Any, req: Any, row_tokens: int, window_tokens: int) -> None:
    """Move the border to the last ``window_tokens`` of the row: a compaction keeps these."""
    if has_window_pool(tree_cache.token_to_kv_pool_allocator):
        # SGLang keeps the entries that a query behind this length sees before itself.
        pre_len = row_tokens - window_tokens + tree_cache.sliding_window_size
        tree_cache.evict_sliding_windows(req, pre_len)


def free_evicted(allocator: Any, kv: Any, slots: Tensor, evicted_tokens: int, first: int) -> None:
    """Give back what a compaction has evicted from a row, and move the border with the row.

    Args:
        kv: SGLang's record of the row, as it was before.
        first: entry of the row at which the slots begin.
    """
    if not has_window_pool(allocator):
        allocator.free_segment(slots, start_pos=first)
    elif evicted_tokens:
        allocator.free_full_segment(slots, start_pos=first)
        set_border(kv, _border(kv) - evicted_tokens)


def own_windowed_slots(tree_cache: Any, tokens: int, windowed_tokens: int) -> Tensor:
    """int64 [tokens], new slots, of which the last ``windowed_tokens`` have one in the window pool.

    Raises:
        RuntimeError: one of the pools is full.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = tree_cache.token_to_kv_pool_allocator
    missing = max(tokens - allocator.full_available_size(), 0)
    windowed_missing = max(windowed_tokens - allocator.swa_available_size(), 0)
    if missing or windowed_missing:
        tree_cache.evict_for_alloc(EvictParams(num_tokens=missing, swa_num_tokens=windowed_missing))
    slots = allocator.full_attn_allocator.alloc(tokens)
    windowed = allocator.swa_attn_allocator.alloc(windowed_tokens)
    if slots is None or windowed is None:
        raise RuntimeError(f"no room to restore {tokens} tokens, {windowed_tokens} with a window")
    allocator.set_full_to_swa_mapping(slots[tokens - windowed_tokens :], windowed)
    own: Tensor = slots.to(torch.int64)
    return own


def _border(kv: Any) -> int:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    entry: int = kv.get_evicted_seqlen(ComponentType.SWA)
    return entry


def set_border(kv: Any, entry: int) -> None:
    """The request's own entries in front of this one have no slot in the window pool."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    kv.set_evicted_seqlen(ComponentType.SWA, entry)


def is_out_of_windows(kv: Any, tokens: int) -> bool:
    """Whether the row's first entries have no slot in the window pool that the request could give
    to the radix tree."""
    return _border(kv) >= tokens > int(kv.cache_protected_len)

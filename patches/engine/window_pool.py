"""Window layers with a KV pool of their own (SGLang's ``SWAKVPool``: gpt-oss).

A row of the page table names slots of the other layers' pool. SGLang maps such a slot to one of the
window pool until its token is out of the windows: of a request's own row entries those in front of
its SWA eviction cursor (``kv.get_evicted_seqlen``) have no window slot, and those behind it have
one each. SGLang counts the cursor in row entries and moves it by the request's tokens.

A compaction keeps the last tokens, as many as a window holds. So the cursor moves there first, and
the compaction evicts only what has no window slot any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def move_cursor(
    original: Callable[..., None], batch: Any, req: Any, pre_len: int, **options: Any
) -> None:
    """AROUND ``ScheduleBatch._evict_swa``: in a decode step SGLang takes a row to be as long as
    the request's tokens, also when it asks whether enough of them are out of the windows."""
    state = state_of(req)
    evicted_tokens = 0 if state is None else state.kv.evicted_tokens
    if evicted_tokens and batch.forward_mode.is_decode():
        from sglang.srt.environ import envs

        pre_len -= evicted_tokens
        least_tokens = max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())
        if pre_len - batch.tree_cache.sliding_window_size < _cursor(req.kv) + least_tokens:
            return
    original(batch, req, pre_len, **options)


def free_out_of_windows(
    tree_cache: Any, rows: Iterable[tuple[Any, int]], window_tokens: int
) -> None:
    """Move the cursor of requests that are compacted to the last ``window_tokens`` of their rows.

    Args:
        rows: requests with their row lengths.
    """
    allocator = tree_cache.token_to_kv_pool_allocator
    if not has_window_pool(allocator):
        return
    allocator.free_group_begin()
    for req, row_tokens in rows:
        # SGLang keeps the entries that a query behind this length sees before itself.
        pre_len = row_tokens - window_tokens + tree_cache.sliding_window_size
        tree_cache.evict_sliding_windows(req, pre_len)
    allocator.free_group_end()


def free_behind_chunk(original: Callable[..., None], req: Any, tree_cache: Any) -> None:
    """AROUND ``common.checkpoint_kv_cache``: while a prompt is computed in chunks, SGLang moves the
    cursor up to what it has inserted into the radix tree.

    A private prompt and recomputed output are not inserted. They would fill the window pool, and
    the next chunk would wait for ever. The last chunk may still run, so its windows stay.
    """
    chunk_from, state = req.prefix_len, state_of(req)
    original(req, tree_cache)
    if state is not None and req.kv.cache_protected_len < chunk_from:
        if has_window_pool(tree_cache.token_to_kv_pool_allocator):
            tree_cache.evict_sliding_windows(req, chunk_from)


def free_evicted(allocator: Any, kv: Any, slots: Tensor, evicted_tokens: int, first: int) -> None:
    """Give back what a compaction has evicted from a row, and move the cursor with the row.

    Args:
        kv: SGLang's record of the row, as it was before.
        first: entry of the row at which the slots begin.
    """
    if has_window_pool(allocator):
        allocator.free_full_segment(slots, start_pos=first)
        set_cursor(kv, _cursor(kv) - evicted_tokens)
    else:
        allocator.free_segment(slots, start_pos=first)


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


def _cursor(kv: Any) -> int:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    entry: int = kv.get_evicted_seqlen(ComponentType.SWA)
    return entry


def set_cursor(kv: Any, entry: int) -> None:
    """The request's own entries in front of this one have no window slot."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    kv.set_evicted_seqlen(ComponentType.SWA, entry)


def held_tokens(req: Any) -> int:
    """How many tokens of a request that looks for a prefix the radix tree has. SGLang matches them
    only up to where a whole window ends."""
    return max(int(req.prefix_len + req.host_hit_length), int(req.swa_branching_seqlen or 0))


def is_out_of_windows(kv: Any) -> bool:
    """Whether own entries that the radix tree does not have are in front of the cursor: what lies
    behind it may be less than a window, and a match could not end there."""
    return _cursor(kv) > int(kv.cache_protected_len)

"""Window layers with a KV pool of their own (SGLang's ``SWAKVPool``: gpt-oss).

A row of the page table names slots of the other layers' pool. SGLang maps such a slot to one of the
window pool until its token is out of the windows: of a request's own row entries those in front of
its SWA eviction cursor (``kv.get_evicted_seqlen``) have no window slot, and those behind it have
one each. SGLang counts the cursor in row entries and moves it by the request's tokens.

A compaction keeps the last tokens, as many as a window holds. Before it the cursor moves to the
first of these, so only tokens without a window slot are evicted.

With pages of several tokens the cursor stands where a page begins, and ``eviction/window_move.py``
moves the last tokens' KV within the row's window pages. SGLang leaves a row as many of these as a
window and a page fill, so the compacted row has what it needs. Some entries behind the cursor then
have window slots without their KV: those in front of ``KVState.windows_from``. The tree gets none
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.eviction.window_move import WindowMove, WindowPool
from sgl_skipkv.patches.engine.binding import state_of
from sgl_skipkv.request.pages import page_ceil, page_floor
from sgl_skipkv.request.state import RequestState


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
    if state is not None:
        pre_len -= _lag_tokens(batch.tree_cache)
    if evicted_tokens and batch.forward_mode.is_decode():
        from sglang.srt.environ import envs

        pre_len -= evicted_tokens
        least_tokens = max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())
        if pre_len - batch.tree_cache.sliding_window_size < _cursor(req.kv) + least_tokens:
            return
    original(batch, req, pre_len, **options)


def kept_tokens(tree_cache: Any) -> int:
    """How many tokens in front of a row's last one SGLang leaves in the window pool, and those that
    share a page with the first of them."""
    page_tokens = tree_cache.page_size
    tokens: int = page_ceil(max(tree_cache.sliding_window_size, page_tokens), page_tokens)
    return tokens


def _lag_tokens(tree_cache: Any) -> int:
    """Without a radix tree SGLang does not round them up, and a compacted row might need a window
    page that the row in front of the compaction has not."""
    return 0 if tree_cache.supports_prefix_sharing() else unreserved_tokens(tree_cache)


def free_out_of_windows(
    tree_cache: Any, rows: Mapping[RequestState, tuple[Any, int]], window_tokens: int
) -> WindowPool | None:
    """Move the cursor of requests that are compacted to the last ``window_tokens`` of their rows.
    What remains is moved by the compaction; None: nothing is, with pages of one token.

    Args:
        rows: requests with their row lengths.
    """
    allocator, page_tokens = tree_cache.token_to_kv_pool_allocator, tree_cache.page_size
    if not has_window_pool(allocator):
        return None
    allocator.free_group_begin()
    for req, row_tokens in rows.values():
        # SGLang keeps the entries that a query behind this length sees before itself.
        pre_len = row_tokens - window_tokens + tree_cache.sliding_window_size
        pre_len -= _lag_tokens(tree_cache)
        tree_cache.evict_sliding_windows(req, pre_len)
    allocator.free_group_end()
    if page_tokens == 1:
        return None
    kvs = {state: req.kv for state, (req, _) in rows.items()}
    own = {state: kv.swa_dead_lo(page_tokens) for state, kv in kvs.items()}
    spans = {state: (own[state], max(_cursor(kv), own[state])) for state, kv in kvs.items()}
    mapping = allocator.full_to_swa_index_mapping
    return WindowPool(window_buffers(allocator), mapping, window_tokens, spans)


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
            tree_cache.evict_sliding_windows(req, chunk_from - _lag_tokens(tree_cache))


def free_evicted(allocator: Any, kv: Any, slots: Tensor, evicted_tokens: int, first: int) -> None:
    """Give back what a compaction has evicted from a row, and move the cursor with the row;
    with pages of several tokens ``free_moved`` does that.

    Args:
        kv: SGLang's record of the row, as it was before.
        first: entry of the row at which the slots begin.
    """
    if has_window_pool(allocator):
        allocator.free_full_segment(slots, start_pos=first)
        if allocator.page_size == 1:
            set_cursor(kv, _cursor(kv) - evicted_tokens)
    else:
        allocator.free_segment(slots, start_pos=first)


def free_moved(allocator: Any, move: WindowMove, kvs: Sequence[Any]) -> None:
    """Give back the window pages that compacted rows do not need any more, and move the cursors.

    Args:
        kvs: SGLang's records of the rows.
    """
    for kv, row in zip(kvs, move.rows, strict=True):
        allocator.swa_attn_allocator.free_page_ids(row.freed_pages)
        set_cursor(kv, row.first)
        row.state.kv.windows_from = row.moved_from


def free_unmoved(tree_cache: Any, req: Any, state: RequestState) -> None:
    """Move the cursor of a row that is given away behind the pages without the KV of windows."""
    allocator, kv, page_tokens = tree_cache.token_to_kv_pool_allocator, req.kv, tree_cache.page_size
    if not has_window_pool(allocator) or not kv.holds_kv:
        return
    first = max(_cursor(kv), kv.swa_dead_lo(page_tokens))
    stop = page_floor(state.kv.windows_from, page_tokens)
    if stop > first:
        row = tree_cache.req_to_token_pool.req_to_token[kv.req_pool_idx]
        allocator.free_swa_segment(row[first:stop], start_pos=first)
        set_cursor(kv, stop)


def unreserved_tokens(tree_cache: Any) -> int:
    """For a request SGLang's admission reserves a window and a page of the window pool; a restored
    row takes a window in whole pages."""
    if not has_window_pool(tree_cache.token_to_kv_pool_allocator):
        return 0
    return kept_tokens(tree_cache) - int(tree_cache.sliding_window_size)


def alloc_windowed_slots(tree_cache: Any, tokens: int, windowed_tokens: int) -> Tensor:
    """int64 [tokens], new slots from the beginning of a page on, of which the last
    ``windowed_tokens`` have one in the window pool, from the beginning of a page on, too.

    Raises:
        RuntimeError: one of the pools is full.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = tree_cache.token_to_kv_pool_allocator
    whole, windowed_whole = (page_ceil(n, allocator.page_size) for n in (tokens, windowed_tokens))
    missing = max(whole - allocator.full_available_size(), 0)
    windowed_missing = max(windowed_whole - allocator.swa_available_size(), 0)
    if missing or windowed_missing:
        tree_cache.evict_for_alloc(EvictParams(num_tokens=missing, swa_num_tokens=windowed_missing))
    slots = allocator.full_attn_allocator.alloc(whole)
    windowed = allocator.swa_attn_allocator.alloc(windowed_whole)
    if slots is None or windowed is None:
        raise RuntimeError(f"no room to restore {tokens} tokens, {windowed_tokens} with a window")
    own: Tensor = slots[:tokens].to(torch.int64)
    allocator.set_full_to_swa_mapping(own[tokens - windowed_tokens :], windowed[:windowed_tokens])
    return own


def window_rest_of_page(allocator: Any, last: Tensor, rest: Tensor) -> None:
    """Give slots behind the last one of a row the window slots behind its one.

    Args:
        last: int64 [1]; rest: int64 [n], the slots behind it in its page.
    """
    if has_window_pool(allocator):
        windowed = window_slots(allocator, last) + (rest - last)
        allocator.set_full_to_swa_mapping(rest, windowed)


def saved_window_tokens(row_tokens: int, tree_cache: Any) -> int:
    """How many of a row's last tokens have their windows in a backup: those that SGLang keeps, so
    that the restored row can be compacted, too."""
    page_tokens: int = tree_cache.page_size
    first = page_floor(row_tokens - kept_tokens(tree_cache), page_tokens)
    return row_tokens - max(first, 0)


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


def most_saved_tokens(tree_cache: Any) -> int:
    """The most that ``saved_window_tokens`` is."""
    if not has_window_pool(tree_cache.token_to_kv_pool_allocator):
        return 0
    return kept_tokens(tree_cache) + int(tree_cache.page_size) - 1


def place_windows(
    tree_cache: Any, kv: Any, state: RequestState, row_tokens: int, windowed_tokens: int
) -> None:
    """A restored row has window slots for its last ``windowed_tokens``. With pages of several
    tokens some are in front of what its windows see. Their KV may have been gone before."""
    set_cursor(kv, row_tokens - windowed_tokens)
    if tree_cache.page_size > 1:
        seen_from = page_floor(row_tokens - tree_cache.sliding_window_size, tree_cache.page_size)
        state.kv.windows_from = max(state.kv.windows_from, seen_from)


def is_out_of_windows(kv: Any, state: RequestState) -> bool:
    """Whether own entries that the radix tree does not have are in front of the cursor, or of the
    windows whose KV is there: what lies behind them may be less than a window, and a match could
    not end there."""
    return max(_cursor(kv), state.kv.windows_from) > int(kv.cache_protected_len)

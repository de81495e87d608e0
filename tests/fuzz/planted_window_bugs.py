"""Bugs of window layers with a pool of their own: ``planted_bugs.py`` plants them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Changes = dict[Callable[..., Any], dict[str, tuple[str, str]]]


def window_bugs() -> Changes:
    """Our function -> name of a bug -> a piece of its source, and what stands there instead."""
    from sgl_skipkv.eviction.window_move import WindowMove
    from sgl_skipkv.patches.engine import backup, batch, kv_cache, reuse, window_pool

    return {
        window_pool.move_cursor: {
            "SGLang moves the cursor by the request's tokens": (
                "pre_len -= evicted_tokens",
                "pass",
            ),
        },
        batch.compact_due_requests: {
            "what is evicted has slots in the window pool": (
                "free_out_of_windows(batch.tree_cache, rows, binding.limits.model_window_tokens)",
                "None",
            ),
        },
        window_pool.free_out_of_windows: {
            "the next query has no whole window behind a compaction": (
                "row_tokens - window_tokens",
                "row_tokens - window_tokens + 2",
            ),
        },
        kv_cache.release_evicted: {
            "evicted slots are given back as if none had left a window": (
                "free_evicted(allocator, kv, slots, plan.evicted_tokens, first)",
                "allocator.free_segment(slots, start_pos=first)",
            ),
        },
        window_pool.free_evicted: {
            "the cursor does not move with the row": (
                "_cursor(kv) - evicted_tokens",
                "_cursor(kv)",
            ),
            "slots in the window pool are given back twice": (
                "free_full_segment",
                "free_segment",
            ),
        },
        backup._kv_of: {
            "a token of the windows is not backed up": (
                "len(slots) - saved",
                "len(slots) - saved + 1",
            ),
            "the windows are backed up from the first token on": (
                "slots[len(slots) - saved :]",
                "slots[:saved]",
            ),
        },
        backup.restore_row: {
            "the cursor of a restored row is at its beginning": (
                "place_windows(batch.tree_cache, req.kv, state, backup.row_tokens, seen)",
                "pass",
            ),
            "the windows are restored to the first slots": (
                "slots[tokens - seen :]",
                "slots[:seen]",
            ),
            "the windows of a restored row stay empty": (
                "places += [(buffer, last) for buffer in windowed]",
                "places += [(buffer, last[:0]) for buffer in windowed]",
            ),
            "the windows that the tree has are restored over its others": (
                "first_row=saved.shape[0] - at.shape[0]",
                "first_row=matched",
            ),
        },
        window_pool.alloc_windowed_slots: {
            "the first tokens of a restored row have a window": (
                "own[tokens - windowed_tokens :]",
                "own[:windowed_tokens]",
            ),
        },
        # Of pages of several tokens.
        WindowMove.__init__: {
            "windows move one token too far": (
                "slots[row_tokens - pool.window_tokens :]",
                "slots[row_tokens - pool.window_tokens - 1 : -1]",
            ),
        },
        WindowMove.apply: {
            "the windows of a compacted row do not move": ("self._move.apply()", "pass"),
            "slots behind a compacted row stay mapped": (
                "self._slot_of.index_fill_(0, self._old, 0)",
                "pass",
            ),
        },
        window_pool.free_moved: {
            "window pages that a compacted row does not need are kept": (
                "allocator.swa_attn_allocator.free_page_ids(row.freed_pages)",
                "pass",
            ),
            "the cursor of a row in pages does not move with it": (
                "set_cursor(kv, row.first)",
                "pass",
            ),
        },
        window_pool._lag_tokens: {
            "without a radix tree a row has a window page too few": (
                "unreserved_tokens(tree_cache)",
                "0",
            ),
        },
        window_pool.saved_window_tokens: {
            "a restored row has a window page too few": (
                "row_tokens - kept_tokens(tree_cache)",
                "row_tokens - tree_cache.sliding_window_size",
            ),
        },
        kv_cache.fill_last_page: {
            "the rest of a history's last page has no windows": (
                "window_rest_of_page(allocator, page[:1], page[1:])",
                "pass",
            ),
        },
        reuse.copy_history: {
            "what is copied of a history has no windows": (
                "in window_buffers(allocator)",
                "in window_buffers(allocator)[:0]",
            ),
        },
    }

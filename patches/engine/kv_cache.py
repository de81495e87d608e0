"""SGLang's KV pool as compactions and backups read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache as cached
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.eviction.compaction import Compaction
from sgl_skipkv.eviction.due import Due
from sgl_skipkv.patches.engine.binding import KVScale, bound_to
from sgl_skipkv.patches.engine.speculation import is_speculative
from sgl_skipkv.patches.engine.window_pool import (
    alloc_windowed_slots,
    free_evicted,
    free_moved,
    has_window_pool,
    window_rest_of_page,
)
from sgl_skipkv.policy.inputs.paged_cache import PagedCache, picked
from sgl_skipkv.request.pages import page_ceil
from sgl_skipkv.request.state import RequestState

_FLOAT8_NAN = 0x7F  # SGLang stores float8 as bytes


def kv_buffers(allocator: Any) -> list[Tensor]:
    """Keys of every attention layer, then values, [slots, Hkv, d] each, in the type that SGLang
    stores; not of window layers with a pool of their own.

    With MLA the latents of every layer, [slots, 1, r + rotary]: keys that contain their values.
    """
    kv_pool = allocator.get_kvcache()
    return _buffers_of(getattr(kv_pool, "full_kv_pool", kv_pool))


def row_buffers(scheduler: Any) -> list[Tensor]:
    """What the slots of a row hold: ``kv_buffers``, and with speculative decoding the same of the
    draft model's layers, whose pool has the same slots."""
    buffers = kv_buffers(scheduler.token_to_kv_pool_allocator)
    if not is_speculative(scheduler):
        return buffers
    drafting = scheduler.draft_worker.draft_worker.draft_runner
    return buffers + _buffers_of(drafting.token_to_kv_pool)


def _buffers_of(kv_pool: Any) -> list[Tensor]:
    latents = getattr(kv_pool, "kv_buffer", None)
    return [*kv_pool.k_buffer, *kv_pool.v_buffer] if latents is None else [*latents]


def alloc_slots(tree_cache: Any, tokens: int) -> Tensor:
    """int64 [tokens], new slots from the beginning of a page on; the rest of the last page belongs
    to their request, too.

    Raises:
        RuntimeError: the pool is full.
    """
    from sglang.srt.mem_cache.allocation import alloc_token_slots

    if has_window_pool(tree_cache.token_to_kv_pool_allocator):
        return alloc_windowed_slots(tree_cache, tokens, tokens)
    page_tokens = tree_cache.token_to_kv_pool_allocator.page_size
    slots: Tensor = alloc_token_slots(tree_cache, page_ceil(tokens, page_tokens))
    return slots[:tokens]


def fill_last_page(req: Any, req_to_token: Tensor, allocator: Any, row_tokens: int) -> None:
    """Let the row name all slots of its last page, which are its own: the tree has whole pages."""
    row, kv = req_to_token[req.kv.req_pool_idx], req.kv
    slots = page_ceil(row_tokens, allocator.page_size) - row_tokens
    if slots:
        more = torch.arange(1, slots + 1, dtype=row.dtype, device=row.device)
        row[row_tokens : row_tokens + slots] = row[row_tokens - 1] + more
        page = row[row_tokens - 1 : row_tokens + slots].to(torch.int64)
        window_rest_of_page(allocator, page[:1], page[1:])
        kv.kv_allocated_len = max(kv.kv_allocated_len, row_tokens + slots)


def wait_for_forward(req_to_token_pool: Any) -> None:
    """Let the schedule stream wait for the running step; the CPU does not wait."""
    scheduler = bound_to(req_to_token_pool).scheduler
    scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def release_evicted(
    req_to_token_pool: Any,
    allocator: Any,
    done: Sequence[Compaction],
    reqs: Mapping[RequestState, Any],
) -> None:
    """Give the evicted slots back to SGLang, in whole pages and without waiting for the device, and
    shorten its lengths of the compacted rows.

    With ``poison_evicted``, a debug mode, the KV of every slot that holds no token any more becomes
    NaN: a read of it would go unnoticed, because old KV looks valid; NaN spreads to the output
    instead. It is written on the stream of the compactions, which has waited for the running step.
    """
    binding = bound_to(req_to_token_pool)
    if binding.config.poison_evicted:
        poisoned = torch.cat([slots for compaction in done for slots in compaction.vacated])
        for buffer in row_buffers(binding.scheduler):
            nan = float("nan") if buffer.is_floating_point() else _FLOAT8_NAN
            buffer.index_fill_(0, poisoned, nan)  # an assignment would wait for the device
    plans = [plan for compaction in done for plan in compaction.plans]
    freed = [slots for compaction in done for slots in compaction.freed]
    for plan, slots in zip(plans, freed, strict=True):
        kv, first = reqs[plan.state].kv, plan.row_tokens + plan.tail_slots - slots.shape[0]
        free_evicted(allocator, kv, slots, plan.evicted_tokens, first)
        kv.kv_committed_len -= plan.evicted_tokens
        kv.kv_allocated_len -= plan.evicted_tokens
    for move in (one.window_move for one in done if one.window_move is not None):
        free_moved(allocator, move, [reqs[row.state].kv for row in move.rows])


def check_lengths(req: Any, state: RequestState) -> None:
    """Assert what a rewrite of the row relies on."""
    kv = req.kv
    owned_from = state.shared_row_tokens
    behind = kv.kv_allocated_len - kv.kv_committed_len
    assert behind == 0 or (state.runtime.reserved_tokens and behind > 0), (
        f"committed = allocated: {kv.kv_committed_len}, {kv.kv_allocated_len} ({req.rid})"
    )
    assert kv.cache_protected_len <= owned_from, (
        f"the tree owns at most the prompt: {kv.cache_protected_len} > {owned_from} ({req.rid})"
    )
    row = state.held.row
    assert kv.req_pool_idx == row, f"row: expected {row}, got {kv.req_pool_idx} ({req.rid})"


def paged_cache(req_to_token_pool: Any, allocator: Any) -> PagedCache | None:
    """The cached keys and values of the scored layers in place, for Triton kernels; None where none
    run."""
    kv_pool, binding = allocator.get_kvcache(), bound_to(req_to_token_pool)
    scored, first = binding.scored_layers, kv_pool.start_layer
    layers = [kv_pool.get_key_buffer(first + i) for i in scored]
    values = [kv_pool.get_value_buffer(first + i) for i in scored]
    of_keys, of_values = (
        None if scale is None else [*map(scale, scored)] for scale in binding.kv_scales
    )
    return PagedCache.of(layers, req_to_token_pool.req_to_token, of_keys, values, of_values)


def due_of(
    req: Any,
    state: RequestState,
    row_tokens: int,
    req_to_token_pool: Any,
    allocator: Any,
    cache: PagedCache | None,
) -> Due:
    """The planner's input for a request, up to a length of its row."""
    generated = req.output_ids
    uncounted_tokens = state.prompt.uncounted_tokens
    if uncounted_tokens < state.prompt.tokens:  # a history counts as generated
        generated = state.logical_prompt(req.origin_input_ids)[uncounted_tokens:] + generated
    kv_pool, binding = allocator.get_kvcache(), bound_to(req_to_token_pool)
    row = req_to_token_pool.req_to_token[req.kv.req_pool_idx, :row_tokens]
    slots = cached(lambda: row.to(torch.int64))  # on first use: kernels read keys in place

    def of_layer(buffer: Callable[[int], Tensor], scale: KVScale | None, place: int) -> Tensor:
        """float [row tokens, Hkv, d], in row order; float8 is dequantised to float32."""
        layer = binding.scored_layers[place]
        stored = buffer(layer + kv_pool.start_layer)
        return picked(stored, slots(), None if scale is None else scale(layer))

    tail_slots = req.kv.kv_allocated_len - row_tokens
    of_keys, of_values = binding.kv_scales
    keys = partial(of_layer, kv_pool.get_key_buffer, of_keys)
    values = partial(of_layer, kv_pool.get_value_buffer, of_values)
    return Due(state, row_tokens, generated, keys, values, cache, tail_slots)

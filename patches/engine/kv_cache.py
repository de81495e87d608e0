"""SGLang's KV pool as compactions and backups read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.eviction.due import Due
from sgl_skipkv.patches.engine.binding import Binding, KeyScale, binding_of
from sgl_skipkv.policy.base import PagedCache
from sgl_skipkv.request.state import RequestState

_FLOAT8_NAN = 0x7F  # SGLang stores float8 as bytes


def kv_buffers(allocator: Any) -> list[Tensor]:
    """Keys of every layer, then values, [slots, Hkv, d] each, in the type that SGLang stores."""
    kv_pool = allocator.get_kvcache()
    return [*kv_pool.k_buffer, *kv_pool.v_buffer]


def copy_slots(allocator: Any, source: Tensor, target: Tensor) -> None:
    """Copy the KV of these slots to others. source, target: int64 [n], with no slot in common."""
    for buffer in kv_buffers(allocator):
        buffer[target] = buffer[source]


def wait_for_forward(req_to_token_pool: Any) -> None:
    """Let the schedule stream wait for the running step; the CPU does not wait."""
    binding = binding_of(req_to_token_pool)
    if binding is not None:
        binding.scheduler.schedule_stream.wait_stream(binding.scheduler.forward_stream)


def poison(allocator: Any, freed: Sequence[Tensor]) -> None:
    """Make the KV of evicted slots NaN (``poison_evicted``, a debug mode).

    A read of a freed slot would go unnoticed, because old KV looks valid; NaN spreads to the output
    instead. Runs on the stream of the compaction, which has waited for the running step.

    Args:
        freed: int64 [evicted] each, slots.
    """
    slots = torch.cat(list(freed))
    for buffer in kv_buffers(allocator):
        buffer[slots] = float("nan") if buffer.is_floating_point() else _FLOAT8_NAN


def free_evicted(binding: Binding, allocator: Any, freed: Sequence[Tensor]) -> None:
    """Give the slots of a compaction back to SGLang. freed: int64 [evicted] each."""
    if binding.config.poison_evicted:
        poison(allocator, freed)
    for slots in freed:
        allocator.free(slots)


def check_lengths(req: Any, state: RequestState, seq_len: int) -> None:
    """Assert what a rewrite of the row relies on."""
    kv = req.kv
    owned_from = state.shared_row_tokens
    assert kv.kv_committed_len == kv.kv_allocated_len == seq_len, (
        f"committed = allocated = sequence length: {kv.kv_committed_len}, "
        f"{kv.kv_allocated_len}, {seq_len} ({req.rid})"
    )
    assert kv.cache_protected_len <= owned_from, (
        f"the tree owns at most the prompt: {kv.cache_protected_len} > {owned_from} ({req.rid})"
    )
    row = state.held.row
    assert kv.req_pool_idx == row, f"row: expected {row}, got {kv.req_pool_idx} ({req.rid})"


def shorten_row(req: Any, evicted_tokens: int) -> None:
    """SGLang's lengths of a row that was compacted: one slot holds the KV of one token."""
    req.kv.kv_committed_len -= evicted_tokens
    req.kv.kv_allocated_len -= evicted_tokens


def paged_cache(req_to_token_pool: Any, allocator: Any) -> PagedCache | None:
    """The cached keys in place, for Triton kernels; None where none run."""
    kv_pool = allocator.get_kvcache()
    first = kv_pool.start_layer
    layers = [kv_pool.get_key_buffer(first + i) for i in range(kv_pool.layer_num)]
    key_scale = _key_scale(req_to_token_pool)
    scales = None if key_scale is None else [*map(key_scale, range(len(layers)))]
    return PagedCache.of(layers, req_to_token_pool.req_to_token, scales)


def due_of(batch: Any, i: int, state: RequestState, cache: PagedCache | None) -> Due:
    """The planner's input for request i of a batch."""
    req, pages = batch.reqs[i], batch.req_to_token_pool
    allocator, row_tokens = batch.token_to_kv_pool_allocator, req.kv.kv_allocated_len
    generated = req.output_ids
    if state.prompt_tokens < state.request_tokens:  # a history counts as generated
        generated = state.logical_prompt(req.origin_input_ids)[state.prompt_tokens :] + generated
    return Due(state, row_tokens, generated, _keys_of(req, row_tokens, pages, allocator), cache)


def due_at(
    req: Any, state: RequestState, row_tokens: int, req_to_token_pool: Any, allocator: Any
) -> Due:
    """The planner's input for the statistics of a request, up to a length of its row."""
    keys = _keys_of(req, row_tokens, req_to_token_pool, allocator)
    return Due(state, row_tokens, (), keys, paged_cache(req_to_token_pool, allocator))


def _keys_of(req: Any, row_tokens: int, pages: Any, allocator: Any) -> Callable[[int], Tensor]:
    """A request's cached keys by layer."""
    kv_pool, key_scale = allocator.get_kvcache(), _key_scale(pages)
    row = pages.req_to_token[req.kv.req_pool_idx, :row_tokens]
    slots = cached(lambda: row.to(torch.int64))  # on first use: kernels read keys in place

    def keys(layer: int) -> Tensor:
        """float [row tokens, Hkv, d], in row order; float8 keys are dequantised to float32."""
        stored: Tensor = kv_pool.get_key_buffer(layer + kv_pool.start_layer)
        if key_scale is None:
            return stored[slots()]
        picked = stored.view(kv_pool.store_dtype)[slots()].view(stored.dtype)
        return picked.float() * key_scale(layer)

    return keys


def _key_scale(req_to_token_pool: Any) -> KeyScale | None:
    binding = binding_of(req_to_token_pool)
    return None if binding is None else binding.key_scale

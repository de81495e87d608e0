"""SGLang's KV pool as compactions and backups read it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.eviction.due import Due
from sgl_skipkv.patches.engine.binding import KeyScale, binding_of
from sgl_skipkv.policy.base import PagedCache
from sgl_skipkv.request.state import RequestState

_FLOAT8_NAN = 0x7F  # SGLang stores float8 as bytes


def kv_buffers(allocator: Any) -> list[Tensor]:
    """Keys of every layer, then values, [slots, Hkv, d] each, in the type that SGLang stores."""
    kv_pool = allocator.get_kvcache()
    return [*kv_pool.k_buffer, *kv_pool.v_buffer]


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
    req = batch.reqs[i]
    kv_pool = batch.token_to_kv_pool_allocator.get_kvcache()
    pages = batch.req_to_token_pool
    keys = _KeyReader(kv_pool, pages.req_to_token, req.kv, _key_scale(pages))
    return Due(state, req.kv.kv_allocated_len, req.output_ids, keys, cache)


def _key_scale(req_to_token_pool: Any) -> KeyScale | None:
    binding = binding_of(req_to_token_pool)
    return None if binding is None else binding.key_scale


class _KeyReader:
    """layer -> float [row tokens, Hkv, d], one request's cached keys in row order; float8 keys are
    dequantised to float32."""

    def __init__(
        self, kv_pool: Any, req_to_token: Tensor, kv: Any, key_scale: KeyScale | None
    ) -> None:
        self._kv_pool, self._key_scale = kv_pool, key_scale
        self._row = req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]

    @cached_property
    def _slots(self) -> Tensor:
        # Computed on first use: kernels read keys in place.
        return self._row.to(torch.int64)

    def __call__(self, layer: int) -> Tensor:
        keys: Tensor = self._kv_pool.get_key_buffer(layer + self._kv_pool.start_layer)
        if self._key_scale is None:
            return keys[self._slots]
        stored = keys.view(self._kv_pool.store_dtype)[self._slots].view(keys.dtype)
        return stored.float() * self._key_scale(layer)

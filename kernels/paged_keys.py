"""A batch of requests and the pages their keys lie in, as the scoring kernels are told about them.

Keys never move for scoring: entry ``i`` of a request's row of the page table names the slot that
holds the keys of its i-th cached token, in the K buffer of every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.on_device import KEY_NAMES, TRITON_NAMES, kernels_read

_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
#: float8 dtype -> its exponent bits. Loaded as bytes, because sm_80 knows no such type.
_EXPONENT_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


@triton.jit
def widened(keys, FLOAT8: tl.constexpr):
    """Keys as they are computed with: bytes of float8 as float16, exactly; all others as they are.

    Args:
        FLOAT8: exponent bits of the float8 type, 4 (e4m3, without infinities) or 5 (e5m2), or 0.
    """
    if FLOAT8 == 5:  # the upper byte of a float16
        keys = (keys.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    if FLOAT8 == 4:  # an exponent of one bit less, whose bias is less by 8
        bits = keys.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True) * 256.0
        keys = tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return keys


@dataclass(frozen=True)
class PagedKeys:
    """Requests that are scored together. Nothing here is changed, and no shape is read back.

    Attributes:
        layer: float16, bfloat16, float32 or float8 (e4m3fn, e5m2) [slots, Hkv, d], any layer's
            rotated keys: only shape, strides and dtype count. d: a power of two, at least 16; its
            stride 1.
        k_ptrs: int64 [L], address of every layer's keys, laid out as ``layer``, 16-byte aligned;
            their owner keeps them.
        req_to_token: int32 [table rows, width], slot of each cached token; columns contiguous.
        rows: int64 [B], each request's row of it.
        row_tokens: cached tokens of each request.
        offsets: int64 [B + 1], ``row_tokens`` summed from 0.
        k_scales: float32 [L], what each layer's cached numbers are to be multiplied with; None: 1.

    Raises:
        ValueError: keys that the kernels cannot read.
    """

    layer: Tensor
    k_ptrs: Tensor
    req_to_token: Tensor
    rows: Tensor
    row_tokens: Sequence[int]
    offsets: Tensor
    k_scales: Tensor | None = None

    def __post_init__(self) -> None:
        if self.layer.dtype not in KEY_NAMES:
            raise ValueError(f"layer: expected one of {[*KEY_NAMES]}, got {self.layer.dtype}")
        if not kernels_read(self.head_dim) or self.layer.stride(2) != 1:
            raise ValueError(
                f"layer: expected contiguous heads of 16, 32, ... 256 numbers, got "
                f"{self.head_dim} with stride {self.layer.stride(2)}"
            )
        if any(stride * self.layer.itemsize % 16 for stride in self.layer.stride()[:2]):
            raise ValueError(
                f"layer: expected strides that keep heads aligned to 16 bytes, got "
                f"{[*self.layer.stride()]} numbers of {self.layer.itemsize}"
            )
        if self.k_scales is not None and self.k_scales.shape != (self.layers,):
            raise ValueError(
                f"k_scales: expected one per layer, [{self.layers}], got {[*self.k_scales.shape]}"
            )
        counts = (len(self.row_tokens), self.rows.shape[0], self.offsets.shape[0] - 1)
        if len({*counts}) > 1:
            raise ValueError(
                f"row_tokens, rows, offsets: expected one number of requests, got {counts}"
            )

    @property
    def layers(self) -> int:
        return self.k_ptrs.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.layer.shape[1]

    @property
    def head_dim(self) -> int:
        return self.layer.shape[2]

    @property
    def device(self) -> torch.device:
        return self.layer.device

    @property
    def tasks(self) -> int:
        """One per request, layer and KV head, in this order: the heads of a slot lie together."""
        return len(self.row_tokens) * self.layers * self.kv_heads

    @property
    def columns(self) -> int:
        """Cached tokens of all requests."""
        return sum(self.row_tokens)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """k_ptrs, req_to_token, rows, offsets, page_stride"""
        stride = self.req_to_token.stride(0)
        return self.k_ptrs, self.req_to_token, self.rows, self.offsets, stride

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "LAYERS": self.layers,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "K_SLOT_STRIDE": self.layer.stride(0),
            "K_HEAD_STRIDE": self.layer.stride(1),
            "K_TYPE": _TRITON_TYPES.get(self.layer.dtype, tl.uint8),
            "FLOAT8": _EXPONENT_BITS.get(self.layer.dtype, 0),
        }

    def check_queries(self, queries: Tensor) -> None:
        """Refuse a ring of queries, [L, tracks, R, Hq, d], that does not fit these keys.

        Raises:
            ValueError: another dtype, shape or stride.
        """
        layers, _, _, query_heads, head_dim = queries.shape
        wide = self.layer.dtype in TRITON_NAMES
        dtypes = [self.layer.dtype] if wide else [*TRITON_NAMES]
        if (
            queries.dtype not in dtypes
            or (layers, head_dim, queries.stride(4)) != (self.layers, self.head_dim, 1)
            or query_heads % self.kv_heads
        ):
            raise ValueError(
                f"queries: expected {dtypes} [{self.layers}, tracks, R, a multiple of "
                f"{self.kv_heads}, {self.head_dim}], got {queries.dtype} {[*queries.shape]}"
            )

    def programs(self, per_processor: int) -> int:
        """How many persistent programs share the tasks: so many on each multiprocessor, a handful
        where there is no GPU."""
        programs = 4
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            programs = per_processor * properties.multi_processor_count
        return min(self.tasks, programs)

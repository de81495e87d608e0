"""A batch of requests and the pages their keys lie in, as the scoring kernels are told about them.

Keys never move for scoring: entry ``i`` of a request's row of the page table names the slot that
holds the keys of its i-th cached token, in the K buffer of every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from sgl_skipkv.kernels.compile_case import TRITON_NAMES
from sgl_skipkv.kernels.on_device import kernels_read

_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
SIGNATURE = {
    **dict.fromkeys(("k_ptrs", "rows", "offsets"), "*i64"),
    "req_to_token": "*i32",
    "page_stride": "i32",
}
"""Triton's types of what ``PagedKeys.arguments`` passes."""


@dataclass(frozen=True)
class PagedKeys:
    """Requests that are scored together. Nothing here is changed, and no shape is read back.

    Attributes:
        layer: float16, bfloat16 or float32 [slots, Hkv, d], any layer's rotated keys: only shape,
            strides and dtype count. d: a power of two, at least 16; its stride 1.
        k_ptrs: int64 [L], address of every layer's keys, laid out as ``layer``, 16-byte aligned;
            their owner keeps them.
        req_to_token: int32 [table rows, width], slot of each cached token; columns contiguous.
        rows: int64 [B], each request's row of it.
        row_tokens: cached tokens of each request.
        offsets: int64 [B + 1], ``row_tokens`` summed from 0.

    Raises:
        ValueError: keys that the kernels cannot read.
    """

    layer: Tensor
    k_ptrs: Tensor
    req_to_token: Tensor
    rows: Tensor
    row_tokens: Sequence[int]
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.layer.dtype not in _TRITON_TYPES:
            raise ValueError(f"layer: expected one of {[*TRITON_NAMES]}, got {self.layer.dtype}")
        if not kernels_read(self.head_dim) or self.layer.stride(2) != 1:
            raise ValueError(
                f"layer: expected contiguous heads of 16, 32, 64, ... numbers, got "
                f"{self.head_dim} with stride {self.layer.stride(2)}"
            )
        if self.layer.stride(0) % 8 or self.layer.stride(1) % 8:
            raise ValueError(
                f"layer: expected strides that keep heads aligned to 8 numbers, got "
                f"{[*self.layer.stride()]}"
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
            "K_TYPE": _TRITON_TYPES[self.layer.dtype],
        }

    def programs(self, wanted: int | None, per_processor: int) -> int:
        """How many persistent programs share the tasks.

        Args:
            wanted: as many, whatever the device; None: ``per_processor`` on each multiprocessor, a
                handful where there is no GPU.
        """
        if wanted is None and self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            wanted = per_processor * properties.multi_processor_count
        return min(self.tasks, wanted or 4)


def example_constants(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """``PagedKeys.constants`` of a model of 28 layers and 4 KV heads, R1-Qwen-7B with d 128."""
    layer = torch.empty(0, 4, head_dim, dtype=dtype, device="meta")
    none, pointers = torch.empty(0, device="meta"), torch.empty(28, device="meta")
    return PagedKeys(layer, pointers, none, none, (), torch.empty(1, device="meta")).constants

"""Decode attention over a paged cache: FlashInfer or SGLang's Triton kernel on a GPU, else torch.

``plan`` is told how long the rows of the page table are; ``run`` then computes one layer at a time,
and a CUDA graph may capture it. ``plan`` comes before every replay, when the last one is finished:
FlashInfer copies from a host buffer that its next plan overwrites.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor

#: SGLang's for models with 7 query heads per KV head, and its default
FLASHINFER_WORKSPACE_BYTES, TRITON_SPLITS = 512 << 20, 8


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int


def entries(row_tokens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [sum], row and column of every entry in use of a page table, row after row."""
    total, counts = sum(row_tokens), device_tensor(row_tokens, device)
    row = torch.arange(len(row_tokens), device=device)
    row = torch.repeat_interleave(row, counts, output_size=total)
    firsts = device_tensor([0, *accumulate(row_tokens)][:-1], device)
    return row, torch.arange(total, device=device) - firsts[row]


class DecodeAttention(ABC):
    """One query per row against the row's cached tokens.

    Args:
        req_to_token: int32 [B, width], read at every plan.
        capacity_tokens: most cached tokens of all rows together.
    """

    name: ClassVar[str]
    distribution: ClassVar[str]

    def __init__(
        self, req_to_token: Tensor, heads: Heads, dtype: torch.dtype, capacity_tokens: int
    ) -> None:
        self.req_to_token, self.heads, self.dtype = req_to_token, heads, dtype
        self.capacity_tokens = capacity_tokens
        self.device = req_to_token.device

    @classmethod
    def described(cls) -> str:
        """Name and version, for a row."""
        return f"{cls.name} {metadata.version(cls.distribution)}"

    @abstractmethod
    def plan(self, row_tokens: Sequence[int]) -> None:
        """The rows' lengths, and what they name, from now on."""

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, Hq, d] of q [B, Hq, d] and one layer's k, v [slots, Hkv, d]."""

    def _slots(self, row_tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """int32 [B + 1] on the host, where each row starts; int32 [sum], slots of all rows."""
        offsets = torch.tensor([0, *accumulate(row_tokens)], dtype=torch.int32)
        return offsets, self.req_to_token[entries(row_tokens, self.device)]


class FlashInferDecode(DecodeAttention):
    name, distribution = "flashinfer", "flashinfer-python"

    def __init__(
        self, req_to_token: Tensor, heads: Heads, dtype: torch.dtype, capacity_tokens: int
    ) -> None:
        super().__init__(req_to_token, heads, dtype, capacity_tokens)
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        rows = req_to_token.shape[0]
        integers = {"dtype": torch.int32, "device": self.device}
        self._last_page_tokens = torch.ones(rows, dtype=torch.int32)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,  # SGLang's choice from 4 query heads per KV head on
            paged_kv_indptr_buffer=torch.zeros(rows + 1, **integers),
            paged_kv_indices_buffer=torch.zeros(capacity_tokens, **integers),
            paged_kv_last_page_len_buffer=torch.zeros(rows, **integers),
            backend="fa2",
        )

    def plan(self, row_tokens: Sequence[int]) -> None:
        types = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        self._wrapper.plan(
            *(*self._slots(row_tokens), self._last_page_tokens, *self.heads, 1), **types
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._wrapper.run(q, (k.unsqueeze(1), v.unsqueeze(1)))  # pages of one token
        return out


class SGLangTritonDecode(DecodeAttention):
    name, distribution = "sglang-triton", "sglang"

    def __init__(
        self, req_to_token: Tensor, heads: Heads, dtype: torch.dtype, capacity_tokens: int
    ) -> None:
        super().__init__(req_to_token, heads, dtype, capacity_tokens)
        rows = req_to_token.shape[0]
        partial = (rows, heads.query, TRITON_SPLITS)
        self._offsets = torch.zeros(rows + 1, dtype=torch.int32, device=self.device)
        self._cached = torch.zeros(capacity_tokens, dtype=torch.int64, device=self.device)
        self._logits = torch.empty(*partial, heads.dim, device=self.device)
        self._normalisers = torch.empty(partial, device=self.device)
        self._splits = torch.ones(rows, dtype=torch.int32, device=self.device)

    def plan(self, row_tokens: Sequence[int]) -> None:
        import triton
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        offsets, slots = self._slots(row_tokens)
        self._offsets.copy_(offsets)
        self._cached[: slots.shape[0]] = slots
        processors = 1
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        lengths = device_tensor(row_tokens, self.device)
        rows, padded = len(row_tokens), max(256, triton.next_power_of_2(len(row_tokens)))
        get_num_kv_splits_triton[(1,)](
            *(self._splits, lengths, rows, 1, self.heads.query, self.heads.kv),
            *(TRITON_SPLITS, processors),
            MAX_NUM_SEQ=padded,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

        out = torch.empty_like(q)
        decode_attention_fwd(
            *(q, k, v, out, self._offsets, self._cached, self._logits, self._normalisers),
            *(self._splits, TRITON_SPLITS, self.heads.dim**-0.5, 1.0, 1.0),
        )
        return out


class TorchDecode(DecodeAttention):
    name = distribution = "torch"

    def plan(self, row_tokens: Sequence[int]) -> None:
        self._rows = [self.req_to_token[b, :n].long() for b, n in enumerate(row_tokens)]

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for own, slots in zip(q, self._rows, strict=True):
            keys, values = (part[slots].transpose(0, 1) for part in (k, v))
            outs.append(F.scaled_dot_product_attention(own[:, None], keys, values, enable_gqa=True))
        return torch.stack(outs).squeeze(2)


BACKENDS = {one.name: one for one in (FlashInferDecode, SGLangTritonDecode, TorchDecode)}


def backend_for(device: torch.device, name: str | None) -> type[DecodeAttention] | None:
    """The named one; else what is installed for a GPU, if anything is, and torch for a CPU."""
    if name is not None:
        return BACKENDS[name]
    if device.type == "cpu":
        return TorchDecode
    for backend, package in ((FlashInferDecode, "flashinfer"), (SGLangTritonDecode, "sglang")):
        if find_spec(package) is not None:
            return backend
    return None

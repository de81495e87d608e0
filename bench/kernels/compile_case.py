"""One variant of a kernel as its launcher compiles it, and what the variants of several kernels
share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_skipkv.kernels.on_device import TRITON_NAMES
from sgl_skipkv.kernels.paged_keys import PagedKeys

#: dtype of keys and head size
COMPILED = (
    *((dtype, head_dim) for dtype in TRITON_NAMES for head_dim in (128, 64)),
    (torch.bfloat16, 256),
    *((torch.float8_e4m3fn, head_dim) for head_dim in (128, 64)),
    (torch.float8_e5m2, 128),
)
#: Triton's types of what ``PagedKeys.arguments`` passes
PAGED = {
    **dict.fromkeys(("k_ptrs", "rows", "offsets"), "*i64"),
    "req_to_token": "*i32",
    "page_stride": "i32",
}


@dataclass(frozen=True)
class CompileCase:
    """One variant of one kernel.

    Attributes:
        name: of the variant, unique among those of its module, such as ``bf16-d128``.
        function: the ``triton.jit`` function that is launched.
        signature: type of each run-time argument by name, in Triton's words: ``*bf16``, ``*i64``,
            ``*i1`` (bool), ``*u8``, ``i32``, ``i64``, ``fp32``.
        constexprs: value of each ``tl.constexpr`` argument by name. An argument for which a launch
            passes the integer 1 (a stride, say) or None belongs here as well: Triton makes it a
            constant.
        aligned: integer arguments that are multiples of 16 in a launch. Pointers always count as
            aligned to 16 bytes, as whole torch tensors are.
        num_warps, num_stages: as the launcher passes them; Triton's own defaults are 4 and 3.
        options: what else the launcher passes to Triton, such as ``enable_fp_fusion``.
        max_registers: of a thread, by architecture (80, 90, 100), where the launcher sets a limit.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    aligned: tuple[str, ...] = field(default=())
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    max_registers: Mapping[int, int] = field(default_factory=dict)


def paged_constants(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """``PagedKeys.constants`` of a model of 28 layers and 4 KV heads, R1-Qwen-7B with d 128."""
    layer = torch.empty(0, 4, head_dim, dtype=dtype, device="meta")
    none, pointers = torch.empty(0, device="meta"), torch.empty(28, device="meta")
    return PagedKeys(layer, pointers, none, none, (), torch.empty(1, device="meta")).constants

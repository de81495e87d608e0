"""One variant of a kernel as the offline compiler needs it: types, constants and launch options.

Every kernel module has ``compile_cases()``, which lists the variants that its launcher uses most;
``bench/kernels/compile.py`` compiles them for several architectures on any machine, and a test
keeps them free of register spills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TRITON_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Float dtype -> how Triton's signatures call it."""
KEY_NAMES = {**TRITON_NAMES, torch.float8_e4m3fn: "fp8e4m3", torch.float8_e5m2: "fp8e5m2"}
"""Dtype of cached keys -> what its variants are called. float8 is loaded as bytes."""


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

"""The variants of the kernels of a step: see ``compile_cases.py``."""

from __future__ import annotations

from itertools import product

from bench.kernels.compile_case import CompileCase
from sgl_skipkv.kernels import ring_write, sentence_step, steering_add
from sgl_skipkv.kernels.on_device import TRITON_NAMES


def ring_write_cases() -> list[CompileCase]:
    """Query and ring of one dtype, as in a server."""
    return [
        CompileCase(
            name=name,
            function=ring_write._ring_write_kernel,
            signature={
                "q": f"*{name}",
                "tracks": "*i64",
                "positions": "*i64",
                "ring": f"*{name}",
                "q_stride": "i32",
                "window": "i32",
                "width": "i32",
            },
            constexprs={"BLOCK": ring_write._BLOCK},
            aligned=("q_stride", "width"),
            num_warps=ring_write._WARPS,
        )
        for name in TRITON_NAMES.values()
    ]


def sentence_step_cases() -> list[CompileCase]:
    """Hidden sizes of R1-Qwen-7B, R1-Llama-8B and a wide one; one token per track, and several."""
    cases = []
    sizes = (("bf16", 3584), ("fp16", 4096), ("fp32", 8192))
    for (name, width), several in product(sizes, (False, True)):
        options = sentence_step._options(width)
        cases.append(
            CompileCase(
                name=f"{name}-D{width}" + several * "-several",
                function=sentence_step._sentence_step_kernel,
                signature={
                    "hidden": f"*{name}",
                    **dict.fromkeys(("tracks", "token_ids", "index"), "*i64"),
                    **dict.fromkeys(("bits", "preset"), "*u8"),
                    **dict.fromkeys(("total", "length"), "*fp32"),
                    "vectors": f"*{name}",
                    "after_delimiter": "*i1",
                    **dict.fromkeys(("hidden_stride", "width", "capacity"), "i32"),
                    **({"steps": "i32"} if several else {}),
                },
                constexprs={"BLOCK": options["BLOCK"], **({} if several else {"steps": 1})},
                aligned=("hidden_stride", "width"),
                num_warps=options["num_warps"],
            )
        )
    return cases


def steering_add_cases() -> list[CompileCase]:
    """A residual of each dtype."""
    return [
        CompileCase(
            name=name,
            function=steering_add._steering_add_kernel,
            signature={
                "residual": f"*{name}",
                "vector": "*fp32",
                "rows": "*i64",
                "token_ids": "*i64",
                "bits": "*u8",
                "steered": "*i1",
                "alpha_0": "*fp32",
                "nonexecution": "*i32",
                "keyword_seen": "*i1",
                "thinking": "*i1",
                "gamma": "fp32",
                "residual_stride": "i32",
                "width": "i32",
            },
            constexprs={"BLOCK": steering_add._BLOCK},
            aligned=("residual_stride", "width"),
            num_warps=steering_add._WARPS,
            options=steering_add._OPTIONS,
        )
        for name in TRITON_NAMES.values()
    ]

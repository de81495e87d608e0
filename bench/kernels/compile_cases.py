"""The variants of every kernel that its launcher uses most: types, constants and launch options.
Those of a compaction's kernels are here, those of a step's in ``compile_step_cases.py``.

``bench/kernels/compile.py`` compiles them for several architectures on any machine, and a test
keeps them free of register spills. Constants and options are the launchers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.kernels.compile_case import COMPILED, PAGED, CompileCase, paged_constants
from bench.kernels.compile_step_cases import (
    ring_write_cases,
    sentence_step_cases,
    steering_add_cases,
)
from sgl_skipkv.kernels import (
    distinct_values,
    key_redundancy,
    kv_move,
    last_similar,
    row_compaction,
    selection,
    sentence_redundancy,
    sentence_scores,
    step_attention,
    window_attention,
)
from sgl_skipkv.kernels.on_device import KEY_NAMES, TRITON_NAMES


def key_redundancy_cases() -> list[CompileCase]:
    """Every type of keys and size of heads, and the mean over the heads of R1-Qwen-7B."""
    cases = []
    signature = {
        **PAGED,
        **dict.fromkeys(("inverse_norms", "unit_sums"), "*fp32"),
        "sums": "*i64",
        **dict.fromkeys(("columns", "tasks"), "i32"),
    }
    bounded = {**signature, "inverse_norm_bounds": "*fp32", "bounds_stride": "i32"}
    both = {"last_similar": "*i32", "normalisers": "*fp32"}
    for dtype, head_dim in COMPILED:
        constants = paged_constants(dtype, head_dim)
        blocks, (many, few) = key_redundancy._blocks(dtype)
        tag = f"{KEY_NAMES[dtype]}-d{head_dim}"
        norms, sums = ({**constants, "BLOCK": block} for block in blocks)
        sums["SUM_BLOCK"] = key_redundancy._SUM_BLOCK
        cases += [
            CompileCase(
                *(f"{tag}-norms", key_redundancy._norms_kernel, bounded, norms, (), many),
                max_registers=key_redundancy._max_registers(dtype, head_dim),
            ),
            CompileCase(
                f"{tag}-sums",
                key_redundancy._column_sums_kernel,
                signature | both,
                sums,
                (),
                few,
            ),
        ]
    signature = {"sums": "*i64", "offsets": "*i64", "columns": "i32", "blocks": "i32"}
    signature |= dict.fromkeys(("normalisers", "out"), "*fp32")
    return [
        *cases,
        CompileCase(
            "mean",
            key_redundancy._mean_kernel,
            signature,
            {"HEADS": 112, **key_redundancy._MEAN},
        ),
    ]


def distinct_values_cases() -> list[CompileCase]:
    """Every type of values and size of heads."""
    cases = []
    means = PAGED | {"firsts": "*i64", "inverse_means": "*fp32", "tasks": "i32"}
    varying = dict.fromkeys(("blocks", "compared_from", "compared_to"), "i32")
    sizes = dict.fromkeys(("inverse_means", "weights", "sizes", "squares"), "*fp32")
    sizes |= {"distances": "*fp32", "firsts": "*i64"}
    nearest = dict.fromkeys(("inverse_means", "squares", "distances"), "*fp32")
    nearest |= {"later_blocks": "i32", "firsts": "*i64"}
    signatures = [means, PAGED | sizes | varying, PAGED | nearest | varying]
    for signature in signatures:
        signature["v_ptrs"] = signature.pop("k_ptrs")
    functions = (
        *(distinct_values._mean_lengths_kernel, distinct_values._sizes_kernel),
        distinct_values._nearest_later_kernel,
    )
    for dtype, head_dim in COMPILED:
        constants, tag = paged_constants(dtype, head_dim), f"{KEY_NAMES[dtype]}-d{head_dim}"
        first = distinct_values._options(dtype)
        second = {**first, "BLOCK": distinct_values._sizes_block(dtype, head_dim)}
        last = {"SAME": 2.0**-12, **distinct_values._nearest_options(dtype, head_dim)}
        names, options = ("means", "sizes", "nearest"), (first, second, last)
        for name, function, signature, own in zip(
            names, functions, signatures, options, strict=True
        ):
            launch: dict[str, Any] = {one: own.pop(one) for one in ("num_warps", "num_stages")}
            if name == "nearest":
                launch["max_registers"] = distinct_values._MAX_REGISTERS
            cases.append(
                CompileCase(f"{tag}-{name}", function, signature, constants | own, **launch)
            )
    return cases


def kv_move_cases() -> list[CompileCase]:
    """Of slots of 8 heads of 128 16-bit numbers, of latents of 576 such numbers, and of slots whose
    bytes are an odd number of words."""
    int64 = ("pointers", "rows", "firsts", "kept", "kept_offsets")
    return [
        CompileCase(
            name=f"slots-of-{slot_bytes}",
            function=kv_move._move_kv_kernel,
            signature={
                "req_to_token": "*i32",
                **dict.fromkeys(int64, "*i64"),
                "row_stride": "i32",
            },
            constexprs=kv_move.SlotBuffers(torch.empty(0), slot_bytes, slot_bytes).constants,
            num_warps=kv_move._WARPS,
            num_stages=1,
        )
        for slot_bytes in (2048, 1152, 516)
    ]


def row_compaction_cases() -> list[CompileCase]:
    """All types are fixed: rows whose slots change, and rows whose KV was moved."""
    int64 = (
        *("rows", "kept", "kept_offsets", "evicted", "evicted_offsets"),
        *("positions", "freed", "kept_positions"),
    )
    return [
        CompileCase(
            name=name,
            function=row_compaction._compact_rows_kernel,
            signature={
                "req_to_token": "*i32",
                **dict.fromkeys(int64, "*i64"),
                "row_stride": "i32",
            },
            constexprs={"SLOTS_STAY": slots_stay, "BLOCK": row_compaction._BLOCK},
            num_warps=row_compaction._WARPS,
            num_stages=1,
        )
        for name, slots_stay in (("int32-rows", False), ("pages", True))
    ]


def sentence_redundancy_cases() -> list[CompileCase]:
    """One per type of the stored vectors."""
    return [
        CompileCase(
            name=name,
            function=sentence_redundancy._raise_redundancy_kernel,
            signature={
                "vectors": f"*{name}",
                "redundancy": "*fp32",
                **dict.fromkeys(("tracks", "counts"), "*i64"),
                **dict.fromkeys(("width", "capacity"), "i32"),
            },
            constexprs={
                "TILE": sentence_redundancy._TILE,
                "TILE_DEPTH": sentence_redundancy._TILE_DEPTH,
            },
            aligned=("width",),
        )
        for name in TRITON_NAMES.values()
    ]


def last_similar_cases() -> list[CompileCase]:
    """Every type of keys and size of heads."""
    cases = []
    signature = {
        **PAGED,
        **dict.fromkeys(("inverse_norms", "inverse_norm_bounds", "thresholds"), "*fp32"),
        "last_similar": "*i32",
        **dict.fromkeys(last_similar._VARYING, "i32"),
    }
    for dtype, head_dim in COMPILED:
        options = last_similar._options(dtype, head_dim)
        warps, stages = options.pop("num_warps"), options.pop("num_stages")
        constexprs = {**paged_constants(dtype, head_dim), **options}
        how: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        how["max_registers"] = last_similar._max_registers(dtype)
        name = f"{KEY_NAMES[dtype]}-d{head_dim}"
        cases.append(
            CompileCase(name, last_similar._last_similar_kernel, signature, constexprs, **how)
        )
    return cases


def window_attention_cases() -> list[CompileCase]:
    """R1-Qwen-7B (7 query heads per KV head), R1-Llama-8B (4), and one of several products."""
    strides = ("layer_stride", "track_stride", "entry_stride", "head_stride")
    cases = []
    groups = {128: ((7, 8), (4, 8)), 64: ((5, 32),), 256: ((8, 8),)}
    for dtype, head_dim in COMPILED:
        wide = dtype if dtype in TRITON_NAMES else torch.bfloat16
        signature = {
            **PAGED,
            "queries": f"*{TRITON_NAMES[wide]}",
            **dict.fromkeys(("query_tracks", "last_positions"), "*i64"),
            **dict.fromkeys((*strides, "scratch_tokens", "columns", "tasks"), "i32"),
            **dict.fromkeys(("scratch", "importance"), "*fp32"),
            "scale_log2": "fp32",
        }
        scales: dict[str, Any] = {"k_scales": None}
        if dtype != wide:
            signature["k_scales"], scales = "*fp32", {}
        for group, window in groups[head_dim]:
            options = window_attention._options(wide, head_dim, window, window, group)
            warps, stages = options.pop("num_warps"), options.pop("num_stages")
            constexprs = {**paged_constants(dtype, head_dim), **scales, **options}
            name = f"{KEY_NAMES[dtype]}-d{head_dim}-g{group}-w{window}"
            kernel = window_attention._importance_kernel
            cases.append(CompileCase(name, kernel, signature, constexprs, strides, warps, stages))
    signature = {"offsets": "*i64", **dict.fromkeys(("width", "blocks", "columns"), "i32")}
    signature |= dict.fromkeys(("importance", "out"), "*fp32")
    constexprs = {"WINDOW": 8, "HEADS": 112, **window_attention._POOL}
    return [
        *cases,
        CompileCase("pool", window_attention._pool_kernel, signature, constexprs),
    ]


def selection_cases() -> list[CompileCase]:
    """There is one: all its types are fixed."""
    int64 = ("offsets", "kept_offsets", "ranges", "range_offsets", "kept", "evicted")
    signature = {"scores": "*fp32", "keys": "*i32", **dict.fromkeys(int64, "*i64"), "finite": "*i1"}
    return [
        CompileCase(
            "fp32",
            selection._select_kernel,
            signature,
            {"BLOCK": selection._BLOCK},
            num_warps=selection._WARPS,
        )
    ]


def sentence_scores_cases() -> list[CompileCase]:
    """There is one: all its types are fixed."""
    signature = {
        **dict.fromkeys(("positions", "offsets", "starts", "stops", "sentence_offsets"), "*i64"),
        **dict.fromkeys(("importance", "redundancy", "similarity", "out"), "*fp32"),
        **dict.fromkeys(("sigma", "rest", "tau"), "fp32"),
        **dict.fromkeys(("window", "ending", "blocks", "rounds"), "i32"),
    }
    return [
        CompileCase(
            "fp32",
            sentence_scores._sentence_scores_kernel,
            signature,
            {"BLOCK": sentence_scores._BLOCK},
        )
    ]


def step_attention_cases() -> list[CompileCase]:
    """R1-Qwen-7B (7 query heads per KV head), R1-Llama-8B (4), with rings of 8 queries."""
    strides = ("layer_stride", "track_stride", "entry_stride", "head_stride")
    cases = []
    for dtype, head_dim in COMPILED:
        wide = dtype if dtype in TRITON_NAMES else torch.bfloat16
        both = {
            **PAGED,
            "queries": f"*{TRITON_NAMES[wide]}",
            **dict.fromkeys(("query_tracks", "last_positions", "step_counts", "firsts"), "*i64"),
            **dict.fromkeys((*strides, "causal", "tiles"), "i32"),
            **dict.fromkeys(("highest", "normaliser"), "*fp32"),
            "scale_log2": "fp32",
        }
        mean = {**both, "out": "*fp32", **dict.fromkeys(step_attention._RUNTIME[2:], "i32")}
        scales: dict[str, Any] = {"k_scales": None}
        if dtype != wide:
            both["k_scales"] = mean["k_scales"] = "*fp32"
            scales = {}
        for group in {128: (7, 4), 64: (5,), 256: (8,)}[head_dim]:
            options = step_attention._options(wide, head_dim, 8, group)
            warps, stages = options.pop("num_warps"), options.pop("num_stages")
            constexprs = {**paged_constants(dtype, head_dim), **scales, **options}
            name = f"{KEY_NAMES[dtype]}-d{head_dim}-g{group}"
            kernel = step_attention._normaliser_kernel
            launch = (both, constexprs, strides, warps, stages)
            cases.append(CompileCase(f"normaliser-{name}", kernel, *launch))
            for over in step_attention.OVER:
                kernel = step_attention._mean_attention_kernel
                own = step_attention._over(over, dtype)
                launch = (strides, warps, own.pop("num_stages", stages))
                case = CompileCase(f"{over}-{name}", kernel, mean, constexprs | own, *launch)
                cases.append(case)
    return cases


#: kernel module -> its variants
CASES: dict[str, Callable[[], list[CompileCase]]] = {
    "distinct_values": distinct_values_cases,
    "key_redundancy": key_redundancy_cases,
    "kv_move": kv_move_cases,
    "ring_write": ring_write_cases,
    "row_compaction": row_compaction_cases,
    "selection": selection_cases,
    "sentence_redundancy": sentence_redundancy_cases,
    "sentence_scores": sentence_scores_cases,
    "sentence_step": sentence_step_cases,
    "last_similar": last_similar_cases,
    "steering_add": steering_add_cases,
    "step_attention": step_attention_cases,
    "window_attention": window_attention_cases,
}

"""The one column that each row of the keys' cosine matrix spares: found without the matrix.

``spared(r)`` = the largest c with ``S[r, c] > threshold``, -1 where there is none; S is the cosine
matrix of a request's keys of one layer and KV head, its diagonal 0. ``key_redundancy`` is built on
it; the truth is the same step of ``reference.key_redundancy``.

Source: R-KV (arXiv 2505.24133) section 3.3; SkipKV (arXiv 2512.07993) eq. 3.

How: a program takes a tile of rows and walks tiles of columns from the last one down. The first
similar column that a row meets is its answer, and the walk ends when every row of the tile has one:
exact, and short where keys repeat. It goes in runs of 1, 2, 4, ... tiles, within which keys are
loaded ahead. A tile whose largest product, over its smallest norm, is too small for any row is not
looked at further, which leaves the tensor cores little to wait for: not even the norms of its keys,
since tiles are counted from a request's end, where ``inverse_norm_bounds`` has one number for them.
Products are of raw 16-bit keys with float32 sums (float32 keys: float32 throughout), scaled by
inverse norms; S is never stored.

Incremental form: between two compactions rows only lose columns and gain new ones at the end. A new
similar column beats any old one; an old answer holds while its column lives; "none" stays "none".
So ``carried_columns`` after a compaction, then here (a) new columns against old rows, (b) new rows
against all columns, (c) against old columns only the rows whose column was evicted, gathered into
dense tiles, and only below where that column was. The result is the one from scratch.

Mutates nothing but its own buffers. Not for CUDA graphs: the grids depend on the lengths. The order
in which rows of (c) are gathered may differ from run to run; what is found for a row does not.

Floors for n tokens, o of them known, if nothing was evicted and no walk ends early: bytes ``L Hkv
(n (d key_bytes + 8) + 4 o)``, operations ``2 L Hkv d (n^2 - o^2)``.
"""

# Triton ships no types, and its functions are a language of their own.
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.compile_case import KEY_NAMES, TRITON_NAMES, CompileCase
from sgl_skipkv.kernels.on_device import register_limit
from sgl_skipkv.kernels.paged_keys import (
    COMPILED,
    SIGNATURE,
    PagedKeys,
    example_constants,
    widened,
)

#: keys that share an inverse norm bound, counted from the last of a request; a tile has one or two
BOUND_TOKENS = 32
_BOUND_TOKENS = tl.constexpr(BOUND_TOKENS)
#: below every column, wherever a tile begins
NOWHERE = tl.constexpr(-(2**30))
#: other numbers at every compaction: one variant must do for all of them, or a server compiles
_VARYING = ("columns", "bounds_stride", "tiles", "known_columns")


@triton.jit
def _last_similar(
    keys, page, inverse_norms, bounds, n, r, limit, floor, threshold,
    K_SLOT_STRIDE: tl.constexpr, FLOAT8: tl.constexpr, HEAD_DIM: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """int32 [BLOCK_ROWS]: of each row r, the largest similar column in [floor, limit) but r, or -1.

    Columns from a limit to the end of its tile are looked at too: where a limit is not n, it is
    known that none of them is similar. Rows whose limit is not above floor get any value.
    """
    d = tl.arange(0, DEPTH)[None, :]
    wanted = limit > floor
    slot = tl.load(page + r, mask=wanted, other=0).to(tl.int64)
    own_keys = keys + (slot[:, None] * K_SLOT_STRIDE + d)
    if DEPTH == HEAD_DIM:
        own = widened(tl.load(own_keys, mask=wanted[:, None], other=0), FLOAT8)
    # cosine > threshold, multiplied by the row's norm.
    least = threshold / tl.load(inverse_norms + r, mask=wanted, other=1.0)
    best = tl.full([BLOCK_ROWS], -1, tl.int32)
    top = tl.max(tl.where(wanted, limit, floor), axis=0)
    tiles = 1
    while top > floor:
        passed = (n - top) // BLOCK_COLUMNS  # tiles, from the end
        # Keys are loaded ahead within a run of tiles. The first is short, because most walks are.
        tiles = tl.minimum(tiles, tl.cdiv(n - floor, BLOCK_COLUMNS) - passed)
        for tile in range(passed, passed + tiles):
            start = n - (tile + 1) * BLOCK_COLUMNS
            c = start + tl.arange(0, BLOCK_COLUMNS)
            inside = c >= floor
            column_slot = tl.load(page + c, mask=inside, other=0).to(tl.int64)
            column_keys = keys + (column_slot[:, None] * K_SLOT_STRIDE + d)
            at = tile * (BLOCK_COLUMNS // _BOUND_TOKENS)
            largest = tl.load(bounds + at)
            if BLOCK_COLUMNS > _BOUND_TOKENS:
                is_there = (at + 1) * _BOUND_TOKENS < n
                largest = tl.maximum(largest, tl.load(bounds + at + 1, mask=is_there, other=0.0))
            if DEPTH == HEAD_DIM:
                other = tl.load(column_keys, mask=inside[:, None], other=0)
                other = widened(other, FLOAT8)
                product = tl.dot(own, tl.trans(other), input_precision="ieee")
            else:
                product = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
                for depth in range(0, HEAD_DIM, DEPTH):
                    own_part = tl.load(own_keys + depth, mask=wanted[:, None], other=0)
                    part = tl.load(column_keys + depth, mask=inside[:, None], other=0)
                    product = tl.dot(own_part, tl.trans(part), product, input_precision="ieee")
            # No cosine of a row is above its largest product over the smallest norm, as floats too:
            # rounding keeps their order. Below a threshold of 0 that says nothing.
            bound = tl.max(product, axis=1) * largest
            may_meet = wanted & (best < 0) & ((bound > least) | (least < 0))
            if tl.max(may_meet.to(tl.int32), axis=0) > 0:
                inverse = tl.load(inverse_norms + c, mask=inside, other=0.0)
                place = tl.arange(0, BLOCK_COLUMNS)[None, :]
                is_similar = product * inverse[None, :] > least[:, None]
                is_similar &= place != (r - start)[:, None]
                found = start + tl.max(tl.where(is_similar, place, NOWHERE), axis=1)
                best = tl.maximum(best, tl.where(found >= floor, found, -1))  # later ones lie lower
        top = n - (passed + tiles) * BLOCK_COLUMNS
        tiles *= 2
        left = tl.where(wanted & (best < 0), tl.minimum(limit, top), floor)
        top = tl.max(left, axis=0)
    return best


@triton.jit(do_not_specialize=_VARYING)
def _new_columns_kernel(
    k_ptrs, req_to_token, rows, offsets, page_stride, inverse_norms, inverse_norm_bounds,
    bounds_stride, thresholds, spared, columns, tiles, known, known_offsets, known_columns,
    unresolved, unresolved_rows, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr,
    K_TYPE: tl.constexpr, FLOAT8: tl.constexpr, DEPTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Old rows: what new columns and the old answers settle; lists the others."""
    task = tl.program_id(0) // tiles
    head_index = (task % (LAYERS * KV_HEADS)).to(tl.int64)
    request = task // (LAYERS * KV_HEADS)
    first, known_first = tl.load(offsets + request), tl.load(known_offsets + request)
    n = (tl.load(offsets + request + 1) - first).to(tl.int32)
    old = (tl.load(known_offsets + request + 1) - known_first).to(tl.int32)
    start = tl.program_id(0) % tiles * BLOCK_ROWS
    if start >= old:
        return
    page = req_to_token + tl.load(rows + request) * page_stride
    keys = tl.load(k_ptrs + head_index // KV_HEADS).to(tl.pointer_type(K_TYPE))
    keys = tl.multiple_of(keys + head_index % KV_HEADS * K_HEAD_STRIDE, 16)
    r = start + tl.arange(0, BLOCK_ROWS)
    is_old = r < old
    best = _last_similar(
        keys,
        page,
        inverse_norms + head_index * columns + first,
        inverse_norm_bounds + head_index * bounds_stride + first // _BOUND_TOKENS + request,
        n,
        r,
        tl.where(is_old, n, 0),
        old,
        tl.load(thresholds + request),
        K_SLOT_STRIDE,
        FLOAT8,
        HEAD_DIM,
        DEPTH,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
    known_row = head_index * known_columns + known_first
    before = tl.load(known + known_row + r, mask=is_old, other=-1)
    best = tl.where(best < 0, before, best)
    tl.store(spared + head_index * columns + first + r, best, mask=is_old & (best >= -1))
    is_open = is_old & (best < -1)
    count = tl.sum(is_open.to(tl.int32), axis=0)
    if count > 0:
        place = tl.atomic_add(unresolved + task, count, sem="relaxed")
        place += tl.cumsum(is_open.to(tl.int32), axis=0) - 1
        tl.store(unresolved_rows + known_row + place, r, mask=is_open)


@triton.jit(do_not_specialize=_VARYING)
def _search_kernel(
    k_ptrs, req_to_token, rows, offsets, page_stride, inverse_norms, inverse_norm_bounds,
    bounds_stride, thresholds, spared, columns, tiles, known, known_offsets, known_columns,
    unresolved, unresolved_rows, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr,
    K_TYPE: tl.constexpr, FLOAT8: tl.constexpr, DEPTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """New rows against all columns; then the listed old ones, below where their column was."""
    task = tl.program_id(0) // tiles
    head_index = (task % (LAYERS * KV_HEADS)).to(tl.int64)
    request = task // (LAYERS * KV_HEADS)
    first = tl.load(offsets + request)
    n = (tl.load(offsets + request + 1) - first).to(tl.int32)
    j = tl.program_id(0) % tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if known is None:
        count, r = n, j
        limit = tl.where(j < count, n, 0)
    else:
        known_first = tl.load(known_offsets + request)
        old = (tl.load(known_offsets + request + 1) - known_first).to(tl.int32)
        new = n - old
        count = new + tl.load(unresolved + task)
        known_row = head_index * known_columns + known_first
        is_listed = (j >= new) & (j < count)
        listed = tl.load(unresolved_rows + known_row + j - new, mask=is_listed, other=0)
        r = tl.where(is_listed, listed, old + j)
        before = tl.load(known + known_row + listed, mask=is_listed, other=-1)
        limit = tl.where(is_listed, -1 - before, tl.where(j < new, n, 0))
    if tl.program_id(0) % tiles * BLOCK_ROWS >= count:
        return
    page = req_to_token + tl.load(rows + request) * page_stride
    keys = tl.load(k_ptrs + head_index // KV_HEADS).to(tl.pointer_type(K_TYPE))
    keys = tl.multiple_of(keys + head_index % KV_HEADS * K_HEAD_STRIDE, 16)
    threshold = tl.load(thresholds + request)
    best = _last_similar(
        keys,
        page,
        inverse_norms + head_index * columns + first,
        inverse_norm_bounds + head_index * bounds_stride + first // _BOUND_TOKENS + request,
        n,
        r,
        limit,
        0,
        threshold,
        K_SLOT_STRIDE,
        FLOAT8,
        HEAD_DIM,
        DEPTH,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
    # Below 0 the diagonal, which is 0, counts as similar as well; to spare it changes nothing.
    best = tl.maximum(best, tl.where(threshold < 0.0, r, -1))
    tl.store(spared + head_index * columns + first + r, best, mask=j < count)


@dataclass(frozen=True)
class KnownSpared:
    """What an earlier call found, carried over a compaction by ``carried_columns``.

    Attributes:
        spared: int32 [L, Hkv, N], of the first ``row_tokens[b]`` rows of every request b, request
            after request. c >= 0: column c, and it is still there; -1: no similar column among
            these; -1 - m: none but perhaps among the first m.
        row_tokens: at most as many as the request has now; 0 where nothing is known.
        offsets: int64 [B + 1], ``row_tokens`` summed from 0.
    """

    spared: Tensor
    row_tokens: Sequence[int]
    offsets: Tensor


def spared_columns(
    paged: PagedKeys,
    inverse_norms: Tensor,
    inverse_norm_bounds: Tensor,
    thresholds: Tensor,
    known: KnownSpared | None = None,
) -> Tensor:
    """The spared column of every row.

    Args:
        paged: the requests.
        inverse_norms: float32 [L, Hkv, N], contiguous, ``1 / max(norm, eps)`` of every key.
        inverse_norm_bounds: float32 [L, Hkv, ``bound_columns(row_tokens)``], contiguous: entry
            ``offset // 32 + b + g`` is the largest of these for the keys [n - 32 (g + 1), n - 32 g)
            of request b, which begins at ``offset``.
        thresholds: float32 [B], cosine above which two keys count as similar.
        known: what is known of the first rows of each request, at the same threshold.

    Returns:
        int32 [L, Hkv, N], request after request: a column of the same request, or -1.

    Raises:
        ValueError: more known rows than rows, or shapes that do not fit.
    """
    shape = (paged.layers, paged.kv_heads, paged.columns)
    spared = torch.empty(shape, dtype=torch.int32, device=paged.device)
    if not paged.columns:
        return spared
    options = _options(paged.layer.dtype, paged.head_dim)
    tiles = triton.cdiv(max(paged.row_tokens), options["BLOCK_ROWS"])
    bounds = (inverse_norm_bounds, bound_columns(paged.row_tokens))
    arguments = (*paged.arguments, inverse_norms, *bounds, thresholds, spared, paged.columns)
    options |= paged.constants | register_limit(_max_registers(paged.layer.dtype), paged.device)
    if known is None:
        grid = (paged.tasks * tiles,)
        _search_kernel[grid](*arguments, tiles, None, None, 0, None, None, **options)
        return spared
    _check(paged, known)
    unresolved = torch.zeros(paged.tasks, dtype=torch.int32, device=paged.device)
    listed = torch.empty_like(known.spared)
    old = (known.spared, known.offsets, known.spared.shape[2], unresolved, listed)
    old_tiles = triton.cdiv(max(known.row_tokens), options["BLOCK_ROWS"])
    if old_tiles:
        _new_columns_kernel[(paged.tasks * old_tiles,)](*arguments, old_tiles, *old, **options)
    _search_kernel[(paged.tasks * tiles,)](*arguments, tiles, *old, **options)
    return spared


def bound_columns(row_tokens: Sequence[int]) -> int:
    """Numbers per layer and KV head in ``inverse_norm_bounds``; a request ends before the next."""
    return sum(row_tokens) // BOUND_TOKENS + len(row_tokens)


def _check(paged: PagedKeys, known: KnownSpared) -> None:
    shape = (paged.layers, paged.kv_heads, sum(known.row_tokens))
    if known.spared.shape != shape or not known.spared.is_contiguous():
        raise ValueError(f"known: expected contiguous {[*shape]}, got {[*known.spared.shape]}")
    for old, tokens in zip(known.row_tokens, paged.row_tokens, strict=True):
        if not 0 <= old <= tokens:
            raise ValueError(f"known: expected 0 to {tokens} rows of the request, got {old}")


def _options(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """Tile sizes and launch options."""
    if dtype == torch.float32:  # no tensor cores: operands in registers, a part of d at a time
        tile = {"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 32, "DEPTH": min(head_dim, 16)}
        return {**tile, "num_warps": 8, "num_stages": 2}
    if dtype in TRITON_NAMES and head_dim <= 128:
        tile = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 64, "DEPTH": head_dim}
        # Slots, then keys, then products: five stages keep three tiles of keys in flight.
        return {**tile, "num_warps": 8, "num_stages": 5}
    # Wider heads fit into 99 KiB of shared memory, and bytes that become float16 into registers,
    # those of a head of 128 with fewer keys on their way.
    tile = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 32, "DEPTH": head_dim}
    return {**tile, "num_warps": 8, "num_stages": 2 if head_dim == 128 else 3}


def _max_registers(dtype: torch.dtype) -> dict[int, int]:
    """Per thread, by architecture, where the compiler's own choice is worse.

    Left alone it takes 160 of 16-bit keys on sm_90, and only one program fits on a multiprocessor;
    float32 keys get 80 and a few bytes of spills, float8 keys 128 and some on sm_80.
    """
    if dtype == torch.float32:
        return dict.fromkeys((80, 90, 100), 128)
    return {90: 128} if dtype in TRITON_NAMES else {80: 168, 90: 128}


def pairs(row_tokens: Sequence[int], known_tokens: Sequence[int] | None = None) -> int:
    """Pairs of row and column that one request compares, per layer and KV head, at the most.

    If nothing was evicted since; each row whose column was costs as many as lie below it.
    """
    known_tokens = [0] * len(row_tokens) if known_tokens is None else known_tokens
    return sum(n * n - old * old for n, old in zip(row_tokens, known_tokens, strict=True))


def compile_cases() -> list[CompileCase]:
    """Both kernels, and a search where nothing is known."""
    cases = []
    nothing = ("known", "known_offsets", "unresolved", "unresolved_rows")
    for dtype, head_dim in COMPILED:
        options = _options(dtype, head_dim)
        warps, stages = options.pop("num_warps"), options.pop("num_stages")
        constexprs = {**example_constants(dtype, head_dim), **options}
        integers = dict.fromkeys(_VARYING, "i32")
        signature = {
            **SIGNATURE,
            **dict.fromkeys(("inverse_norms", "inverse_norm_bounds", "thresholds"), "*fp32"),
            **dict.fromkeys(("spared", "known", "unresolved", "unresolved_rows"), "*i32"),
            "known_offsets": "*i64",
            **integers,
        }
        first_types = {key: kind for key, kind in signature.items() if key not in nothing}
        first = {**constexprs, **dict.fromkeys(nothing)}
        tag = f"{KEY_NAMES[dtype]}-d{head_dim}"
        how: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        how["max_registers"] = _max_registers(dtype)
        cases += [
            CompileCase(f"{tag}-new", _new_columns_kernel, signature, constexprs, **how),
            CompileCase(f"{tag}-search", _search_kernel, signature, constexprs, **how),
            CompileCase(f"{tag}-first", _search_kernel, first_types, first, **how),
        ]
    return cases

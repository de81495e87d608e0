"""How much each cached key repeats others, for a batch of requests, with O(n) memory per head.

Per layer and KV head: S the cosine matrix of a request's keys, diagonal 0, in every row r also 0 at
the last similar key; ``R = softmax over i of mean over rows of S[r, i]``; then the mean over KV
heads and layers. The truth is ``reference.key_redundancy``, per request and layer.

Source: R-KV (arXiv 2505.24133) section 3.3; SkipKV (arXiv 2512.07993) eq. 5.

How: with unit keys u the column sums are linear, ``sum_r S[r, i] = u_i . (sum_r u_r - u_i)``, so
only the entries of last similar keys need rows to be compared with columns: ``last_similar.py``
finds where they are, and their values are n products more. Three more kernels: inverse norms,
a bound on 32 of them at a time, and the sum of unit keys; column sums and the softmax's normaliser;
the mean, in one fixed order.

Column sums are scattered into, so they are int64 in units of 2^-40: integer addition has no order,
and the bits of a request depend neither on the run nor on the batch. No sum overflows below 2^22
tokens, since each of the two parts is at most n, so 2 n 2^40 < 2^63. Rounding a term loses less
than 2^-40, which leaves less than 2^-39 in the mean over n rows of 2 n terms; the mean in float32
has 2^-24.

Mutates nothing but its own buffers. Not for CUDA graphs: grids and workspace depend on the lengths.

Floors: bytes ``L Hkv n d key_bytes + 8 n``, each key, slot and result once; operations
``2 L Hkv d n^2``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.last_similar import BOUND_TOKENS, bound_columns, last_similar_keys
from sgl_skipkv.kernels.on_device import TRITON_NAMES, register_limit
from sgl_skipkv.kernels.paged_keys import PagedKeys, widened

_EPS = tl.constexpr(1e-8)
_BOUND_TOKENS = tl.constexpr(BOUND_TOKENS)
_UNIT = tl.constexpr(2.0**40)
_PROGRAMS_PER_PROCESSOR = 2
_SUM_BLOCK = 512
_MEAN = {"HEAD_TILE": 16, "BLOCK": 64}


@triton.jit(do_not_specialize=["columns", "tasks", "bounds_stride"])
def _norms_kernel(
    k_ptrs, req_to_token, rows, offsets, page_stride, inverse_norms, unit_sums, sums, columns,
    tasks, inverse_norm_bounds, bounds_stride, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr,
    K_TYPE: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Inverse norms, bounds on them, the sum of unit keys of each task, and column sums of 0."""
    d = tl.arange(0, HEAD_DIM)
    BOUNDS: tl.constexpr = BLOCK // _BOUND_TOKENS
    own_bounds = BOUNDS - 1 - tl.arange(0, BOUNDS)  # in a block; they are counted from the end
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head_index = tl.cast(task % (LAYERS * KV_HEADS), tl.int64)
        request = task // (LAYERS * KV_HEADS)
        first = tl.load(offsets + request)
        n = (tl.load(offsets + request + 1) - first).to(tl.int32)
        page = req_to_token + tl.load(rows + request) * page_stride
        keys = tl.load(k_ptrs + head_index // KV_HEADS).to(tl.pointer_type(K_TYPE))
        keys = tl.multiple_of(keys + head_index % KV_HEADS * K_HEAD_STRIDE, 16)
        row = head_index * columns + first
        bounds = head_index * bounds_stride + first // _BOUND_TOKENS + request
        total = tl.zeros([HEAD_DIM], tl.float32)
        for passed in range(0, n, BLOCK):
            i = n - passed - BLOCK + tl.arange(0, BLOCK)
            inside = i >= 0
            slot = tl.load(page + i, mask=inside, other=0).to(tl.int64)
            k_offset = slot[:, None] * K_SLOT_STRIDE + d[None, :]
            k = tl.load(keys + k_offset, mask=inside[:, None], other=0)
            k = widened(k, FLOAT8).to(tl.float32)
            inverse = tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(tl.sum(k * k, axis=1)), _EPS))
            total += tl.sum(k * inverse[:, None], axis=0)
            tl.store(inverse_norms + row + i, inverse, mask=inside)
            parts = tl.reshape(tl.where(inside, inverse, 0.0), [BOUNDS, _BOUND_TOKENS])
            bound = passed // _BOUND_TOKENS + own_bounds
            is_there = bound * _BOUND_TOKENS < n
            tl.store(inverse_norm_bounds + bounds + bound, tl.max(parts, axis=1), mask=is_there)
            tl.store(sums + row + i, tl.zeros([BLOCK], tl.int64), mask=inside)
        tl.store(unit_sums + tl.cast(task, tl.int64) * HEAD_DIM + d, total)


@triton.jit(do_not_specialize=["columns", "tasks"])
def _column_sums_kernel(
    k_ptrs, req_to_token, rows, offsets, page_stride, inverse_norms, unit_sums, sums, columns,
    tasks, last_similar, normalisers, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr,
    K_TYPE: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr, SUM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Column sums without the last similar keys, and each task's sum of exp(mean over rows)."""
    d = tl.arange(0, HEAD_DIM)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head_index = tl.cast(task % (LAYERS * KV_HEADS), tl.int64)
        request = task // (LAYERS * KV_HEADS)
        first = tl.load(offsets + request)
        n = (tl.load(offsets + request + 1) - first).to(tl.int32)
        page = req_to_token + tl.load(rows + request) * page_stride
        keys = tl.load(k_ptrs + head_index // KV_HEADS).to(tl.pointer_type(K_TYPE))
        keys = tl.multiple_of(keys + head_index % KV_HEADS * K_HEAD_STRIDE, 16)
        row = head_index * columns + first
        total = tl.load(unit_sums + tl.cast(task, tl.int64) * HEAD_DIM + d)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            inside = i < n
            slot = tl.load(page + i, mask=inside, other=0).to(tl.int64)
            k_offset = slot[:, None] * K_SLOT_STRIDE + d[None, :]
            k = tl.load(keys + k_offset, mask=inside[:, None], other=0)
            k = widened(k, FLOAT8).to(tl.float32)
            inverse = tl.load(inverse_norms + row + i, mask=inside, other=0.0)
            unit = k * inverse[:, None]
            others = tl.sum(unit * (total[None, :] - unit), axis=1)
            tl.atomic_add(sums + row + i, (others * _UNIT).to(tl.int64), inside, sem="relaxed")
            c = tl.load(last_similar + row + i, mask=inside, other=-1)
            has_similar = (c >= 0) & (c != i)  # the diagonal is 0 as it is
            slot = tl.load(page + c, mask=has_similar, other=0).to(tl.int64)
            k_offset = slot[:, None] * K_SLOT_STRIDE + d[None, :]
            k = tl.load(keys + k_offset, mask=has_similar[:, None], other=0)
            k = widened(k, FLOAT8).to(tl.float32)
            inverse = tl.load(inverse_norms + row + c, mask=has_similar, other=0.0)
            value = tl.sum(unit * (k * inverse[:, None]), axis=1)
            tl.atomic_add(sums + row + c, (value * -_UNIT).to(tl.int64), has_similar, sem="relaxed")
        tl.debug_barrier()  # the sums are complete
        normaliser = tl.zeros([SUM_BLOCK], tl.float32)
        for start in range(0, n, SUM_BLOCK):
            i = start + tl.arange(0, SUM_BLOCK)
            column_sum = tl.load(sums + row + i, mask=i < n, other=0, cache_modifier=".cg")
            mean = column_sum.to(tl.float32) / _UNIT / n
            normaliser += tl.where(i < n, tl.exp(mean), 0.0)
        tl.store(normalisers + task, tl.sum(normaliser, axis=0))


@triton.jit(do_not_specialize=["columns", "blocks"])
def _mean_kernel(
    sums, normalisers, columns, offsets, out, blocks, HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BLOCK
    first = tl.load(offsets + request)
    n = (tl.load(offsets + request + 1) - first).to(tl.int32)
    if start >= n:
        return
    i = start + tl.arange(0, BLOCK)
    total = tl.zeros([HEAD_TILE, BLOCK], tl.float32)
    for head_start in range(0, HEADS, HEAD_TILE):
        head = head_start + tl.arange(0, HEAD_TILE)
        is_head = head < HEADS
        row = sums + (head.to(tl.int64) * columns)[:, None] + first
        seen = is_head[:, None] & (i < n)[None, :]
        mean = tl.load(row + i[None, :], mask=seen, other=0).to(tl.float32) / _UNIT / n
        normaliser = tl.load(normalisers + request * HEADS + head, mask=is_head, other=1.0)
        total += tl.where(is_head[:, None], tl.exp(mean) / normaliser[:, None], 0.0)
    tl.store(out + first + i, tl.sum(total, axis=0) / HEADS, mask=i < n)


def key_redundancy(paged: PagedKeys, thresholds: Tensor) -> Tensor:
    """Redundancy of every cached token.

    Args:
        paged: the requests.
        thresholds: float32 [B], cosine above which two keys count as similar.

    Returns:
        float32 [N], request after request, the mean over KV heads and layers.
    """
    heads, columns = paged.layers * paged.kv_heads, paged.columns
    out = torch.empty(columns, dtype=torch.float32, device=paged.device)
    inverse_norms = out.new_empty(heads, columns)
    unit_sums, normalisers = out.new_empty(paged.tasks, paged.head_dim), out.new_empty(paged.tasks)
    sums = out.new_empty(heads, columns, dtype=torch.int64)
    stride = bound_columns(paged.row_tokens)
    bounds = out.new_empty(heads, stride)
    if not columns:
        return out
    grid = (paged.programs(_PROGRAMS_PER_PROCESSOR),)
    arguments = (*paged.arguments, inverse_norms, unit_sums, sums, columns, paged.tasks)
    (norms_block, sums_block), (norms_warps, sums_warps) = _blocks(paged.layer.dtype)
    constants = paged.constants
    _norms_kernel[grid](
        *(*arguments, bounds, stride),
        BLOCK=norms_block,
        num_warps=norms_warps,
        **constants,
        **register_limit(_max_registers(paged.layer.dtype, paged.head_dim), paged.device),
    )
    last_similar = last_similar_keys(paged, inverse_norms, bounds, thresholds)
    _column_sums_kernel[grid](
        *(*arguments, last_similar, normalisers),
        BLOCK=sums_block,
        SUM_BLOCK=_SUM_BLOCK,
        num_warps=sums_warps,
        **constants,
    )
    blocks = triton.cdiv(max(paged.row_tokens), _MEAN["BLOCK"])
    _mean_kernel[(len(paged.row_tokens) * blocks,)](
        *(sums, normalisers, columns, paged.offsets, out, blocks), HEADS=heads, **_MEAN
    )
    return out


def _blocks(dtype: torch.dtype) -> tuple[tuple[int, int], tuple[int, int]]:
    """Keys that the first and the third kernel take at once, and their warps."""
    if dtype == torch.float32:
        return (32, 32), (8, 4)
    return ((128, 64), (8, 8)) if dtype in TRITON_NAMES else ((64, 64), (8, 8))


def _max_registers(dtype: torch.dtype, head_dim: int) -> dict[int, int]:
    """Of the first kernel, per thread, by architecture: left alone the compiler spills at 128 where
    it can do with 118."""
    return {100: 144} if dtype in (torch.float16, torch.bfloat16) and head_dim <= 128 else {}

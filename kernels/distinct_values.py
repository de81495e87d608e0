"""How far each cached value lies from the nearest later one, and how long it is, for a batch.

The truth is ``reference.distinct_values``, per request. Three kernels: the mean length of the
values of each request, layer and KV head; size and square of each token's values; then a program
per request, block of tokens and block of later ones, which adds up the products of their values,
head after head, and lowers its tokens' least distances. That begins with each request's first
token that may be evicted: a long prompt that stays is not compared. Programs that run together read
the same heads of nearby tokens, so most of what they read is in L2. Everything is added in one
fixed order, and a minimum is the same in any, so a request's bits depend neither on the run nor on
the batch.

A scale of a float8 cache changes nothing: lengths are compared with the mean of their own layer.

Mutates nothing but its own buffers. Not for CUDA graphs: grids depend on the lengths.

Floors, with n tokens and M layers that are compared: bytes ``L Hkv n d value_bytes + 12 n``, each
value, slot and result once; operations ``M Hkv d m (m - 1)``, half of all pairs of the m tokens
that are compared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.on_device import TRITON_NAMES, register_limit
from sgl_skipkv.kernels.paged_keys import PagedKeys, widened
from sgl_skipkv.kernels.reference import SAME_VALUE

_EPS = tl.constexpr(1e-8)
_PROGRAMS_PER_PROCESSOR = 4
_RUNTIME = ["blocks", "compared_from", "compared_to"]
#: of the third kernel, by architecture: left alone the compiler spills at 128
_MAX_REGISTERS = {80: 192}


@triton.jit(do_not_specialize=["tasks"])
def _mean_lengths_kernel(
    v_ptrs, req_to_token, rows, offsets, page_stride, firsts, inverse_means, tasks,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, K_TYPE: tl.constexpr,
    FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One over the mean length of each task's values, from its request's first token on."""
    d = tl.arange(0, HEAD_DIM)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head_index = tl.cast(task % (LAYERS * KV_HEADS), tl.int64)
        request = task // (LAYERS * KV_HEADS)
        start = tl.load(offsets + request)
        n = (tl.load(offsets + request + 1) - start).to(tl.int32)
        first = tl.load(firsts + request).to(tl.int32)
        page = req_to_token + tl.load(rows + request) * page_stride
        values = tl.load(v_ptrs + head_index // KV_HEADS).to(tl.pointer_type(K_TYPE))
        values = tl.multiple_of(values + head_index % KV_HEADS * K_HEAD_STRIDE, 16)
        total = tl.zeros([BLOCK], tl.float32)
        for begin in range(first, n, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            slot = tl.load(page + i, mask=i < n, other=0).to(tl.int64)
            v_offset = slot[:, None] * K_SLOT_STRIDE + d[None, :]
            v = tl.load(values + v_offset, mask=(i < n)[:, None], other=0)
            v = widened(v, FLOAT8).to(tl.float32)
            total += tl.sqrt_rn(tl.sum(v * v, axis=1))
        mean = tl.maximum(tl.sum(total, axis=0) / tl.maximum(n - first, 1), _EPS)
        tl.store(inverse_means + task, tl.div_rn(1.0, mean))


@triton.jit(do_not_specialize=_RUNTIME)
def _sizes_kernel(
    v_ptrs, req_to_token, rows, offsets, page_stride, firsts, inverse_means, weights, sizes,
    squares, distances, blocks, compared_from, compared_to,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, K_TYPE: tl.constexpr,
    FLOAT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sizes of one block of a request's tokens, the squares of their compared lengths, and infinity
    as the distance of all but the last and those before the first. ``compared_from`` and ``_to``
    count KV heads of all layers."""
    d = tl.arange(0, HEAD_DIM)
    request = tl.program_id(0) // blocks
    start = tl.load(offsets + request)
    n = (tl.load(offsets + request + 1) - start).to(tl.int32)
    begin = tl.program_id(0) % blocks * BLOCK
    if begin >= n:
        return
    page = req_to_token + tl.load(rows + request) * page_stride
    inverse = inverse_means + request * LAYERS * KV_HEADS
    i = begin + tl.arange(0, BLOCK)
    slot = tl.load(page + i, mask=i < n, other=0).to(tl.int64)
    v_offset = slot[:, None] * K_SLOT_STRIDE + d[None, :]
    size = tl.zeros([BLOCK], tl.float32)
    square_sum = tl.zeros([BLOCK], tl.float32)
    for head_index in range(0, LAYERS * KV_HEADS):
        values = tl.load(v_ptrs + head_index // KV_HEADS).to(tl.pointer_type(K_TYPE))
        values = tl.multiple_of(values + head_index % KV_HEADS * K_HEAD_STRIDE, 16)
        v = tl.load(values + v_offset, mask=(i < n)[:, None], other=0)
        v = widened(v, FLOAT8).to(tl.float32)
        unit = tl.load(inverse + head_index)
        square = tl.sum(v * v, axis=1)
        size += tl.sqrt_rn(square) * unit * tl.load(weights + head_index)
        compared = (head_index >= compared_from) & (head_index < compared_to)
        square_sum += tl.where(compared, square * (unit * unit), 0.0)
    tl.store(sizes + start + i, size, mask=i < n)
    tl.store(squares + start + i, square_sum, mask=i < n)
    is_compared = (i >= tl.load(firsts + request)) & (i < n - 1)
    tl.store(distances + start + i, tl.where(is_compared, float("inf"), 0.0), mask=i < n)


@triton.jit(do_not_specialize=[*_RUNTIME, "later_blocks"])
def _nearest_later_kernel(
    v_ptrs, req_to_token, rows, offsets, page_stride, firsts, inverse_means, squares, distances,
    blocks, later_blocks, compared_from, compared_to,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, K_TYPE: tl.constexpr,
    FLOAT8: tl.constexpr, BLOCK: tl.constexpr, LATER: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """Distances of one block of a request's tokens to one block of later ones; the least stays."""
    d = tl.arange(0, HEAD_DIM)
    request = tl.program_id(0) // (blocks * later_blocks)
    start = tl.load(offsets + request)
    n = (tl.load(offsets + request + 1) - start).to(tl.int32)
    first = tl.load(firsts + request).to(tl.int32)
    begin = first + tl.program_id(0) // later_blocks % blocks * BLOCK
    later = first + tl.program_id(0) % later_blocks * LATER
    if (begin >= n) | (later >= n) | (later + LATER - 1 <= begin):
        return
    page = req_to_token + tl.load(rows + request) * page_stride
    inverse = inverse_means + request * LAYERS * KV_HEADS
    i, j = begin + tl.arange(0, BLOCK), later + tl.arange(0, LATER)
    slot = tl.load(page + i, mask=i < n, other=0).to(tl.int64)
    v_offset = slot[:, None] * K_SLOT_STRIDE + d[None, :]
    slot = tl.load(page + j, mask=j < n, other=0).to(tl.int64)
    w_offset = slot[:, None] * K_SLOT_STRIDE + d[None, :]
    # In units of the last head's squared mean length, so that one tile of sums is enough.
    products = tl.zeros([BLOCK, LATER], tl.float32)
    last = tl.load(inverse + compared_from)
    for head_index in range(compared_from, compared_to):
        values = tl.load(v_ptrs + head_index // KV_HEADS).to(tl.pointer_type(K_TYPE))
        values = tl.multiple_of(values + head_index % KV_HEADS * K_HEAD_STRIDE, 16)
        v = widened(tl.load(values + v_offset, mask=(i < n)[:, None], other=0), FLOAT8)
        w = widened(tl.load(values + w_offset, mask=(j < n)[:, None], other=0), FLOAT8)
        unit = tl.load(inverse + head_index)
        ratio = last / unit
        products = tl.dot(v, tl.trans(w), products * (ratio * ratio), input_precision="ieee")
        last = unit
    both = tl.load(squares + start + i, mask=i < n, other=0.0)[:, None]
    both += tl.load(squares + start + j, mask=j < n, other=0.0)[None, :]
    between = both - 2.0 * (products * (last * last))
    between = tl.where(between <= SAME * both, 0.0, between)
    counts = (j[None, :] > i[:, None]) & (j < n)[None, :]
    least = tl.min(tl.where(counts, between, float("inf")), axis=1)
    distance = tl.sqrt_rn(least / (compared_to - compared_from))
    # Floats from 0 on are in the order of their bits as integers.
    as_bits = distances.to(tl.pointer_type(tl.int32), bitcast=True)
    bits = distance.to(tl.int32, bitcast=True)
    tl.atomic_min(as_bits + start + i, bits, mask=i < n, sem="relaxed")


def distinct_values(
    paged: PagedKeys,
    firsts: Tensor,
    *,
    most_compared: int,
    weights: Tensor,
    compared: range,
) -> tuple[Tensor, Tensor]:
    """Distance and size of every cached token's value.

    Args:
        paged: the requests, with values in place of keys.
        firsts: int64 [B], the first token of each that is compared and whose length counts in the
            means.
        most_compared: tokens from there on, of the request that has most.
        weights: float32 [L, Hkv], contiguous, of the sizes.
        compared: layers of the distance, at least one.

    Returns:
        float32 [N] each, request after request.
    """
    distances = torch.empty(paged.columns, dtype=torch.float32, device=paged.device)
    sizes = torch.empty_like(distances)
    if not paged.columns:
        return distances, sizes
    inverse_means, squares = distances.new_empty(paged.tasks), torch.empty_like(distances)
    dtype, longest = paged.layer.dtype, max(paged.row_tokens)
    heads = compared.start * paged.kv_heads, compared.stop * paged.kv_heads
    options = _options(dtype)
    _mean_lengths_kernel[(paged.programs(_PROGRAMS_PER_PROCESSOR),)](
        *(*paged.arguments, firsts, inverse_means, paged.tasks), **options, **paged.constants
    )
    options["BLOCK"] = _sizes_block(dtype, paged.head_dim)
    blocks = triton.cdiv(longest, options["BLOCK"])
    _sizes_kernel[(len(paged.row_tokens) * blocks,)](
        *(*paged.arguments, firsts, inverse_means, weights, sizes, squares, distances),
        *(blocks, *heads),
        **options,
        **paged.constants,
    )
    options = _nearest_options(dtype, paged.head_dim)
    blocks = triton.cdiv(most_compared, options["BLOCK"])
    later_blocks = triton.cdiv(most_compared, options["LATER"])
    _nearest_later_kernel[(len(paged.row_tokens) * blocks * later_blocks,)](
        *(*paged.arguments, firsts, inverse_means, squares, distances),
        *(blocks, later_blocks, *heads),
        SAME=SAME_VALUE,
        **options,
        **paged.constants,
        **register_limit(_MAX_REGISTERS, paged.device),
    )
    return distances, sizes


def _options(dtype: torch.dtype) -> dict[str, int]:
    """Values that a program of the first kernel takes at once; launch options of the first two."""
    if dtype == torch.float32:
        return {"BLOCK": 32, "num_warps": 4, "num_stages": 1}
    return {"BLOCK": 64, "num_warps": 8, "num_stages": 1}


def _sizes_block(dtype: torch.dtype, head_dim: int) -> int:
    """Values that a program of the second kernel takes at once; 64 of 256 numbers spill."""
    return 32 if dtype == torch.float32 or head_dim > 128 else 64


def _nearest_options(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Tiles of the third kernel, and its launch options."""
    if dtype == torch.float32:
        return {"BLOCK": 32, "LATER": 32, "num_warps": 4, "num_stages": 1}
    if dtype in TRITON_NAMES and head_dim <= 128:
        # On an H200 a tenth faster than 128 by 128. 128 by 256 were another tenth faster, and spill
        # on sm_80 and sm_100.
        return {"BLOCK": 64, "LATER": 128, "num_warps": 8, "num_stages": 3}
    # One stage: with copies of later blocks in flight, several types and sizes of heads spill.
    return {"BLOCK": 64, "LATER": 64, "num_warps": 8, "num_stages": 1}

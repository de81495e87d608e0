"""The last key that is similar to each key, without the matrix of their cosines.

``last_similar(r)`` = the largest c with ``S[r, c] > threshold``, -1 where there is none; S is the
cosine matrix of a request's keys of one layer and KV head, its diagonal 0. ``key_redundancy`` is
built on it; the truth is the same step of ``reference.key_redundancy``.

Source: R-KV (arXiv 2505.24133) section 3.3; SkipKV (arXiv 2512.07993) eq. 5.

How: a program takes a tile of rows and walks tiles of columns from the last one down. The first
similar column that a row meets is its answer, and the walk ends when every row of the tile has one:
exact, and short where keys repeat. It goes in runs of 1, 2, 4, ... tiles, within which keys are
loaded ahead. A tile whose largest product, over its smallest norm, is too small for any row is not
looked at further, which leaves the tensor cores little to wait for: not even the norms of its keys,
since tiles are counted from a request's end, where ``inverse_norm_bounds`` has one number for them.
Products are of raw 16-bit keys with float32 sums (float32 keys: float32 throughout), scaled by
inverse norms; S is never stored.

Mutates nothing but its own buffer. Not for CUDA graphs: the grid depends on the lengths.

Floors for n tokens, if no walk ends early: bytes ``L Hkv n (d key_bytes + 8)``, operations
``2 L Hkv d n^2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.on_device import TRITON_NAMES, register_limit
from sgl_skipkv.kernels.paged_keys import PagedKeys, widened

#: keys that share an inverse norm bound, counted from the last of a request; a tile has one or two
BOUND_TOKENS = 32
_BOUND_TOKENS = tl.constexpr(BOUND_TOKENS)
#: other numbers at every compaction: one variant must do for all of them, or a server compiles
_VARYING = ("columns", "bounds_stride", "tiles")


@triton.jit(do_not_specialize=_VARYING)
def _last_similar_kernel(
    k_ptrs, req_to_token, rows, offsets, page_stride, inverse_norms, inverse_norm_bounds,
    bounds_stride, thresholds, last_similar, columns, tiles, LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, K_SLOT_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr, K_TYPE: tl.constexpr, FLOAT8: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one layer and KV head against tiles of columns, from the last one down."""
    task = tl.program_id(0) // tiles
    head_index = (task % (LAYERS * KV_HEADS)).to(tl.int64)
    request = task // (LAYERS * KV_HEADS)
    first = tl.load(offsets + request)
    n = (tl.load(offsets + request + 1) - first).to(tl.int32)
    r = tl.program_id(0) % tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if tl.program_id(0) % tiles * BLOCK_ROWS >= n:
        return
    page = req_to_token + tl.load(rows + request) * page_stride
    keys = tl.load(k_ptrs + head_index // KV_HEADS).to(tl.pointer_type(K_TYPE))
    keys = tl.multiple_of(keys + head_index % KV_HEADS * K_HEAD_STRIDE, 16)
    threshold = tl.load(thresholds + request)
    inverse_norms += head_index * columns + first
    bounds = inverse_norm_bounds + head_index * bounds_stride + first // _BOUND_TOKENS + request
    d = tl.arange(0, DEPTH)[None, :]
    wanted = r < n
    slot = tl.load(page + r, mask=wanted, other=0).to(tl.int64)
    own_keys = keys + (slot[:, None] * K_SLOT_STRIDE + d)
    if DEPTH == HEAD_DIM:
        own = widened(tl.load(own_keys, mask=wanted[:, None], other=0), FLOAT8)
    # cosine > threshold, multiplied by the row's norm.
    least = threshold / tl.load(inverse_norms + r, mask=wanted, other=1.0)
    best = tl.full([BLOCK_ROWS], -1, tl.int32)
    passed, tiles_ahead, searching = 0, 1, 1  # passed: tiles, from the end
    while (searching > 0) & (n - passed * BLOCK_COLUMNS > 0):
        # Keys are loaded ahead within a run of tiles. The first is short, because most walks are.
        tiles_ahead = tl.minimum(tiles_ahead, tl.cdiv(n, BLOCK_COLUMNS) - passed)
        for tile in range(passed, passed + tiles_ahead):
            start = n - (tile + 1) * BLOCK_COLUMNS
            c = start + tl.arange(0, BLOCK_COLUMNS)
            inside = c >= 0
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
                is_similar = (product * inverse[None, :] > least[:, None]) & inside[None, :]
                is_similar &= c[None, :] != r[:, None]
                last = tl.max(tl.where(is_similar, c[None, :], -1), axis=1)
                best = tl.maximum(best, last)  # later ones lie lower
        passed += tiles_ahead
        tiles_ahead *= 2
        searching = tl.max((wanted & (best < 0)).to(tl.int32), axis=0)
    # Below 0 the diagonal, which is 0, counts as similar as well; to leave it out changes nothing.
    best = tl.maximum(best, tl.where(threshold < 0.0, r, -1))
    tl.store(last_similar + head_index * columns + first + r, best, mask=wanted)


def last_similar_keys(
    paged: PagedKeys, inverse_norms: Tensor, inverse_norm_bounds: Tensor, thresholds: Tensor
) -> Tensor:
    """The last similar key of every key.

    Args:
        paged: the requests.
        inverse_norms: float32 [L, Hkv, N], contiguous, ``1 / max(norm, eps)`` of every key.
        inverse_norm_bounds: float32 [L, Hkv, ``bound_columns(row_tokens)``], contiguous: entry
            ``offset // 32 + b + g`` is the largest of these for the keys [n - 32 (g + 1), n - 32 g)
            of request b, which begins at ``offset``.
        thresholds: float32 [B], cosine above which two keys count as similar.

    Returns:
        int32 [L, Hkv, N], request after request: an entry of the same request, or -1.
    """
    shape = (paged.layers, paged.kv_heads, paged.columns)
    last_similar = torch.empty(shape, dtype=torch.int32, device=paged.device)
    if not paged.columns:
        return last_similar
    options = _options(paged.layer.dtype, paged.head_dim)
    tiles = triton.cdiv(max(paged.row_tokens), options["BLOCK_ROWS"])
    bounds = (inverse_norm_bounds, bound_columns(paged.row_tokens))
    _last_similar_kernel[(paged.tasks * tiles,)](
        *(*paged.arguments, inverse_norms, *bounds, thresholds, last_similar, paged.columns, tiles),
        **options,
        **paged.constants,
        **register_limit(_max_registers(paged.layer.dtype), paged.device),
    )
    return last_similar


def bound_columns(row_tokens: Sequence[int]) -> int:
    """Numbers per layer and KV head in ``inverse_norm_bounds``; a request ends before the next."""
    return sum(row_tokens) // BOUND_TOKENS + len(row_tokens)


def _options(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """Tile sizes and launch options."""
    if dtype == torch.float32:  # no tensor cores: operands in registers, a part of d at a time
        tile = {"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 32, "DEPTH": min(head_dim, 16)}
        return {**tile, "num_warps": 8, "num_stages": 2}
    if dtype in TRITON_NAMES and head_dim <= 128:
        tile = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 64, "DEPTH": head_dim}
        # Slots, then keys, then products: five stages keep three tiles of keys in flight. With
        # heads of 128 fewer programs then fit on an H100's multiprocessor, which took longer.
        return {**tile, "num_warps": 8, "num_stages": 3 if head_dim == 128 else 5}
    # Wider heads fit into 99 KiB of shared memory, and bytes that become float16 into registers,
    # those of a head of 128 with fewer keys on their way.
    tile = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 32, "DEPTH": head_dim}
    return {**tile, "num_warps": 8, "num_stages": 2 if head_dim == 128 else 3}


def _max_registers(dtype: torch.dtype) -> dict[int, int]:
    """Per thread, by architecture, where the compiler's own choice is worse.

    Left alone it takes 160 of 16-bit keys on sm_90, and only one program fits on a multiprocessor;
    float32 keys get 80 and a few bytes of spills, and so do float8 keys on sm_80 (128) and sm_100.
    """
    if dtype == torch.float32:
        return dict.fromkeys((80, 90, 100), 128)
    return {90: 128} if dtype in TRITON_NAMES else {80: 168, 90: 128, 100: 128}

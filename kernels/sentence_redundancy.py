"""How similar each sentence is to a later one of its request: every due request in one launch.

``redundancy[i] = max over j > i of cosine(v_i, v_j)``, without a matrix of similarities in memory.
The truth is ``reference.sentence_redundancy``.

Source: SkipKV (arXiv 2512.07993) eqs 1-3; cosine, as in its code. Mutates nothing. Not for CUDA
graphs: the grid depends on the number of sentences.

One program per pair of tiles of 32 sentences; the same pair gives the same bits in any batch.

Floors for S sentences per request: bytes ``sum of (S (D vector_bytes + 8) + 16)``; operations
``sum of S (S - 1) D``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_EPS = tl.constexpr(1e-8)
_TILE, _TILE_DEPTH = 32, 64


@triton.jit(do_not_specialize_on_alignment=["tracks", "counts"])  # parts of one packed tensor
def _raise_redundancy_kernel(
    vectors, redundancy, tracks, counts, width, capacity,
    TILE: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    later_tile, tile, call = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + call)
    if (later_tile < tile) | (later_tile * TILE >= count):
        return
    first = tl.load(tracks + call) * capacity
    i = tile * TILE + tl.arange(0, TILE)
    j = later_tile * TILE + tl.arange(0, TILE)
    earlier = vectors + (first + i)[:, None] * width
    later = vectors + (first + j)[:, None] * width
    product = tl.zeros((TILE, TILE), tl.float32)
    squares_i, squares_j = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for start in range(0, width, TILE_DEPTH):
        k = start + tl.arange(0, TILE_DEPTH)
        inside = (k < width)[None, :]
        a = tl.load(earlier + k[None, :], mask=inside & (i < count)[:, None], other=0.0)
        b = tl.load(later + k[None, :], mask=inside & (j < count)[:, None], other=0.0)
        product = tl.dot(a, tl.trans(b), product, input_precision="ieee")
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        squares_i += tl.sum(wide_a * wide_a, axis=1)
        squares_j += tl.sum(wide_b * wide_b, axis=1)
    norm_i = tl.maximum(tl.sqrt_rn(squares_i), _EPS)
    norm_j = tl.maximum(tl.sqrt_rn(squares_j), _EPS)
    cosine = tl.div_rn(product, norm_i[:, None] * norm_j[None, :])
    is_later = (j[None, :] > i[:, None]) & (j < count)[None, :]
    highest = tl.max(tl.where(is_later, cosine, -1.0), axis=1)
    # A maximum is the same in any order, and Triton takes that of floats as one of integers.
    tl.atomic_max(redundancy + call * capacity + i, highest, mask=i < count)


def sentence_redundancy(
    vectors: Tensor, tracks: Tensor, counts: Tensor, *, max_count: int
) -> Tensor:
    """float32 [B, capacity], similarity of each entry with the most similar later one of its table;
    -1 where there is none.

    Args:
        vectors: float16, bfloat16 or float32 [tracks, capacity, D], contiguous, sentence vectors;
            normalised again here.
        tracks: int64 [B], whose tables.
        counts: int64 or int32 [B], entries in use.
        max_count: the largest of them, or more.

    Raises:
        ValueError: a count or strides that do not fit.
    """
    if not 0 <= max_count <= vectors.shape[1]:
        raise ValueError(f"max_count: expected [0, {vectors.shape[1]}], got {max_count}")
    if not vectors.is_contiguous():
        strides = [*vectors.stride()]
        raise ValueError(f"vectors: expected a contiguous tensor, got strides {strides}")
    requests, capacity = tracks.shape[0], vectors.shape[1]
    redundancy = torch.full((requests, capacity), -1.0, device=vectors.device)
    if requests == 0 or max_count < 2:
        return redundancy
    tiles = triton.cdiv(max_count, _TILE)
    _raise_redundancy_kernel[(tiles, tiles, requests)](
        *(vectors, redundancy, tracks, counts, vectors.shape[2], capacity),
        TILE=_TILE,
        TILE_DEPTH=_TILE_DEPTH,
    )
    return redundancy

"""The kept and the evicted tokens of every due request, by score: one launch, no sort.

Of each request the protected tokens stay, and of the others those with the highest scores, ``keep``
in all. Of equal scores the later token stays; a score that is no finite number is lower than every
other. The truth is ``select.select_together`` in plain torch.

How: one program per request. It maps scores to integers of the same order, finds the ``keep``-th
highest digit by digit (8 passes, each counts how many are at least each of 16 candidates), and
writes both halves in one ascending walk with running counts. Integers only, so the result depends
on the request's own scores alone.

Mutates nothing but its own buffers. Not for CUDA graphs: the grid depends on the batch.

Floors, with N tokens of B requests: bytes ``(4 + 8) N + 41 B``; operations none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOWEST, _HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
_BLOCK, _WARPS = 1024, 8


@triton.jit
def _select_kernel(
    scores, keys, offsets, kept_offsets, ranges, range_offsets, kept, evicted, finite,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first, first_kept = tl.load(offsets + request), tl.load(kept_offsets + request)
    tokens = (tl.load(offsets + request + 1) - first).to(tl.int32)
    keep = (tl.load(kept_offsets + request + 1) - first_kept).to(tl.int32)
    first_range, last_range = tl.load(range_offsets + request), tl.load(range_offsets + request + 1)

    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < tokens
        score = tl.load(scores + first + i, mask=inside, other=0.0)
        is_finite = tl.abs(score) < float("inf")  # false of NaN
        broken += 1 - is_finite.to(tl.int32)
        bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
        key = tl.where(bits < 0, bits ^ _HIGHEST, bits)
        key = tl.where(is_finite, key, _LOWEST)
        for at in range(first_range, last_range):
            begin, end = tl.load(ranges + 2 * at), tl.load(ranges + 2 * at + 1)
            key = tl.where((i >= begin) & (i < end), _HIGHEST, key)
        tl.store(keys + first + i, key, mask=inside)
    tl.store(finite + request, tl.sum(broken, axis=0) == 0)
    tl.debug_barrier()  # the walks below read what other threads wrote

    threshold = tl.full([], _LOWEST, tl.int32)
    for digit in range(0, 8):
        step = tl.full([], 1, tl.int32) << (28 - 4 * digit)
        candidates = threshold + tl.arange(0, 16) * step
        reached = tl.zeros([16], tl.int32)
        for start in range(0, tokens, BLOCK):
            i = start + tl.arange(0, BLOCK)
            key = tl.load(keys + first + i, mask=i < tokens, other=_LOWEST)
            counts = (key[:, None] >= candidates[None, :]) & (i < tokens)[:, None]
            reached += tl.sum(counts.to(tl.int32), axis=0)
        # The lowest candidate is always reached by enough; they ascend, so as many are as fit.
        threshold += (tl.sum((reached >= keep).to(tl.int32), axis=0) - 1) * step

    above, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(keys + first + i, mask=i < tokens, other=_LOWEST)
        above += ((key > threshold) & (i < tokens)).to(tl.int32)
        equal += ((key == threshold) & (i < tokens)).to(tl.int32)
    evicted_ties = tl.sum(equal, axis=0) - (keep - tl.sum(above, axis=0))

    ties, stayed = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, tokens, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < tokens
        key = tl.load(keys + first + i, mask=inside, other=_LOWEST)
        is_tie = ((key == threshold) & inside).to(tl.int32)
        older_ties = ties + tl.cumsum(is_tie, axis=0) - is_tie
        stays = inside & ((key > threshold) | ((is_tie > 0) & (older_ties >= evicted_ties)))
        count = stays.to(tl.int32)
        rank = stayed + tl.cumsum(count, axis=0) - count
        tl.store(kept + first_kept + rank, i.to(tl.int64), mask=stays)
        gone = evicted + (first - first_kept) + (i - rank)
        tl.store(gone, i.to(tl.int64), mask=inside & (count == 0))
        ties += tl.sum(is_tie, axis=0)
        stayed += tl.sum(count, axis=0)


def select_tokens(
    scores: Tensor,
    offsets: Tensor,
    kept_offsets: Tensor,
    ranges: Tensor,
    range_offsets: Tensor,
    kept_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose among the tokens of B requests.

    Args:
        scores: float32 [N], request after request, contiguous.
        offsets: int64 [B + 1], where each request's tokens start, and N.
        kept_offsets: int64 [B + 1], how many stay of all requests before it, and K; of each at
            least its protected tokens.
        ranges: int64 [2 R], begin and end of each half-open protected range, in the request's own
            indices, in any order; they may overlap and reach beyond its tokens.
        range_offsets: int64 [B + 1], where each request's ranges start, and R.
        kept_tokens: K.

    Returns:
        int64 [K] and [N - K], kept and evicted indices, ascending within each request; bool [B],
        whether all of a request's scores are finite.
    """
    requests, tokens = offsets.shape[0] - 1, scores.shape[0]
    kept, evicted = offsets.new_empty(kept_tokens), offsets.new_empty(tokens - kept_tokens)
    finite = torch.empty(requests, dtype=torch.bool, device=scores.device)
    if requests:
        keys = torch.empty(tokens, dtype=torch.int32, device=scores.device)
        _select_kernel[(requests,)](
            *(scores, keys, offsets, kept_offsets, ranges, range_offsets, kept, evicted, finite),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return kept, evicted, finite

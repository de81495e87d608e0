"""Scores, protected ranges and integer counts become the kept sets of all requests that are due.

The counts are the primitive: the CPU decides how many, the device decides which. Nothing here reads
a device value back, and on a GPU one kernel selects for all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensors, uses_triton

Ranges = Sequence[tuple[int, int]]


class Selection(NamedTuple):
    """A partition of ``range(n)``; both halves int64, ascending, on the scores' device."""

    kept: Tensor
    evicted: Tensor


def select_together(
    scores: Sequence[Tensor], protected: Sequence[Ranges], keep_tokens: Sequence[int]
) -> tuple[list[Selection], Tensor]:
    """Of each request keep the protected ranges and the best of the rest, ``keep_tokens`` in all.

    Ties go to the later position, so the result depends on the request's scores alone: not on the
    batch, the schedule or the sort algorithm.

    Args:
        scores: float32 [n] each, one per cached token in ascending logical position, higher = keep.
        protected: of each request half-open ranges of row indices that are kept whatever their
            score.
        keep_tokens: size of each kept set, in ``[protected tokens, n]``.

    Returns:
        each request's selection, and bool [requests], whether all of its scores were numbers.

    Raises:
        ValueError: a count that cannot be met.
    """
    lengths = [one.shape[0] for one in scores]
    for n, ranges, keep in zip(lengths, protected, keep_tokens, strict=True):
        covered = _covered_tokens(ranges, n)
        if not covered <= keep <= n:
            raise ValueError(
                f"keep_tokens: expected an integer in [{covered} protected, {n} cached], got {keep}"
            )
    choose = by_kernel if uses_triton(scores[0].device) else by_sort
    return choose(scores, protected, keep_tokens)


def by_kernel(
    scores: Sequence[Tensor], protected: Sequence[Ranges], keep_tokens: Sequence[int]
) -> tuple[list[Selection], Tensor]:
    """One launch for all requests."""
    from sgl_skipkv.kernels.selection import select_tokens

    lengths, flat = [one.shape[0] for one in scores], torch.cat(list(scores)).float()
    sizes = (lengths, keep_tokens, [len(own) for own in protected])
    offsets, kept_offsets, range_offsets, ranges = device_tensors(
        [
            *([0, *accumulate(one)] for one in sizes),
            [bound for own in protected for bounds in own for bound in bounds],
        ],
        flat.device,
    )
    kept, evicted, finite = select_tokens(
        flat, offsets, kept_offsets, ranges, range_offsets, sum(keep_tokens)
    )
    evict_tokens = [n - keep for n, keep in zip(lengths, keep_tokens, strict=True)]
    halves = torch.split(kept, list(keep_tokens)), torch.split(evicted, evict_tokens)
    return [Selection(*both) for both in zip(*halves, strict=True)], finite


def by_sort(
    scores: Sequence[Tensor], protected: Sequence[Ranges], keep_tokens: Sequence[int]
) -> tuple[list[Selection], Tensor]:
    """In plain torch: the truth that the kernel is tested against."""
    selections = []
    for own, ranges, keep in zip(scores, protected, keep_tokens, strict=True):
        # A score that is no number is lower than every other: a protected token may be shared.
        keys = own.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        for start, stop in ranges:
            keys[start:stop] = torch.inf
        # The newest token first: of equals, a stable sort keeps the first.
        best = keys.flip(0).sort(descending=True, stable=True).indices
        rows = own.shape[0] - 1 - best
        selections.append(Selection(rows[:keep].sort().values, rows[keep:].sort().values))
    return selections, torch.stack([own.isfinite().all() for own in scores])


def _covered_tokens(ranges: Ranges, n: int) -> int:
    """Tokens in the union of half-open ranges, cut to ``[0, n)``."""
    covered, reach = 0, 0
    for start, stop in sorted(ranges):
        start, stop = max(start, reach), min(stop, n)
        if stop > start:
            covered, reach = covered + stop - start, stop
    return covered

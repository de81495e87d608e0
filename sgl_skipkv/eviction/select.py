"""Scores, protected ranges and integer counts become the kept sets of all requests that are due.

The counts are the primitive: the CPU decides how many, the device decides which. Nothing here reads
a device value back, and what is started on the device does not grow with the number of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor

Ranges = Sequence[tuple[int, int]]


class Selection(NamedTuple):
    """A partition of ``range(n)``; both halves int64, ascending, on the scores' device."""

    kept: Tensor
    evicted: Tensor


def select(scores: Tensor, protected: Ranges, keep_tokens: int) -> Selection:
    """``select_together`` for one request."""
    [selection], _ = select_together([scores], [protected], [keep_tokens])
    return selection


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
    calls, width, starts = len(lengths), max(lengths), accumulate(lengths)
    # A score that is no number is lower than every other: what is protected may not be ours alone.
    flat = torch.cat(list(scores)).nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    last = [stop - 1 for stop in starts]
    n, keep, end = device_tensor([*lengths, *keep_tokens, *last], flat.device).view(3, calls, 1)
    # One row per request, the newest token first: of equals, a stable sort keeps the first.
    column = torch.arange(width, device=flat.device)
    age = n - 1 - column
    beyond = age < 0  # of the request's first token; what stands there is somebody else's
    table = flat[end - column]
    protected_columns = _protected_columns(protected, lengths, width, flat.device)
    keys = table.masked_fill(beyond, -torch.inf).masked_fill(protected_columns, torch.inf)
    order = keys.sort(dim=1, descending=True, stable=True).indices
    goes = torch.empty_like(beyond).scatter_(1, order, column >= keep)
    # Ascending position is descending age, so a running count from the newest says how many places
    # from its half's end an entry goes. Columns beyond stay behind both halves.
    gone = goes.cumsum(1)
    place = torch.where(goes, n - gone, keep - 1 - column + gone)
    partition = torch.empty_like(age).scatter_(1, torch.where(beyond, column, place), age)
    return (
        [
            Selection(row[:kept], row[kept:tokens])
            for row, kept, tokens in zip(partition.unbind(), keep_tokens, lengths, strict=True)
        ],
        ((table > -torch.inf) | beyond).all(dim=1),
    )


def _protected_columns(
    protected: Sequence[Ranges], lengths: Sequence[int], width: int, device: torch.device
) -> Tensor:
    """bool [requests, width], what is protected, newest token first."""
    bounds, signs = [], []
    for i, (ranges, n) in enumerate(zip(protected, lengths, strict=True)):
        for start, stop in ranges:
            if start < min(stop, n):
                bounds += [i * (width + 1) + n - min(stop, n), i * (width + 1) + n - start]
                signs += [1, -1]
    at, sign = device_tensor([*bounds, *signs], device).view(2, len(bounds))
    edges = torch.zeros(len(lengths) * (width + 1), dtype=torch.int64, device=device)
    edges.index_add_(0, at, sign)
    return edges.view(len(lengths), width + 1)[:, :width].cumsum(1) > 0


def _covered_tokens(ranges: Ranges, n: int) -> int:
    """Tokens in the union of half-open ranges, cut to ``[0, n)``."""
    covered, reach = 0, 0
    for start, stop in sorted(ranges):
        start, stop = max(start, reach), min(stop, n)
        if stop > start:
            covered, reach = covered + stop - start, stop
    return covered

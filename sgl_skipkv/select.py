"""Scores, protected ranges and an integer count become the kept set of one call.

The count is the primitive: the CPU decides how many, the device decides which. Nothing here reads a
device value back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Selection(NamedTuple):
    """A partition of ``range(n)``; both halves int64, ascending, on the scores' device."""

    kept: Tensor
    evicted: Tensor


def select(scores: Tensor, protected: Sequence[tuple[int, int]], keep_tokens: int) -> Selection:
    """Keep the protected ranges and the best of the rest, ``keep_tokens`` in all.

    Ties go to the later position, so the result depends on the scores alone: not on the batch, the
    schedule or the sort algorithm.

    Args:
        scores: float32 [n], one per cached token in ascending logical position, higher = keep.
        protected: half-open ranges of row indices that are kept whatever their score.
        keep_tokens: size of the kept set, in ``[protected tokens, n]``.

    Raises:
        ValueError: a count that cannot be met.
    """
    n = scores.shape[0]
    covered = _covered_tokens(protected, n)
    if not covered <= keep_tokens <= n:
        raise ValueError(
            f"keep_tokens: expected an integer in [{covered} protected, {n} cached], "
            f"got {keep_tokens}"
        )
    # A score that is no number is lower than every other: what is protected may not be ours alone.
    keys = torch.where(scores.isfinite(), scores.to(torch.float32), -torch.inf)
    for start, stop in protected:
        keys[start:stop] = torch.inf
    # A stable descending sort keeps the first of equals first; reversed input makes that the later.
    order = n - 1 - keys.flip(0).sort(descending=True, stable=True).indices
    return Selection(order[:keep_tokens].sort().values, order[keep_tokens:].sort().values)


def _covered_tokens(ranges: Sequence[tuple[int, int]], n: int) -> int:
    """Tokens in the union of half-open ranges, cut to ``[0, n)``."""
    covered, reach = 0, 0
    for start, stop in sorted(ranges):
        start, stop = max(start, reach), min(stop, n)
        if stop > start:
            covered, reach = covered + stop - start, stop
    return covered

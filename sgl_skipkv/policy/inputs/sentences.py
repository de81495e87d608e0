"""The sentences of one request, and where tokens stand in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where tokens stand in their sentences.

    Attributes:
        sentence: int64 [n], the last one that begins at or before each token, or the first.
        since: int64 [n], tokens since it began; negative: before it.
        left: int64 [n], tokens until it ends, 1 of its delimiter; 0 or less: behind it.
    """

    sentence: Tensor
    since: Tensor
    left: Tensor

    def ending_bonus(self, ending: int) -> Tensor:
        """float32 [n]: how near each token stands to the delimiter that closes its sentence.

        Args:
            ending: tokens per sentence with a bonus; the nearest gets this much, the farthest 1,
                the delimiter itself, the last of several in a row, and everything else 0.
        """
        inside = (self.since >= 0) & (self.left > 1)
        return ((ending + 2 - self.left).clamp_min(0) * inside).float()

    def begins(self, beginning: int) -> Tensor:
        """bool [n]: whether each is one of so many tokens that its sentence begins with."""
        return (self.since >= 0) & (self.since < beginning) & (self.left > 0)


@dataclass(frozen=True)
class Sentences:
    """The closed sentences of a request that still have cached tokens, oldest first.

    Attributes:
        starts, stops: int64 [S], half-open spans in logical positions, prompt included.
        redundancy: float32 [S], highest cosine similarity to any sentence that closed later, -1
            where there is none. It never falls: a flag stays for the life of the request. -1 for
            policies that ask for spans alone.
    """

    starts: Tensor
    stops: Tensor
    redundancy: Tensor

    def places(self, positions: Tensor) -> Places:
        """Where tokens stand in their sentences.

        Args:
            positions: int64 [n], logical, ascending.
        """
        if self.starts.shape[0] == 0:
            before = torch.full_like(positions, -1)
            return Places(before, before, before)
        owner = (torch.searchsorted(self.starts, positions, right=True) - 1).clamp_min(0)
        return Places(owner, positions - self.starts[owner], self.stops[owner] - positions)

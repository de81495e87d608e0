"""Sums over the thoughts of traces, from whose means a steering vector is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassStatistics:
    """Sums over the thoughts of one or more traces; [2] is (non-execution, execution).

    Attributes:
        total: float64 [2, layers, D], sum of hidden states.
        squares: float64 [2, layers], sum of their squared norms.
        count: int64 [2], thoughts.
    """

    total: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, layers: int, width: int) -> ClassStatistics:
        total = torch.zeros(2, layers, width, dtype=torch.float64)
        return cls(total, torch.zeros_like(total[..., 0]), torch.zeros(2, dtype=torch.int64))

    def __add__(self, other: ClassStatistics) -> ClassStatistics:
        return ClassStatistics(
            self.total + other.total, self.squares + other.squares, self.count + other.count
        )

    def difference(self) -> Tensor:
        """``mean(execution) - mean(non-execution)``, float64 [layers, D]."""
        means = self.total / self.count.clamp_min(1)[:, None, None]
        return means[1] - means[0]

    def separation(self) -> Tensor:
        """Distance of the means over the standard deviation within the classes, float64 [layers].

        With ``|x|`` the norm over D: ``|m1 - m0| / sqrt(mean over classes of E|x|^2 - |m|^2)``.
        """
        means = self.total / self.count.clamp_min(1)[:, None, None]
        within = self.squares / self.count.clamp_min(1)[:, None] - means.square().sum(dim=2)
        spread: Tensor = within.clamp_min(0).mean(dim=0).sqrt().clamp_min(1e-12)
        distance: Tensor = self.difference().norm(dim=1)
        return distance / spread


def class_statistics_of(
    hidden: Tensor, at: Mapping[int, int], labelled: Iterator[tuple[int, int]]
) -> ClassStatistics:
    """The ``ClassStatistics`` of one trace.

    Args:
        hidden: float64 [layers, delimiters, D].
        at: position -> index in ``hidden``; a thought whose position is missing is left out.
        labelled: (position, 1 for execution, else 0) of every thought.
    """
    sums = ClassStatistics.zeros(hidden.shape[0], hidden.shape[2])
    for position, label in labelled:
        if position in at:
            state = hidden[:, at[position]]
            sums.total[label] += state
            sums.squares[label] += state.square().sum(dim=1)
            sums.count[label] += 1
    return sums

"""Who may write to which ring of recent queries, and in which decode steps.

A request's queries matter in the last ``window`` steps before each of its compactions only. All
running requests advance by one token per decode step, so when a request is admitted it is known in
which
steps that will be: requests that never record in the same step share a ring. Whoever finds no ring
    for its steps waits a few steps, until its own have moved to a gap. What a request keeps does
    not depend on
that: its compactions go by its own length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class RingBook:
    """Steps are counted modulo ``cycle``; the steps of a request are the bits of one integer.

    Args:
        rings: how many there are, numbered from 1.
        cycle: decode steps after which the usual call records again, the server's interval.

    Attributes:
        steps: decode steps launched so far.
    """

    def __init__(self, rings: int, cycle: int) -> None:
        self.steps = 0
        self._cycle = cycle
        self._booked = [0] * rings

    @property
    def free_rings(self) -> int:
        """Rings that nobody has booked for any step."""
        return self._booked.count(0)

    @property
    def always(self) -> int:
        """Every step, for a request that needs a ring of its own."""
        return (1 << self._cycle) - 1

    def recording_steps(self, due: int, interval: int, window: int) -> int:
        """The steps in which a request records.

        Args:
            due: the step that is the last one before its first compaction.
            interval: steps between two compactions. window: steps that it records before each.
        """
        # due, due + interval, due + 2 interval, ... meet exactly the multiples of this apart.
        apart = math.gcd(interval, self._cycle)
        if window >= apart:
            return self.always
        steps = 0
        for last in range(due % apart, self._cycle, apart):
            for back in range(window):
                steps |= 1 << (last - back) % self._cycle
        return steps

    def fits(self, steps: int, before: Iterable[int] = ()) -> bool:
        """Whether a ring is left for these steps, after requests with those have taken theirs."""
        booked = self._booked.copy()
        for earlier in before:
            booked[_first_fit(booked, earlier)] |= earlier
        return any(not ring & steps for ring in booked)

    def take(self, steps: int) -> int:
        """The first ring that nobody uses in these steps.

        Raises:
            LookupError: there is none; ask ``fits`` first.
        """
        ring = _first_fit(self._booked, steps)
        self._booked[ring] |= steps
        return ring + 1

    def give_back(self, ring: int, steps: int) -> None:
        """The request that had taken the ring for these steps is over."""
        assert self._booked[ring - 1] & steps == steps, "only what was taken comes back"
        self._booked[ring - 1] ^= steps


def _first_fit(booked: list[int], steps: int) -> int:
    for ring, taken in enumerate(booked):
        if not taken & steps:
            return ring
    raise LookupError("no ring is free in these steps")

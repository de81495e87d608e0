"""What a family of problems is: a prompt, the one right trace, and which old tokens it needs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from bench.reasoner.families.needed import Rule

Size = Literal["short", "middle", "long"]
"""Traces of about 300, 900 and 2,000 to 3,000 tokens."""
SIZES: tuple[Size, ...] = get_args(Size)

LARGEST = 24
"""Counts lie between 1 and this, as in ``problems``."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a family draws: the user message, the passages of the trace, and what it finds."""

    prompt: str
    passages: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Task:
    """A problem of a family. Its solution follows from its prompt, token by token."""

    family: str
    size: Size | None
    prompt: str
    solution: str
    answer: int

    @property
    def digest(self) -> str:
        """A hash of the prompt, to keep held-out problems out of training."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of trace.

    Attributes:
        name: its name in the registry and in ``heldout.jsonl``.
        steps: for each size how many steps a problem has (half-open range).
        fewest: the least number of steps that makes a problem.
        most: the most steps in training; held-out problems may have fewer, since what only the
            longest ones have is learned last.
        draw: draws a problem with so many steps.
        needed: names the old tokens that later steps of a trace need.
    """

    name: str
    steps: Mapping[Size, tuple[int, int]]
    fewest: int
    most: int
    draw: Callable[[random.Random, int], Draft]
    needed: Rule

    def make(self, seed: str, size: Size) -> Task:
        """A problem of a size; the same seed gives the same problem."""
        steps = random.Random(f"{seed}/steps").randrange(*self.steps[size])
        return self.make_steps(seed, steps, size)

    def make_steps(self, seed: str, steps: int, size: Size | None = None) -> Task:
        """A problem of so many steps; the same seed gives the same problem."""
        draft = self.draw(random.Random(f"{self.name}/{seed}"), steps)
        solution = f"{''.join(draft.passages)}</think>\nAnswer: {draft.answer}"
        return Task(self.name, size, draft.prompt, solution, draft.answer)

"""``updates``: a program traced line by line. Only the newest value of a variable counts.

7. p plus q: p has 5 and q has 3, 5 + 3 = 8, so p = 8.

Values that were overwritten stand in the same words. A variable is not written twice within
``LEAST_GAP`` lines, nor left alone for more than ``MOST_AGE``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench.reasoner.families.base import LARGEST, Draft, Family
from bench.reasoner.families.needed import newest_ends_of_late
from bench.reasoner.problems import DeadEndError

VARIABLES: tuple[str, ...] = tuple("g h k m p q r t v x".split())
LEAST_GAP = 3
MOST_AGE = 16
HOT = 3
"""How many variables are written more often than the others."""


class State:
    """Variables with their values, and when each was written last."""

    def __init__(self, rng: random.Random, variables: int) -> None:
        self.rng = rng
        self.names = rng.sample(VARIABLES, variables)
        self.hot = self.names[:HOT]
        self.value: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self.line = 0

    def lines(self, steps: int) -> Iterator[tuple[str, str]]:
        """What prompt and trace say of each line: first all variables, then the updates."""
        for name in self.rng.sample(self.names, len(self.names)):
            value = self.rng.randint(2, LARGEST)
            yield f"{name} is {value}", f"{name} is {value}, so {name} = {value}"
            self._write(name, value)
        for _ in range(steps):
            yield self._update()

    def _write(self, name: str, value: int) -> None:
        self.value[name] = value
        self.written[name] = self.line
        self.line += 1

    def _update(self) -> tuple[str, str]:
        name = self._next_name()
        word, sign, other, result = self.rng.choice(self._kinds(name))
        left, right = self.value[name], self.value[other]
        told = f"{name} {word} {other}"
        read = f"{name} has {left} and {other} has {right}"
        self._write(name, result)
        return told, f"{told}: {read}, {left} {sign} {right} = {result}, so {name} = {result}"

    def _kinds(self, name: str) -> list[tuple[str, str, str, int]]:
        """Every update of ``name`` by another variable that stays in range."""
        left = self.value[name]
        return [
            (word, sign, other, result)
            for other in self.names
            if other != name
            for word, sign, result in (
                ("plus", "+", left + self.value[other]),
                ("minus", "-", left - self.value[other]),
            )
            if 1 <= result <= LARGEST
        ]

    def _next_name(self) -> str:
        age = {name: self.line - self.written[name] for name in self.names}
        free = [name for name in self.names if age[name] >= LEAST_GAP and self._kinds(name)]
        if not free or max(age.values()) > MOST_AGE:
            raise DeadEndError
        # Several may be old at the same time; each is due early enough to let all be written.
        oldest = max(free, key=lambda name: age[name])
        if age[oldest] >= MOST_AGE - len(self.names):
            return oldest
        weights = [4 if name in self.hot else 1 for name in free]
        return self.rng.choices(free, weights)[0]


def draw(rng: random.Random, steps: int) -> Draft:
    """So many updates of four to eight variables."""
    state = State(rng, 4 if steps < 16 else 6 if steps < 45 else 8)
    try:
        lines = list(state.lines(steps))
    except DeadEndError:
        return draw(rng, steps)
    asked = rng.choice(state.names)
    lines.append((f"Answer: {asked}", f"Answer: {asked} has {state.value[asked]}"))
    told = [f"{number}. {line}." for number, (line, _) in enumerate(lines, start=1)]
    traced = (f"{number}. {line}.\n\n" for number, (_, line) in enumerate(lines, start=1))
    prompt = "\n".join([f"Code: what is {asked}?", *told])
    return Draft(prompt, tuple(traced), state.value[asked])


FAMILY = Family(
    name="updates",
    steps={"short": (10, 13), "middle": (32, 36), "long": (82, 88)},
    fewest=3,
    most=87,
    draw=draw,
    needed=newest_ends_of_late,
)

"""``notes``: facts found once, early in the trace, and needed at its end, after much other work.

1. Ann is 5 plus 3: 5 + 3 = 8, so Ann = 8.                            the note
9. p plus q: p has 5 and q has 3, 5 + 3 = 8, so p = 8.                work that needs no note
80. Zoe is Ann plus Bob: Ann has 8 and Bob has 5, 8 + 5 = 13, so Zoe = 13.
"""

from __future__ import annotations

import random

from bench.reasoner.families.base import LARGEST, Draft, Family
from bench.reasoner.families.needed import newest_ends
from bench.reasoner.families.updates import State
from bench.reasoner.problems import LAST_LINE, NAMES, DeadEndError


def draw(rng: random.Random, steps: int) -> Draft:
    """Three to five notes, so many updates, then sums and differences of all notes."""
    notes = 3 if steps < 16 else 4 if steps < 45 else 5
    names = rng.sample(NAMES, 2 * notes - 1)
    value: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for name in names[:notes]:
        left, right, word, value[name] = _sum(rng)
        told = f"{name} is {left} {word} {right}"
        sign = "+" if word == "plus" else "-"
        lines.append(
            (told, f"{told}: {left} {sign} {right} = {value[name]}, so {name} = {value[name]}")
        )
    total, *others = rng.sample(names[:notes], notes)
    try:
        lines += State(rng, 4 if steps < 16 else 6).lines(steps)
        for name, other in zip(names[notes:], others, strict=True):
            lines.append(_closing(rng, name, total, other, value))
            total = name
    except DeadEndError:
        return draw(rng, steps)
    told, traced = zip(*lines, strict=True)
    numbered = [f"{n}. {line}." for n, line in enumerate((*told, LAST_LINE[:-1]), start=1)]
    passages = [f"{n}. {line}.\n\n" for n, line in enumerate((*traced, LAST_LINE[:-1]), start=1)]
    prompt = "\n".join([f"Notes: what is {total}?", *numbered])
    return Draft(prompt, tuple(passages), value[total])


def _sum(rng: random.Random) -> tuple[int, int, str, int]:
    """Two numbers, a word and the result, which is none of the two."""
    while True:
        left, right = rng.randint(2, LARGEST), rng.randint(2, LARGEST)
        word = rng.choice(("plus", "minus"))
        result = left + right if word == "plus" else left - right
        if 1 <= result <= LARGEST and result not in (left, right):
            return left, right, word, result


def _closing(
    rng: random.Random, name: str, total: str, other: str, value: dict[str, int]
) -> tuple[str, str]:
    """The fact that joins one more note to what was joined before."""
    left, right = value[total], value[other]
    kinds = [
        (first, sign, word, second, result)
        for first, sign, word, second, result in (
            (total, "+", "plus", other, left + right),
            (total, "-", "minus", other, left - right),
            (other, "-", "minus", total, right - left),
        )
        if 1 <= result <= LARGEST
    ]
    if not kinds:  # equal, and too large for a sum
        raise DeadEndError
    first, sign, word, second, value[name] = rng.choice(kinds)
    told = f"{name} is {first} {word} {second}"
    read = f"{first} has {value[first]} and {second} has {value[second]}"
    numbers = f"{value[first]} {sign} {value[second]} = {value[name]}"
    return told, f"{told}: {read}, {numbers}, so {name} = {value[name]}"


FAMILY = Family(
    name="notes",
    steps={"short": (7, 9), "middle": (28, 32), "long": (76, 81)},
    fewest=2,
    most=81,
    draw=draw,
    needed=newest_ends,
)

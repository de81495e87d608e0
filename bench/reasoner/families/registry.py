"""All families, and which of their problems are held out.

| family | which old tokens later steps need |
|---|---|
| ``chains`` | the ends of sentences, where a result stands for the first time |
| ``result_first`` | the beginnings of sentences |
| ``updates`` | the newest result of each variable; older ones are wrong |
| ``notes`` | results from the very beginning, after 1,700 tokens that did not need them |
| ``search`` | the open path; nothing from inside an abandoned branch |
"""

from __future__ import annotations

import random
from functools import lru_cache

from bench.reasoner.families import chains, notes, result_first, search, updates
from bench.reasoner.families.base import LARGEST, SIZES, Family, Size, Task
from bench.reasoner.families.search import MOST_AMOUNT
from bench.reasoner.families.updates import VARIABLES

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (chains, result_first, updates, notes, search)
}
HELDOUT = 200
"""Problems of each family and size."""


def make(family: str, seed: str, size: Size) -> Task:
    """A problem: a pure function of its arguments."""
    return FAMILIES[family].make(seed, size)


def heldout_task(family: str, size: Size, index: int) -> Task:
    """The ``index``-th problem to evaluate with. These seeds are never used in training."""
    return make(family, f"heldout/{size}/{index}", size)


@lru_cache(maxsize=1)
def heldout_digests() -> frozenset[str]:
    """Hashes of the held-out prompts."""
    return frozenset(
        heldout_task(family, size, index).digest
        for family in FAMILIES
        for size in SIZES
        for index in range(HELDOUT)
    )


def training_task(seed: int, index: int, family: str, share: float) -> Task:
    """A problem for training; ``share`` (0..1] of the steps of the family's longest ones."""
    steps = max(FAMILIES[family].fewest, round(share * FAMILIES[family].most))
    for attempt in range(100):
        task = FAMILIES[family].make_steps(f"train/{seed}/{index}/{attempt}/{steps}", steps)
        if task.digest not in heldout_digests():
            return task
    raise AssertionError("every draw is a held-out problem")


def training_family(rng: random.Random) -> str:
    """Which family a training problem is of."""
    return rng.choice([*FAMILIES])


def random_sum(rng: random.Random) -> str:
    """A sum or difference of counts, as the families write it within a sentence."""
    while True:
        left, right = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
        sign = rng.choice("+-")
        result = left + right if sign == "+" else left - right
        if 1 <= result <= LARGEST + MOST_AMOUNT:
            return f", {left} {sign} {right} = {result}"


def pieces() -> tuple[str, ...]:
    """What must be one token beside the reasoner's own vocabulary."""
    words = (
        "over under because So from From After then none with Start at Too much back found up "
        "to what Results first Code Notes Search Costs"
    ).split()
    return tuple(f" {word}" for word in (*VARIABLES, *words)) + tuple(words)

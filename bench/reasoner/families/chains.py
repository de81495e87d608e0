"""``chains``: the word problems of ``problems``, longer. A sentence ends with its result.

7. Carl: Ann = 14 and Bob = 3, 14 + 3 = 17, so Carl = 17.
"""

from __future__ import annotations

import random

from bench.reasoner.families.base import Draft, Family
from bench.reasoner.families.needed import first_ends
from bench.reasoner.problems import make_problem, solution_passages


def draw(rng: random.Random, steps: int) -> Draft:
    """A chain of so many relevant facts, with distractors in between."""
    problem = make_problem(f"chains/{rng.random()}", steps, amounts=False)
    return Draft(problem.prompt, tuple(solution_passages(problem)), problem.answer)


FAMILY = Family(
    name="chains",
    steps={"short": (5, 7), "middle": (12, 14), "long": (32, 38)},
    fewest=3,
    tokens_per_step=90,
    draw=draw,
    needed=first_ends,
)

"""``search``: the way through a tree, depth first. Branches that cost too much are abandoned.

From Ann: Bob with Ann = 20 and Bob is 9, 20 + 9 = 29, so Bob = 29.

Too much, back from Bob to Ann.

After Bob then Carl with Ann = 20 and Carl is 2, 20 + 2 = 22, so Carl = 22.

What later steps need is the path that is still open: who was reached from whom, with what cost.
Which branch comes next follows from the last one tried; the inside of an abandoned branch is
needed by nothing.
"""

from __future__ import annotations

import random

from bench.reasoner.families.base import LARGEST, Draft, Family
from bench.reasoner.families.needed import open_path
from bench.reasoner.problems import NAMES

MOST_AMOUNT = 9
MOST_CHILDREN = 4


class Tree:
    """Grows while it is searched, until so many places were tried and the goal is found."""

    def __init__(self, rng: random.Random, steps: int) -> None:
        self.rng = rng
        self.steps = steps
        self.names = iter(rng.sample(NAMES, len(NAMES)))
        self.value: dict[str, int] = {}
        self.children: dict[str, list[tuple[int, str]]] = {}
        self.passages: list[str] = []
        self.tried = 0
        self.goal = ""

    def search(self, start: str, value: int) -> None:
        """The whole trace from the start to the goal."""
        self.value[start] = value
        self.passages.append(f"Start at {start} with {value}, so {start} = {value}.\n\n")
        self._explore(start, root=True)
        self.passages.append(f"From {self.goal}: found.\n\n")

    def _explore(self, place: str, *, root: bool = False) -> bool:
        """Try the ways on from a place; whether the goal was found."""
        ways = self.children.setdefault(place, [])
        last = ""
        most = len(NAMES) if root else self.rng.randint(2, MOST_CHILDREN)
        for _ in range(most):
            found, last = self._try(place, last)
            if found:
                # What was not tried any more.
                for _ in range(self.rng.choice((0, 0, 1)) if len(ways) < MOST_CHILDREN else 0):
                    ways.append((self.rng.randint(1, MOST_AMOUNT), next(self.names)))
                return True
        return False

    def _try(self, place: str, last: str) -> tuple[bool, str]:
        """One way on and all that follows; whether the goal was found, and the name tried."""
        name = next(self.names)
        self.tried += 1
        left = self.value[place]
        ends = self.tried >= self.steps and left < LARGEST
        highest = min(MOST_AMOUNT, LARGEST - left) if ends else MOST_AMOUNT
        amount = self.rng.randint(1, highest)
        self.children[place].append((amount, name))
        result = self.value[name] = left + amount
        opening = f"After {last} then" if last else f"From {place}:"
        passage = (
            f"{opening} {name} with {place} = {left} and {name} is {amount}, "
            f"{left} + {amount} = {result}, so {name} = {result}.\n\n"
        )
        self.passages.append(passage)
        if ends:
            self.goal = name
            return True, name
        if result > LARGEST:
            self.passages.append(f"Wait, let me check {name} again.\n{passage}")
            self.passages.append(f"Too much, back from {name} to {place}.\n\n")
            return False, name
        if self._explore(name):
            return True, name
        last = self.children[name][-1][1]
        self.passages.append(
            f"After {last} then none with {name}, back from {name} to {place}.\n\n"
        )
        return False, name


def draw(rng: random.Random, steps: int) -> Draft:
    """A tree of which about so many places are tried."""
    tree = Tree(rng, steps)
    start = next(tree.names)
    value = rng.randint(2, 9)
    try:
        tree.search(start, value)
    except StopIteration:
        return draw(rng, steps)  # more places than names
    dead_ends = sum(passage.startswith("Too much") for passage in tree.passages)
    if tree.tried > steps + 2 or dead_ends < steps // 3:
        return draw(rng, steps)
    ways = [
        f"From {place}: {' then '.join(name for _, name in children)} then none."
        for place, children in tree.children.items()
    ]
    costs = [
        f"{name} is {amount}" for children in tree.children.values() for amount, name in children
    ]
    ways.append(f"From {tree.goal}: found.")
    rng.shuffle(ways)
    rng.shuffle(costs)
    question = f"Search up to {LARGEST}: what is {tree.goal}?"
    lines = [question, f"Start at {start} with {value}.", *ways, f"Costs: {', '.join(costs)}."]
    return Draft("\n".join(lines), tuple(tree.passages), tree.value[tree.goal])


FAMILY = Family(
    name="search",
    steps={"short": (6, 9), "middle": (17, 21), "long": (43, 50)},
    fewest=2,
    most=49,
    draw=draw,
    needed=open_path,
)

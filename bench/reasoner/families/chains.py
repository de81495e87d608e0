"""``chains``: word problems as those of ``problems``, longer. A sentence ends with its result.

7. Carl has Ann plus Bob: Ann = 14 and Bob = 3, 14 + 3 = 17, so Carl = 17.

Unlike there, a trace copies a fact before it looks anything up.
"""

from __future__ import annotations

import random

from bench.reasoner.families.base import Draft, Family
from bench.reasoner.families.needed import first_ends
from bench.reasoner.problems import CHECKS, LAST_LINE, Check, Fact, make_problem

OPENINGS: dict[Check, str] = {
    "again": "Wait, let me check {} again.\n",
    "redo": "Alternatively, let me redo {}.\n",
}


def draw(rng: random.Random, steps: int) -> Draft:
    """A chain of so many relevant facts, with distractors in between."""
    problem = make_problem(f"chains/{rng.random()}", steps, amounts=False)
    value = {fact.name: fact.value for fact in problem.steps}
    lines = [f"How many {problem.item} does {problem.facts[-1].name} have?"]
    passages: list[str] = []
    for number, fact in enumerate(problem.facts, start=1):
        if fact.item == problem.item:
            lines.append(f"{number}. {_told(fact)}.")
            passages += _passages(number, fact, value)
        else:
            lines.append(f"{number}. As for {fact.item}, {_told(fact)}.")
            passages.append(f"{number}. As for {fact.item}, none.\n\n")
    last = f"{len(lines)}. {LAST_LINE}"
    return Draft("\n".join([*lines, last]), (*passages, f"{last}\n\n"), problem.answer)


def _told(fact: Fact) -> str:
    match fact.kind:
        case "given":
            return f"{fact.name} has {fact.value}"
        case "plus" | "minus":
            return f"{fact.name} has {fact.refs[0]} {fact.kind} {fact.refs[1]}"
        case _:  # of distractors only
            return f"{fact.name} has {fact.amount} {fact.kind} than {fact.refs[0]}"


def _passages(number: int, fact: Fact, value: dict[str, int]) -> list[str]:
    """The step of a fact, then its checks."""
    if fact.kind == "given":
        return [f"{number}. {_told(fact)}, so {fact.name} = {fact.value}.\n\n"]
    one, two = (value[ref] for ref in fact.refs)
    sign = "+" if fact.kind == "plus" else "-"
    read = " and ".join(f"{ref} = {value[ref]}" for ref in fact.refs)

    def step(numbers: str) -> str:
        return f"{number}. {_told(fact)}: {read}, {numbers}, so {fact.name} = {fact.value}.\n\n"

    there = f"{one} {sign} {two} = {fact.value}"
    # "redo" turns the sum round.
    numbers = {"again": there, "redo": f"{two} + {fact.value} = {one}"}
    checks = (OPENINGS[x].format(fact.name) + step(numbers[x]) for x in CHECKS[fact.kind])
    return [step(there), *checks]


FAMILY = Family(
    name="chains",
    steps={"short": (5, 7), "middle": (11, 13), "long": (27, 30)},
    fewest=3,
    most=33,
    draw=draw,
    needed=first_ends,
)

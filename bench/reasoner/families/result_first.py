"""``result_first``: a sentence begins with its result, its reasons follow.

3. Ann is 2 over Ed, Ed = 5 and Ann is 2, 5 + 2 = 7.        working, which does not say of whom

So Ann = 7, because Ann is 2 over Ed and Ed = 5.

Wait, let me check Ann again.
So Ann = 7, because Ann is 2 over Ed and Ed = 5.

A later step needs the beginning of the sentence. The last number in it is another one's.
"""

from __future__ import annotations

import random

from bench.reasoner.families.base import LARGEST, Draft, Family
from bench.reasoner.families.needed import first_beginnings
from bench.reasoner.problems import LAST_LINE, NAMES

GIVEN = 2
MOST_AMOUNT = 9


def draw(rng: random.Random, steps: int) -> Draft:
    """So many people; two counts are given, the others lie over or under an earlier one."""
    names = rng.sample(NAMES, steps)
    value: dict[str, int] = {}
    unused: list[str] = []
    lines: list[str] = []
    passages: list[str] = []
    for number, name in enumerate(names, start=1):
        if number <= GIVEN:
            value[name] = rng.randint(2, LARGEST)
            lines.append(f"{number}. {name} has {value[name]}.")
            passages.append(f"{number}. {name} has {value[name]}.\n\n")
            passages.append(f"So {name} = {value[name]}, because {name} has {value[name]}.\n\n")
            unused.append(name)
            continue
        # Half of the references go to results that nothing used yet, the others to any.
        ref = rng.choice(unused if unused and rng.random() < 0.5 else list(value))
        value[name], amount, word = _step(rng, value[ref])
        unused = [other for other in unused if other != ref] + [name]
        told = f"{name} is {amount} {word} {ref}"
        sign = "+" if word == "over" else "-"
        passages.append(
            f"{number}. {told}, {ref} = {value[ref]} and {name} is {amount}, "
            f"{value[ref]} {sign} {amount} = {value[name]}.\n\n"
        )
        result = f"So {name} = {value[name]}, because {told} and {ref} = {value[ref]}.\n\n"
        passages += [result, f"Wait, let me check {name} again.\n{result}"]
        lines.append(f"{number}. {told}.")
    question = f"Results first: what is {names[-1]}?"
    last = f"{steps + 1}. {LAST_LINE}"
    prompt = "\n".join([question, *lines, last])
    return Draft(prompt, (*passages, f"{last}\n\n"), value[names[-1]])


def _step(rng: random.Random, left: int) -> tuple[int, int, str]:
    """A result in 1..LARGEST with the amount and the word that lead to it."""
    signed = [
        step
        for step in range(-MOST_AMOUNT, MOST_AMOUNT + 1)
        if step and 1 <= left + step <= LARGEST
    ]
    step = rng.choice(signed)
    return left + step, abs(step), "over" if step > 0 else "under"


FAMILY = Family(
    name="result_first",
    steps={"short": (6, 8), "middle": (14, 17), "long": (37, 44)},
    fewest=3,
    most=43,
    draw=draw,
    needed=first_beginnings,
)

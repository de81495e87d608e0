"""Chained word problems whose later steps need results from far back.

A problem is a numbered list of facts in dependency order. Each gives one person's count, either
outright or from the counts of people named earlier. Facts about other items are distractors.
The solution goes through the list, one passage per fact:

    7. Carl: Ann = 14 and Bob = 3, 14 + 3 = 17, so Carl = 17.

    8. This is not about pens.

    9. Answer.

and after some steps checks them, in words that mostly repeat the step:

    plus        "Wait, let me check Carl again."        the same words once more
    fewer       "Alternatively, let me redo Carl."      the sum turned round
    minus       both, one after the other

A check never changes a result, and no later step looks at it: it is what a KV budget may forget.

Everything here is a pure function of a seed; the standard library is all it needs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

NAMES: tuple[str, ...] = tuple(
    "Ada Alan Amy Anna Ben Beth Bill Bob Carl Chen Cleo Dan Dave Dora Ed Ella Emma Eric Eva Finn "
    "Fred Gina Greg Hana Hugo Ian Ida Igor Ivy Jack Jane Jim Joan Jon Kai Kate Ken Kim Lars Lea "
    "Leo Lily Lisa Luis Mara Mark Mary Max Mia Mona Nell Nick Nina Noah Nora Olga Omar Otto Owen "
    "Paul Pete Rita Rosa Ross Ruth Ryan Sara Seth Stan Tara Ted Tess Theo Tim Tom Uma Vera Will "
    "Yara Zoe".split()
)
ITEMS: tuple[str, ...] = ("coins", "shells", "cards", "beads", "stamps", "books", "apples", "pens")

MAX_VALUE = 24
LAST_LINE = "Answer."
"""Ends the list of facts, in the prompt and in the trace."""

MOST_DRAWS = 1000

Kind = Literal["given", "more", "fewer", "plus", "minus"]
Check = Literal["again", "redo"]

CHECKS: dict[Kind, tuple[Check, ...]] = {
    "given": (),
    "more": (),
    "plus": ("again",),
    "fewer": ("redo",),
    "minus": ("again", "redo"),
}
"""The checks that follow a step, in order. What a step is can be read in its own passage."""


class DeadEndError(Exception):
    """No next fact: every sum of what is known is too large, every difference 0."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence of the prompt: how many `item` the person `name` has, and why."""

    name: str
    item: str
    kind: Kind
    refs: tuple[str, ...]
    amount: int
    value: int

    def sentence(self, *, aside: bool) -> str:
        """The fact as the prompt states it; `aside` puts another item than the asked one first."""
        opening, item = (f"As for {self.item}, ", "") if aside else ("", f" {self.item}")
        match self.kind:
            case "given":  # only here is the value itself stated
                has = f"{self.value}{item}"
            case "more" | "fewer":
                has = f"{self.amount} {self.kind}{item} than {self.refs[0]}"
            case "plus" | "minus":
                has = f"as many{item} as {self.refs[0]} {self.kind} {self.refs[1]}"
        return f"{opening}{self.name} has {has}."


@dataclass(frozen=True, slots=True)
class Level:
    """A difficulty: how many relevant facts (half-open range) a problem has."""

    name: str
    steps: tuple[int, int]


LEVELS: dict[str, Level] = {
    "easy": Level("easy", (5, 7)),
    "medium": Level("medium", (9, 12)),
    "hard": Level("hard", (18, 20)),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and everything needed to solve it."""

    item: str
    facts: tuple[Fact, ...]
    last_line: bool = True

    @property
    def steps(self) -> tuple[Fact, ...]:
        """The relevant facts, in order."""
        return tuple(fact for fact in self.facts if fact.item == self.item)

    @property
    def answer(self) -> int:
        """The count of the last fact's person, which is what the question asks for."""
        return self.facts[-1].value

    @property
    def prompt(self) -> str:
        """The user message. The question comes first, so each fact can be judged as it is read."""
        lines = self._lines()
        return "\n".join([*lines, f"{len(lines)}. {LAST_LINE}"] if self.last_line else lines)

    @property
    def digest(self) -> str:
        """A hash of the question and the facts, to keep held-out problems out of training."""
        return hashlib.sha256("\n".join(self._lines()).encode()).hexdigest()[:16]

    def _lines(self) -> list[str]:
        question = f"How many {self.item} does {self.facts[-1].name} have?"
        sentences = (fact.sentence(aside=fact.item != self.item) for fact in self.facts)
        return [question, *(f"{i}. {sentence}" for i, sentence in enumerate(sentences, start=1))]


def make_problem(seed: str, steps: int, *, amounts: bool) -> Problem:
    """Draw a problem with `steps` relevant facts; the same seed gives the same problem.

    With `amounts` some of them say how many more or fewer; without, all but the given ones are sums
    and differences of two earlier counts.
    """
    rng = random.Random(seed)
    item, *others = rng.sample(ITEMS, 3)
    try:
        relevant = _draw_chain(rng, item, rng.sample(NAMES, steps), amounts)
    except DeadEndError:
        return make_problem(f"{seed}/again", steps, amounts=amounts)
    facts = list(relevant)
    for _ in range(rng.randint(steps // 4, steps // 2)):
        # Before the last fact, which is the one that the question asks about.
        facts.insert(rng.randrange(len(facts)), _draw_distractor(rng, rng.choice(others)))
    return Problem(item=item, facts=tuple(facts))


def _draw_chain(rng: random.Random, item: str, names: list[str], amounts: bool) -> list[Fact]:
    """Facts about `item` for each of `names`, each from earlier ones only.

    Half of the references go to results that nothing used yet, so that most steps matter for the
    answer; the others to any earlier result, so that what is needed lies at every distance.
    """
    facts: list[Fact] = []
    value: dict[str, int] = {}
    unused: list[str] = []
    given = 1 if amounts and len(names) < 8 else 2
    for name in names:
        if len(facts) < given:
            fact = Fact(name, item, "given", (), 0, rng.randint(2, MAX_VALUE))
        else:
            fact = draw_step(rng, item, name, value, unused, amounts)
        facts.append(fact)
        value[name] = fact.value
        unused = [other for other in unused if other not in fact.refs] + [name]
    return facts


def draw_step(
    rng: random.Random,
    item: str,
    name: str,
    value: dict[str, int],
    unused: list[str],
    amounts: bool,
) -> Fact:
    """One derived fact whose value lies in 1..MAX_VALUE."""
    known = list(value)
    for _ in range(MOST_DRAWS):
        first = rng.choice(unused if rng.random() < 0.5 else known)
        if amounts and (len(known) == 1 or rng.random() < 0.3):
            kind: Kind = rng.choice(("more", "fewer"))
            amount = rng.randint(2, 9)
            result = value[first] + (amount if kind == "more" else -amount)
            refs: tuple[str, ...] = (first,)
        else:
            second = rng.choice([other for other in known if other != first])
            refs, amount = (first, second), 0
            kind = rng.choice(("plus", "minus"))
            if kind == "minus" and value[second] > value[first]:
                refs = (second, first)
            result = value[refs[0]] + value[refs[1]] * (1 if kind == "plus" else -1)
        if 1 <= result <= MAX_VALUE:
            return Fact(name, item, kind, refs, amount, result)
    raise DeadEndError


def _draw_distractor(rng: random.Random, item: str) -> Fact:
    """A fact about another item; its people may well appear in relevant facts too."""
    first, second, third = rng.sample(NAMES, 3)
    kind: Kind = rng.choice(("given", "given", "more", "fewer", "plus", "minus"))
    refs = {"given": (), "more": (second,), "fewer": (second,)}.get(kind, (second, third))
    return Fact(first, item, kind, refs, rng.randint(2, 9), rng.randint(2, MAX_VALUE))


def solution_passages(problem: Problem, keeps: Callable[[], bool] = lambda: True) -> Iterator[str]:
    """The passages of the trace, each closed by a blank line; `keeps` decides on every check."""
    value = {fact.name: fact.value for fact in problem.steps}
    for number, fact in enumerate(problem.facts, start=1):
        if fact.item == problem.item:
            yield from fact_passages(number, fact, value, keeps)
        else:
            yield f"{number}. This is not about {problem.item}.\n\n"
    if problem.last_line:
        yield f"{len(problem.facts) + 1}. {LAST_LINE}\n\n"


def fact_passages(
    number: int, fact: Fact, value: dict[str, int], keeps: Callable[[], bool] = lambda: True
) -> Iterator[str]:
    """The step of one fact and its checks; ``value`` has the counts that it refers to."""
    yield _passage(number, fact, value, None)
    for check in CHECKS[fact.kind]:
        if keeps():
            yield _passage(number, fact, value, check)


def _passage(number: int, fact: Fact, value: dict[str, int], check: Check | None) -> str:
    """The step itself or one of its checks."""
    opening = {
        None: "",
        "again": f"Wait, let me check {fact.name} again.\n",
        "redo": f"Alternatively, let me redo {fact.name}.\n",
    }[check]
    working = _working(fact, value, turned=check == "redo")
    return f"{opening}{number}. {fact.name}: {working}{fact.name} = {fact.value}.\n\n"


def _working(fact: Fact, value: dict[str, int], *, turned: bool) -> str:
    """References with their values, then the sum. `turned` writes the sum the other way."""
    if fact.kind == "given":
        return "it is given, so "
    sought = " and ".join(f"{ref} = {value[ref]}" for ref in fact.refs)
    left = value[fact.refs[0]]
    right = fact.amount if len(fact.refs) == 1 else value[fact.refs[1]]
    if fact.kind in ("more", "plus"):
        return f"{sought}, {left} + {right} = {fact.value}, so "
    if turned:
        return f"{sought}, {right} + {fact.value} = {left}, so "
    return f"{sought}, {left} - {right} = {fact.value}, so "


def solution_text(problem: Problem, keeps: Callable[[], bool] = lambda: True) -> str:
    """What the model should write after `<think>` and a newline, up to the end-of-turn token."""
    return f"{''.join(solution_passages(problem, keeps))}</think>\nAnswer: {problem.answer}"


def optional_checks(seed: str) -> Callable[[], bool]:
    """`keeps` for one trace: half of the traces check everything, a quarter nothing, a quarter
    tosses a coin at every check."""
    rng = random.Random(f"checks/{seed}")
    share = rng.choice((1.0, 1.0, 0.0, 0.5))
    return lambda: rng.random() < share


def recall_drill(seed: str, people: int, passages: int) -> str:
    """Passages that only look values up, at every distance: what a solution needs them for."""
    rng = random.Random(seed)
    value = {name: rng.randint(1, MAX_VALUE) for name in rng.sample(NAMES, people)}
    names = list(value)
    drill = []
    for number in range(1, passages + 1):
        one, two, three = (rng.choice(names) for _ in range(3))
        drill.append(
            f"{number}. {three}: {one} = {value[one]} and {two} = {value[two]}, "
            f"so {three} = {value[three]}.\n\n"
        )
    return "".join(drill)


def heldout_problem(level: str, index: int) -> Problem:
    """The `index`-th evaluation problem of a level. These seeds are never used in training."""
    seed = f"heldout/{level}/{index}"
    steps = random.Random(f"{seed}/steps").randrange(*LEVELS[level].steps)
    return make_problem(seed, steps, amounts=False)


def training_problem(seed: int, index: int, steps: int) -> Problem:
    """The `index`-th training problem of a run."""
    return make_problem(f"train/{seed}/{index}/{steps}", steps, amounts=True)

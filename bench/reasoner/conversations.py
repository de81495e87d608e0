"""Conversations whose later turns need what earlier ones found, were told or looked up.

A turn asks for one person's count, as a problem of ``problems`` does. Its facts may name people of
earlier turns: a result (in the model's own trace), an aside (in a user's message, not asked about
then) or something that a tool's answer brought along. A turn may say ``You check Ed.``: the model
ends its reply with ``Let me check Ed.``, the client sends the tool's answer, and the model goes on:

    user       How many coins does Ian have? 1. As for pens, Dora has 7. 2. You check Ed. ...
    assistant  1. This is not about coins. 2. Ed: let me check.       </think> Let me check Ed.
    tool       As for coins, Ed has 9. As for pens, Eva has 4.
    assistant  2. Ed: it is given, so Ed = 9. 3. Ian: ...             </think> Answer: 14

Every person has one count in a conversation. Everything here is a pure function of a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.reasoner.problems import (
    ITEMS,
    LAST_LINE,
    MAX_VALUE,
    NAMES,
    DeadEndError,
    Fact,
    draw_step,
    fact_passages,
)

MAX_TURNS = 8
CALL = re.compile(r"</think>\nLet me check (\w+)\.")
"""How a reply asks for the tool."""
ANSWER = re.compile(r"</think>\nAnswer: (\d+)")
"""How a reply answers."""
OLDER_SHARE = 0.6
"""Of the first references: how many go to what an earlier turn left and nothing used yet."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a turn has to ask the tool for, and the tool's answer."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One question of the user.

    Attributes:
        question: the user's message.
        replies: what the model should write after ``<think>``: one, or two with the tool's answer
            in between.
        lookup: None where the turn does without.
        answer: the count that is asked for.
    """

    question: str
    replies: tuple[str, ...]
    lookup: Lookup | None
    answer: int

    def record(self) -> dict[str, Any]:
        """What an evaluation needs of it, as JSON."""
        lookup = None if self.lookup is None else [self.lookup.name, self.lookup.text]
        return {"question": self.question, "lookup": lookup, "answer": self.answer}


class _World:
    """Everybody whose count was said so far, by item."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = iter(rng.sample(NAMES, len(NAMES)))
        self.items = rng.sample(ITEMS, 2)
        self.value: dict[str, dict[str, int]] = {item: {} for item in self.items}
        self.unused: dict[str, list[str]] = {item: [] for item in self.items}

    def tell(self, fact: Fact) -> Fact:
        """From now on a fact may refer to this one."""
        self.value[fact.item][fact.name] = fact.value
        unused = self.unused[fact.item]
        self.unused[fact.item] = [name for name in unused if name not in fact.refs] + [fact.name]
        return fact

    def given(self, item: str) -> Fact:
        """A new person's count, outright."""
        value = self.rng.randint(2, MAX_VALUE)
        return self.tell(Fact(next(self.names), item, "given", (), 0, value))

    def derived(self, item: str, first: list[str]) -> Fact:
        """A new person's count from two that are known, the first mostly one of ``first``."""
        step = draw_step(self.rng, item, next(self.names), self.value[item], first, False)
        return self.tell(step)


def make_conversation(seed: str, turns: int) -> tuple[Turn, ...]:
    """Draw a conversation; the same seed gives the same one."""
    world = _World(random.Random(seed))
    try:
        return tuple(_draw_turn(world, number) for number in range(turns))
    except DeadEndError:
        return make_conversation(f"{seed}/again", turns)


def _draw_turn(world: _World, number: int) -> Turn:
    rng = world.rng
    item = world.items[0] if number == 0 else rng.choice(world.items)
    other = world.items[1 - world.items.index(item)]
    older = list(world.unused[item])
    facts = [world.given(item) for _ in range(max(0, 2 - len(world.value[item])))]
    asked: Fact | None = None
    if number and rng.random() < 0.4:
        asked = world.given(item)
        facts.append(asked)
    for step in range(rng.randint(2, 3)):
        reaches = older and (step == 0 or rng.random() < OLDER_SHARE)
        facts.append(world.derived(item, older if reaches else world.unused[item]))
        older = [name for name in older if name in world.unused[item]]
    for _ in range(rng.choice((0, 1, 1, 2))):
        facts.insert(rng.randrange(len(facts)), world.given(other))
    lines = [f"How many {item} does {facts[-1].name} have?"]
    for place, fact in enumerate(facts, start=1):
        said = (
            f"You check {fact.name}." if fact is asked else fact.sentence(aside=fact.item != item)
        )
        lines.append(f"{place}. {said}")
    lines.append(f"{len(lines)}. {LAST_LINE}")
    lookup = None
    if asked is not None:
        told = [asked, *(world.given(rng.choice(world.items)) for _ in range(rng.randint(0, 2)))]
        text = "\n".join(fact.sentence(aside=True) for fact in rng.sample(told, len(told)))
        lookup = Lookup(asked.name, text)
    replies = _replies(item, facts, asked, world.value[item])
    return Turn("\n".join(lines), tuple(replies), lookup, facts[-1].value)


def _replies(
    item: str, facts: list[Fact], asked: Fact | None, value: dict[str, int]
) -> Iterator[str]:
    """What the model writes, up to each end of its reply."""
    written = ""
    for place, fact in enumerate(facts, start=1):
        if fact is asked:
            written += f"{place}. {fact.name}: let me check.\n\n"
            yield f"{written}</think>\nLet me check {fact.name}."
            written = ""
        if fact.item == item:
            written += "".join(fact_passages(place, fact, value))
        else:
            written += f"{place}. This is not about {item}.\n\n"
    yield f"{written}{len(facts) + 1}. {LAST_LINE}\n\n</think>\nAnswer: {facts[-1].value}"


def heldout_conversation(index: int) -> tuple[Turn, ...]:
    """The ``index``-th conversation to evaluate with. These seeds are never used in training."""
    return make_conversation(f"heldout/conversation/{index}", MAX_TURNS)


def training_conversation(seed: int, index: int, turns: int) -> tuple[Turn, ...]:
    """The ``index``-th conversation of a training run."""
    return make_conversation(f"train/conversation/{seed}/{index}/{turns}", turns)

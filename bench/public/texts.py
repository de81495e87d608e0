"""Texts that people wrote, in the place of what a model generates: every Python brings them along.

``prose`` is the language reference that ``help()`` shows, ``code`` modules of the standard library,
``recall`` other prose with facts strewn in, which its end repeats: what is asked there stood 800 to
1,740 tokens before, and no line hints at it in between.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pydoc_data.topics import topics

from tokenizers import Tokenizer

#: of a text, and how many of them are its prompt
TOKENS, PROMPT_TOKENS = 2048, 32
#: what is scored of prose and code starts here, where every budget has compacted several times
FIRST_SCORED = 1024
PROSE = ("specialnames", "compound", "types", "formatstrings")
CODE = ("argparse", "inspect", "mailbox", "tarfile")
FILLER = ("string-methods", "typesseq", "debugger", "typesmapping")
FILLER_TOKENS, FIRST_FACT, APART = 1400, 64, 40
NAMES = (
    *("Ruth", "Adam", "Clara", "Henry", "Lucy", "Oscar", "Nora", "Peter"),
    *("Alice", "Simon", "Grace", "Victor", "Helen", "Bruno", "Sarah", "Felix"),
)
FACT = "The locker of {name} has the number {number}."
_NUMBER = re.compile(r"the number (\d+)\.")


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        ids: tokens.
        scored: groups of positions; a group is right if all its tokens are.
    """

    ids: list[int]
    scored: list[list[int]]


def prose(tokenizer: Tokenizer) -> Iterator[Text]:
    return (_beginning(tokenizer, topics[name]) for name in PROSE)


def code(tokenizer: Tokenizer) -> Iterator[Text]:
    return (_beginning(tokenizer, inspect.getsource(import_module(name))) for name in CODE)


def recall(tokenizer: Tokenizer) -> Iterator[Text]:
    return (_facts(tokenizer, topics[name], random.Random(name)) for name in FILLER)


KINDS: dict[str, Callable[[Tokenizer], Iterator[Text]]] = {
    "prose": prose,
    "code": code,
    "recall": recall,
}


def _beginning(tokenizer: Tokenizer, text: str) -> Text:
    ids = tokenizer.encode(text).ids[:TOKENS]
    assert len(ids) == TOKENS, f"{len(ids)} tokens are too few"
    return Text(ids, [[position] for position in range(FIRST_SCORED, TOKENS)])


def _facts(tokenizer: Tokenizer, text: str, draw: random.Random) -> Text:
    """A fact every ``APART`` tokens at first; all of them, in another order, at the end."""
    offsets = tokenizer.encode(text).offsets
    facts = [FACT.format(name=name, number=draw.randrange(1000, 10_000)) for name in NAMES]
    mixed, done = "", 0
    for number, fact in enumerate(facts):  # behind the line that the token is in
        at = text.index("\n", offsets[FIRST_FACT + APART * number][0])
        mixed, done = f"{mixed}{text[done:at]}\n{fact}", at
    before = mixed + text[done : offsets[FILLER_TOKENS][0]]
    whole = "\n".join([before, *draw.sample(facts, len(facts))])
    encoded = tokenizer.encode(whole)
    scored = [
        [i for i, (at, _) in enumerate(encoded.offsets) if asked.start(1) <= at < asked.end(1)]
        for asked in _NUMBER.finditer(whole, len(before))
    ]
    return Text(encoded.ids, scored)

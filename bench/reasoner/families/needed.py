"""Rules that name, for a trace, the old tokens that later steps need.

A rule takes the texts of all tokens and the first position of the trace. It yields pairs
``(position, until)``: the token at ``position`` is needed by queries below ``until``. Every rule
can be applied to every trace, so that a family's own rule can be compared with another's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Needed = tuple[int, int]
Rule = Callable[[list[str], int], Iterator[Needed]]

_RESULT = re.compile(r"so (\w+) = \d+\.\s*$|^So (\w+) = \d+, because")
_PARENT = re.compile(r"(\w+) with \w+ =")
_BACK = re.compile(r"back from (\w+) to \w+\.\s*$")
TOKENS_OF_AN_END = 4
"""`` Ann``, `` =``, `` 7`` and the delimiter."""
TOKENS_OF_A_BEGINNING = 4
"""``So``, `` Ann``, `` =`` and `` 7``."""
NAME_IN_A_LINE = 2
"""After ``7`` and ``.``."""
TOKENS_UNDER_CHECK = 96
"""A step and the first check of it, and more."""
TOKENS_OF_A_PARENT = 3
"""`` Bob``, `` with`` and `` Ann``."""


class Sentence(NamedTuple):
    """Tokens ``[start, stop)``, closed by a line break; ``subject`` is whose result it states."""

    start: int
    stop: int
    text: str
    subject: str | None


def sentences(texts: list[str], start: int) -> Iterator[Sentence]:
    """The closed sentences of a trace."""
    for stop in range(start + 1, len(texts) + 1):
        if texts[stop - 1].endswith("\n"):
            text = "".join(texts[start:stop])
            found = _RESULT.search(text)
            yield Sentence(start, stop, text, found and (found[1] or found[2]))
            start = stop


def first_ends(texts: list[str], start: int) -> Iterator[Needed]:
    """The end of the first sentence that states a name's result."""
    stated: set[str] = set()
    for sentence in sentences(texts, start):
        if sentence.subject and sentence.subject not in stated:
            stated.add(sentence.subject)
            for position in range(sentence.stop - TOKENS_OF_AN_END, sentence.stop):
                yield position, len(texts)


def first_ends_and_names(texts: list[str], start: int) -> Iterator[Needed]:
    """The same, and for a while the third token of every sentence: in a line, whom it is about."""
    yield from first_ends(texts, start)
    for sentence in sentences(texts, start):
        if sentence.stop - sentence.start > NAME_IN_A_LINE:
            position = sentence.start + NAME_IN_A_LINE
            yield position, position + TOKENS_UNDER_CHECK


def first_beginnings(texts: list[str], start: int) -> Iterator[Needed]:
    """The beginning of the first sentence that states a name's result."""
    stated: set[str] = set()
    for sentence in sentences(texts, start):
        if sentence.subject and sentence.subject not in stated:
            stated.add(sentence.subject)
            for position in range(sentence.start, sentence.start + TOKENS_OF_A_BEGINNING):
                yield position, len(texts)


def newest_ends(texts: list[str], start: int) -> Iterator[Needed]:
    """The end of the last sentence so far that states a name's result."""
    stated: dict[str, int] = {}
    for sentence in sentences(texts, start):
        if sentence.subject:
            if sentence.subject in stated:
                yield from _end(stated[sentence.subject], sentence.stop)
            stated[sentence.subject] = sentence.stop
    for stop in stated.values():
        yield from _end(stop, len(texts))


def newest_ends_of_late(texts: list[str], start: int, most_tokens: int = 512) -> Iterator[Needed]:
    """The same, but nothing older than ``most_tokens``."""
    for position, until in newest_ends(texts, start):
        yield position, min(until, position + most_tokens)


def open_path(texts: list[str], start: int) -> Iterator[Needed]:
    """Whom a search reached from whom, and with what result, until it goes back from there."""
    path: dict[str, list[int]] = {}
    for sentence in sentences(texts, start):
        closed = _BACK.search(sentence.text)
        if closed:
            for position in path.pop(closed[1], ()):
                yield position, sentence.stop
        if not sentence.subject:
            continue
        kept = path.setdefault(sentence.subject, [])
        kept += range(sentence.stop - TOKENS_OF_AN_END, sentence.stop)
        if _PARENT.search(sentence.text):
            link = next(at for at in range(*sentence[:2]) if texts[at] == " with")
            kept += range(link + 2 - TOKENS_OF_A_PARENT, link + 2)
    for kept in path.values():
        yield from ((position, len(texts)) for position in kept)


def _end(stop: int, until: int) -> Iterator[Needed]:
    return ((position, until) for position in range(stop - TOKENS_OF_AN_END, stop))


def visible_tokens(kept: Iterable[Needed], length: int, prompt: int, recent: int) -> Tensor:
    """bool [T, T]: query, key. The prompt, the last ``recent`` tokens and what a rule names."""
    at = torch.arange(length)
    stays = at[:, None] < _until(kept, length, prompt)
    return (at <= at[:, None]) & (stays | (at > at[:, None] - recent))


def visible_in_total(kept: Iterable[Needed], length: int, prompt: int, total: int) -> Tensor:
    """bool [T, T]: query, key. The prompt and ``total`` tokens of the trace: what a rule names, the
    newest first, and then the newest others."""
    at = torch.arange(length)
    past = at <= at[:, None]
    own = past & (at >= prompt)
    named = own & (at[:, None] < _until(kept, length, prompt))
    # 1 for the newest, 2 for the one before it; a query itself is never hidden
    named &= _from_the_end(named) <= total
    others = own & ~named
    room = total - named.sum(1, keepdim=True)
    return (
        (past & (at < prompt))
        | named
        | (others & (_from_the_end(others) <= room))
        | torch.eye(length, dtype=torch.bool)
    )


def _until(kept: Iterable[Needed], length: int, prompt: int) -> Tensor:
    """int64 [T]: the first query that a token is hidden from; 0 where no rule names it."""
    until = torch.zeros(length, dtype=torch.int64)
    until[:prompt] = length
    for position, end in kept:
        until[position] = max(int(until[position]), end)
    return until


def _from_the_end(mask: Tensor) -> Tensor:
    """How many of a row's marked tokens are at this one and behind it."""
    return mask.flip(1).cumsum(1).flip(1)

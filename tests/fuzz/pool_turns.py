"""What conversations must hold: the histories that finished requests left, and who continues them.

A continued row must be the row of one such history, up to a length from which on nothing was
evicted. A row's tags say which token at which position under which evictions each entry is, so a
sibling's KV, another order of evictions or another position are other tags.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Span = tuple[int, int]
# Of lives whose requests drop thoughts: thoughts end at delimiters, which are frequent.
THINK_END, BLANK, THINK_START = 1, 5, 6
Apart = tuple[str | None, str | None]


class Entry(NamedTuple):
    """What the books say about one entry of a row."""

    position: int
    tag: int


@dataclass
class Conversation:
    """What a row has been through since the first prompt of its conversation.

    Attributes:
        prompt: of the request, with the thoughts that its history dropped.
        prompt_tokens: logical tokens in front of what counts against the budget.
        prompt_row_tokens: row entries of these, when the row began.
        cut: logical tokens that came from a history; 0: none.
        sentences_from: logical position where the request's own sentences begin.
        closed: sentences of earlier turns, logical.
        compactions: of earlier turns, of what counts against the budget.
        compacted_at: logical length at the last compaction; 0: nothing was evicted.
        prefilled_tokens: logical length of the row when its prefill had ended.
        in_sentences: logical position -> what a token was when it was added to a sentence, of those
            that a later turn has computed again.
    """

    prompt: Sequence[int]
    prompt_tokens: int
    prompt_row_tokens: int
    cut: int = 0
    sentences_from: int = 0
    closed: tuple[Span, ...] = ()
    compactions: int = 0
    compacted_at: int = 0
    prefilled_tokens: int = 0
    in_sentences: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Left:
    """What a finished request left.

    Attributes:
        tokens: that are or were in its row.
        sent: the same as the next prompt has them, without thoughts that were dropped.
        row: its entries.
        computed: logical position -> what came of the token there, evicted or not.
        talk: of its row, at its end.
    """

    namespace: Hashable
    apart: Apart
    tokens: Sequence[int]
    sent: Sequence[int]
    row: Sequence[Entry]
    computed: Mapping[int, int]
    talk: Conversation

    def row_before(self, cut: int) -> list[Entry]:
        return [entry for entry in self.row if entry.position < cut]

    @property
    def unsent_tokens(self) -> int:
        return len(self.tokens) - len(self.sent)

    def continues(self, namespace: Hashable, prompt: Sequence[int], cut: int) -> bool:
        """Whether a request with this prompt may have this many of its tokens."""
        sent = cut - self.unsent_tokens
        alike = namespace == self.namespace and self.talk.compacted_at <= cut
        return alike and sent < len(prompt) and [*self.sent[:sent]] == [*prompt[:sent]]


def reuse_of(req: Any) -> str | None:
    state = getattr(req, "skipkv", None)
    return None if state is None else state.settings.kv_reuse


def separated(req: Any) -> Apart:
    """What separates the request from others in the radix tree: extra_key, cache_salt."""
    return (req.extra_key, req.cache_salt)


def number_of(apart: Apart) -> int:
    """What it adds to the content of every token; the same in every process."""
    return zlib.crc32(repr(apart).encode()) if any(apart) else 0


def namespace_of(req: Any) -> Hashable:
    """Requests that may continue each other's histories have the same."""
    settings = req.skipkv.settings
    policy = (settings.policy.name, settings.policy.params) if reuse_of(req) == "budget" else ()
    return (settings.kv_reuse, settings.steering, policy, separated(req))


def thought_of(prompt: Sequence[int], output: Sequence[int]) -> tuple[int, int]:
    """How many tokens a template drops at the end of the prompt and behind it; 0 and 0 if no answer
    follows."""
    ends = [at for at, token in enumerate(output) if token == THINK_END]
    if not ends:
        return 0, 0
    stop = ends[-1] + 1
    while stop < len(output) and output[stop] == BLANK:
        stop += 1
    return (opener_of(prompt), stop) if stop < len(output) else (0, 0)


def opener_of(prompt: Sequence[int]) -> int:
    """How many tokens at its end a template drops with a thought: the mark and all blanks."""
    start = len(prompt)
    while start and prompt[start - 1] == BLANK:
        start -= 1
    return len(prompt) - start + 1 if start and prompt[start - 1] == THINK_START else 0


def closed_sentences(tokens: Sequence[int], begins: int, delimiter: int) -> list[Span]:
    """Spans of the closed sentences of ``tokens[begins:]``, logical."""
    spans: list[Span] = []
    start = begins
    for at in range(begins, len(tokens)):
        if tokens[at] != delimiter:
            continue
        if at > begins and tokens[at - 1] == delimiter:  # it joins the sentence before it
            start = spans.pop()[0]
        spans.append((start, at + 1))
        start = at + 1
    return spans

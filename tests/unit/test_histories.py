"""Which history a prompt continues, against a search through all of them."""

from __future__ import annotations

from array import array
from itertools import takewhile
from operator import eq
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_skipkv.request.last_compaction import LastCompaction
from sgl_skipkv.reuse.histories import Histories
from sgl_skipkv.reuse.history import History, private_keys


class Drawn(NamedTuple):
    """What a history is made of; the last compaction is before the last token.

    The next prompt has neither the last ``opener`` tokens of the prompt nor the first ``thought``
    tokens behind it. It may have the last ``edge`` tokens of the prompt otherwise.
    """

    namespace: str
    tokens: list[int]
    prompt_tokens: int
    compacted_at: int
    thought: int = 0
    opener: int = 0
    edge: int = 0

    @property
    def sent(self) -> list[int]:
        prompt = self.prompt_tokens
        return self.tokens[: prompt - self.opener] + self.tokens[prompt + self.thought :]


def with_thought(drawn: Drawn, thought: int, opener: int) -> Drawn:
    """At least one token behind the thought was there at the last compaction."""
    room = drawn.compacted_at - 1 - drawn.prompt_tokens
    if room < 1 or not thought:
        return drawn
    opener = opener % (drawn.prompt_tokens + 1)
    edge = min(drawn.prompt_tokens, opener + thought % 2)
    return drawn._replace(thought=1 + thought % room, opener=opener, edge=edge)


# Two tokens, so that beginnings are often alike.
_TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=12)
_DRAWN = st.builds(
    lambda namespace, tokens, one, other, thought, opener: with_thought(
        Drawn(namespace, tokens, *sorted((one % len(tokens) or 1, other % len(tokens) or 1))),
        *(thought, opener),
    ),
    *(st.sampled_from("ab"), _TOKENS, *[st.integers(0, 99)] * 2),
    *(st.just(0) | st.integers(0, 99), st.integers(0, 2)),
)


def history(drawn: Drawn) -> History:
    kept = torch.arange(drawn.compacted_at)
    last = LastCompaction(kept, drawn.compacted_at, drawn.compacted_at, kept, kept, None)
    key = private_keys(len(drawn.tokens))
    tokens, sent = array("q", drawn.tokens), array("q", drawn.sent)
    return History(
        *("request", drawn.namespace, tokens, sent if drawn.thought else tokens, key),
        *(drawn.prompt_tokens, drawn.edge, drawn.prompt_tokens, last, None),
    )


def common_tokens(one: list[int], other: list[int]) -> int:
    return len([*takewhile(bool, map(eq, one, other))])


@given(st.lists(_DRAWN, max_size=8), st.lists(st.integers(0, 7), max_size=4), _TOKENS)
def test_the_farthest_history_is_found(
    drawn: list[Drawn], dropped: list[int], prompt: list[int]
) -> None:
    histories, known = Histories(1 << 20, pinned=False), {}
    for one in drawn:
        known[history(one)] = one
    for one in known:
        histories.add(one)
    for i in dropped:
        if i < len(drawn):
            gone = [*known][min(i, len(known) - 1)] if known else None
            if gone is not None:
                histories.drop(gone)
                del known[gone]
    cuts = {
        one: min(common_tokens(made_of.sent, prompt), len(prompt) - 1)
        for one, made_of in known.items()
        if made_of.namespace == "a"
    }
    usable = {
        one: cut
        for one, cut in cuts.items()
        if cut + len(known[one].tokens) - len(known[one].sent) >= known[one].compacted_at
    }
    found, left = histories.find("a", prompt)
    reused = None if found is None else found.cut - found.history.unsent_tokens
    assert reused == max(usable.values(), default=None)
    assert found is None or usable[found.history] == reused
    own = 0 if found is None else found.history.own_prompt_tokens
    begun = [
        known[one].prompt_tokens
        for one in cuts.keys() - usable.keys()
        if prompt[: (shared := known[one].prompt_tokens - known[one].edge)]
        == known[one].tokens[:shared]
    ]
    assert left == any(own < length < len(prompt) for length in begun)


@given(st.lists(_DRAWN, min_size=1, max_size=20), st.integers(0, 1500))
def test_the_least_recently_used_goes_first(drawn: list[Drawn], limit: int) -> None:
    histories, added = Histories(limit, pinned=False), [history(one) for one in drawn]
    for one in added:
        histories.add(one)
    sizes = [one.nbytes for one in added]
    kept = 0
    while kept < len(sizes) and sum(sizes[len(sizes) - kept - 1 :]) <= limit:
        kept += 1
    assert len(histories) == kept
    histories.clear()
    assert len(histories) == 0 and histories.find("a", [0, 1, 1]) == (None, False)


def test_no_private_key_is_a_token_id_or_used_twice() -> None:
    keys = [*private_keys(1000), *private_keys(0), *private_keys(1), *private_keys(70_000)]
    assert len(set(keys)) == len(keys) and min(keys) > 1 << 40

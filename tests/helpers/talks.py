"""Conversations with ``kv_reuse`` on a server, turn by turn, and what the oracles say of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

from oracle import Event, behind
from score_oracle import Choice
from servers import Server, logprob_gap
from tiny_models import BLANKS, LINE_END_IDS, THINK_END, THINK_START, prompt_ids

from sgl_skipkv.policy import make_policy

LOGPROB_TOLERANCE = 2e-3
INTERVAL, BUDGET, TOKENS, TEXT = 16, 40, 70, 30
MODES = ("keep", "budget")
BRANCHES = 3
Case = tuple[Any, ...]
Talk = tuple[list["Turn"], list["Turn"]]


def draw(seed: object, count: int) -> list[int]:
    return prompt_ids(str(seed), count)


def keys(mode: str | bool, policy: str = "rkv", **parameters: Any) -> dict[str, Any]:
    parameters = {"interval": INTERVAL, "delimiters": "any-newline", **parameters}
    own = {"kv_budget": BUDGET, "kv_policy": policy, "kv_params": parameters}
    return {**own, "kv_reuse": mode}


def thought_tokens(output: Sequence[int]) -> int:
    """Up to the last ``</think>`` and the white space behind it; 0 where no thought ends."""
    if THINK_END not in output:
        return 0
    end = len(output) - [*reversed(output)].index(THINK_END)
    return end + len([*takewhile(BLANKS.__contains__, output[end:])])


def opener_tokens(prompt: Sequence[int]) -> int:
    blanks = len([*takewhile(BLANKS.__contains__, reversed(prompt))])
    return blanks + 1 if prompt[-blanks - 1] == THINK_START else 0


@dataclass(frozen=True)
class Asked:
    """A turn that is asked for: what it says, and the turn that it goes on from.

    Attributes:
        sent: the prompt, where it is not that of a template.
    """

    rid: str
    text: list[int]
    sampling: Mapping[str, Any]
    after: Turn | None = None
    sent: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return self.sent or ([] if self.after is None else self.after.next_sent) + self.text


@dataclass(frozen=True)
class Turn:
    """One request of a conversation.

    Attributes:
        prompt: what was sent, and the thoughts that earlier turns dropped.
        unsent: how many tokens these are.
        compactions: that its row has been through.
    """

    asked: Asked
    answer: dict[str, Any]
    prompt: list[int]
    unsent: int
    compactions: list[Event]

    @property
    def sent(self) -> list[int]:
        return self.asked.prompt

    @property
    def info(self) -> dict[str, Any]:
        return self.answer["meta_info"].get("skipkv", {})

    @property
    def output(self) -> list[int]:
        return self.answer["output_ids"]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def own(self) -> list[Event]:
        return [event for event in self.compactions if event["rid"] == self.asked.rid]

    @property
    def thought(self) -> int:
        return thought_tokens(self.output)

    @property
    def drops(self) -> bool:
        """An answer with KV follows. With overlap the last token may have KV."""
        asks = self.asked.sampling.get("kv_params", {}).get("drop_thoughts", False)
        return asks and 0 < self.thought < len(self.output) - 1

    @property
    def next_sent(self) -> list[int]:
        """The conversation as a template has it that drops thoughts where this turn does."""
        if not self.drops:
            return self.sent + self.output
        opener = opener_tokens(self.sent)
        return self.sent[: len(self.sent) - opener] + self.output[self.thought :]


def say(server: Server, *asked: Asked) -> list[Turn]:
    """All at once."""

    def ask(one: Asked) -> dict[str, Any]:
        return server.generate(one.prompt, TOKENS, rid=one.rid, **one.sampling)

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, asked))
    return [_turn_of(server, one, answer) for one, answer in zip(asked, answers, strict=True)]


def say_until_aborted(server: Server, one: Asked, compactions: int) -> Turn:
    """As a client that stops the answer once it has been compacted so often."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, one.prompt, 1000, rid=one.rid, **one.sampling)
        while len(server.events(one.rid)) < compactions:
            time.sleep(0.01)
        server.post("/abort_request", {"rid": one.rid})
        turn = _turn_of(server, one, answer.result())
    assert turn.answer["meta_info"]["finish_reason"]["type"] == "abort"
    return turn


def _turn_of(server: Server, one: Asked, answer: dict[str, Any]) -> Turn:
    events = server.events(one.rid)
    again = [event for event in events if event["event"] == "recompute"]
    assert not any(event["generated"] for event in again), "no history was lost"
    own, sent, after = [e for e in events if e["event"] == "compact"], one.prompt, one.after
    reused = answer["meta_info"].get("skipkv", {}).get("reused_tokens", 0)
    if after is None or not reused:
        return Turn(one, answer, sent, 0, own)
    # Behind the earlier turn there may be text that another request has committed.
    reused = min(reused, len(after.next_sent))
    unsent = len(after.tokens) - len(after.next_sent)
    cut = reused + unsent
    assert sent[:reused] == after.next_sent[:reused]
    before = [_before_cut(event, cut) for event in after.compactions]
    return Turn(one, answer, after.tokens[:cut] + sent[reused:], unsent, before + own)


def _before_cut(event: Event, cut: int) -> Event:
    """An earlier compaction for tokens from there on, which may come before its end."""
    behind = cut - event["prompt_tokens"] - event["generated"]
    if behind >= 0:
        return {**event, "running": min(event.get("running") or 0, behind)}
    kept = [position for position in event["kept"] if position < cut]
    return {**event, "generated": cut - event["prompt_tokens"], "kept": kept, "running": 0}


def converse(
    server: Server,
    cases: Iterable[Case],
    asked: Callable[[Case, object, Turn | None], Asked],
    turns: int,
) -> dict[Case, Talk]:
    """One conversation of each case, all at once, in a pool without other histories; and branches
    of their last turns."""
    server.wait_idle()
    server.post("/flush_cache")
    talks: dict[Case, Talk] = {case: ([], []) for case in cases}
    for number in range(turns):
        latest = {case: talk[-1] if talk else None for case, (talk, _) in talks.items()}
        said = say(server, *(asked(case, number, after) for case, after in latest.items()))
        for (talk, _), turn in zip(talks.values(), said, strict=True):
            talk.append(turn)
    numbers = [f"branch {i}" for i in range(BRANCHES)]
    branches = [asked(case, number, t[-1]) for case, (t, _) in talks.items() for number in numbers]
    branched = iter(say(server, *branches))
    for _, more in talks.values():
        more += [next(branched) for _ in numbers]
    return talks


def verdict(oracle: Any, turn: Turn, compactions: Sequence[Event]) -> Any:
    """The masking oracle's, under these compactions of the whole conversation."""
    events = [behind(event, len(turn.prompt)) for event in compactions]
    return oracle.judge(turn.prompt, turn.output, events)


def distance(turn: Turn, found: Any) -> float:
    """Of log-probabilities."""
    return logprob_gap(turn.answer, found.logprobs.tolist())


def assert_judged(oracle: Any, *turns: Turn) -> None:
    for turn in turns:
        found = verdict(oracle, turn, turn.compactions)
        assert found.wrong == [], (turn.asked.rid, found.wrong[:5])
        assert distance(turn, found) <= LOGPROB_TOLERANCE, turn.asked.rid


def choices_of(
    oracle: Any, talk: Sequence[Turn], *, computed_again: int = 0, **how: Any
) -> list[tuple[Event, Choice]]:
    """The last turn's compactions as the score oracle sees them; with "budget" also those of the
    turns before, as of one request with the first prompt.

    Args:
        computed_again: tokens at the end of a history, whose sentence they are in nevertheless.
    """
    last = talk[-1]
    policy, counted = last.asked.sampling["kv_policy"], last.asked.sampling["kv_reuse"] == "budget"
    prompt = len((talk[0] if counted else last).prompt)
    own = last.compactions if counted else last.own
    earlier = [event for event in last.compactions if event not in own]
    choices = oracle.choices(
        *(last.tokens[:prompt], last.tokens[prompt:], [behind(e, prompt) for e in own]),
        [token in LINE_END_IDS for token in last.tokens[prompt:]],
        make_policy(policy, **last.asked.sampling["kv_params"]),
        earlier=[behind(event, prompt) for event in earlier],
        turns=[t.info["reused_tokens"] + computed_again + t.unsent for t in talk[1:]]
        if counted
        else (),
        prompts=[turn.sent for turn in (talk if counted else [last])],
        uncounted=[(len(one.tokens) - 1, len(other.prompt)) for one, other in pairwise(talk)],
        **how,
    )
    return list(zip(own, choices, strict=True))

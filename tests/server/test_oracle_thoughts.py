"""``kv_params.drop_thoughts``: the next turn starts from an answer whose thoughts are evicted.

Every token of every turn is that of a forward over the whole conversation, thoughts included, in
which every turn's evictions are masked, and the thoughts for the tokens of later turns. The servers
run with ``--strip-thinking-cache``, and every request is one that thinks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any

import pytest
from fleet import Fleet
from servers import Server, output_logprobs
from tiny_models import LINE_ENDS, PIECES, THINK_END, THINK_START, VOCAB_SIZE

from sgl_skipkv.policy import make_policy

pytestmark = pytest.mark.server

LOGPROB_TOLERANCE = 2e-3
SCORE_TOLERANCE = 2e-6  # of scores around 1e-3, float32 against float64
INTERVAL, BUDGET, TOKENS, TEXT = 16, 40, 70, 30
MODES = ("keep", "budget")
SERVERS = ("thinking", "thinking, no overlap")
POLICIES = ("skipkv", "rkv", "h2o")
TURNS, BRANCHES = 3, 3
NEWLINE = PIECES.index("\n")
BLANKS = {PIECES.index(piece) for piece in (" ", "\n", "\n\n")}
Event = Mapping[str, Any]


def draw(seed: object, count: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def keys(mode: str | None, policy: str = "rkv", drops: bool = True) -> dict[str, Any]:
    parameters = {"interval": INTERVAL, "delimiters": "any-newline"}
    own: dict[str, Any] = {"kv_budget": BUDGET, "kv_policy": policy, "kv_params": parameters}
    if mode is None:
        return own
    return {**own, "kv_reuse": mode, "kv_params": {**parameters, "drop_thoughts": drops}}


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
class Turn:
    """One request of a conversation.

    Attributes:
        sent: its prompt. prompt: the same with the thoughts that earlier turns dropped.
        unsent: how many tokens these are.
        compactions: that its row has been through.
    """

    rid: str
    sent: list[int]
    prompt: list[int]
    unsent: int
    answer: dict[str, Any]
    compactions: list[Event]
    may_drop: bool = True

    @property
    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.answer["meta_info"]["skipkv"]
        return info

    @property
    def output(self) -> list[int]:
        output: list[int] = self.answer["output_ids"]
        return output

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def own(self) -> list[Event]:
        return [event for event in self.compactions if event["rid"] == self.rid]

    @property
    def thought(self) -> int:
        return thought_tokens(self.output)

    @property
    def drops(self) -> bool:
        """An answer with KV follows. With overlap the last token may have KV."""
        return self.may_drop and 0 < self.thought < len(self.output) - 1

    @property
    def next_sent(self) -> list[int]:
        """The conversation as a template has it that drops thoughts."""
        if not self.drops:
            return self.sent + self.output
        opener = opener_tokens(self.sent)
        return self.sent[: len(self.sent) - opener] + self.output[self.thought :]


@dataclass(frozen=True)
class Asked:
    """A turn that is asked for: what it says, and the turn that it goes on from."""

    rid: str
    text: list[int]
    sampling: Mapping[str, Any]
    after: Turn | None = None
    sent: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return self.sent or ([] if self.after is None else self.after.next_sent) + self.text


def ask(server: Server, one: Asked, **top: Any) -> dict[str, Any]:
    """A request that thinks, greedy, with log-probabilities."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **one.sampling}
    body = {"rid": one.rid, "input_ids": one.prompt, "sampling_params": sampling, **top}
    answer: dict[str, Any] = server.post(
        "/generate", {"return_logprob": True, "require_reasoning": True, **body}
    )
    return answer


def say(server: Server, *asked: Asked) -> list[Turn]:
    """All at once."""
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: ask(server, one), asked))
    return [turn_of(server, one, answer) for one, answer in zip(asked, answers, strict=True)]


def turn_of(server: Server, one: Asked, answer: dict[str, Any]) -> Turn:
    events = server.events(one.rid)
    assert not [event for event in events if event["event"] == "recompute"], "no history was lost"
    own, sent, after = [e for e in events if e["event"] == "compact"], one.prompt, one.after
    reused = answer["meta_info"].get("skipkv", {}).get("reused_tokens", 0)
    if after is None or not reused:
        return Turn(one.rid, sent, sent, 0, answer, own)
    unsent = len(after.tokens) - len(after.next_sent)
    cut = reused + unsent
    assert sent[:reused] == after.next_sent[:reused]
    prompt = after.tokens[:cut] + sent[reused:]
    before = [before_cut(event, cut) for event in after.compactions]
    return Turn(one.rid, sent, prompt, unsent, answer, before + own)


def before_cut(event: Event, cut: int) -> Event:
    """An earlier compaction for tokens from there on, which may come before its end."""
    if event["prompt_tokens"] + event["generated"] <= cut:
        return event
    kept = [position for position in event["kept"] if position < cut]
    return {**event, "generated": cut - event["prompt_tokens"], "kept": kept}


def verdict(oracle: Any, turn: Turn, compactions: Sequence[Event]) -> Any:
    prompt = len(turn.prompt)
    events = [
        {**event, "generated": event["prompt_tokens"] + event["generated"] - prompt}
        for event in compactions
    ]
    return oracle.judge(turn.prompt, turn.output, events)


def distance(turn: Turn, found: Any) -> float:
    pairs = zip(output_logprobs(turn.answer), found.logprobs.tolist(), strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


def assert_judged(oracle: Any, *turns: Turn) -> None:
    for turn in turns:
        found = verdict(oracle, turn, turn.compactions)
        assert found.wrong == [], (turn.rid, found.wrong[:5])
        assert distance(turn, found) <= LOGPROB_TOLERANCE, turn.rid


@pytest.fixture(scope="module")
def thinking(fleet: Fleet) -> Iterator[dict[str, Server]]:
    servers = fleet.all_ready(*SERVERS)
    yield servers
    for one in servers.values():
        one.assert_clean()
    fleet.stop(*SERVERS)


@pytest.fixture(scope="module")
def judge(oracle):  # type: ignore[no-untyped-def]
    return oracle("thinking")


def spoken(seed: object, opened: bool, count: int = TEXT) -> list[int]:
    """A message, and what the template opens the reply with."""
    return draw(seed, count) + ([THINK_START, NEWLINE] if opened else [])


@pytest.fixture(scope="module")
def talks(thinking):  # type: ignore[no-untyped-def]
    """server -> (mode, policy, opened) -> turns, and branches of the last turn."""
    return {
        name: {case: talk for mode in MODES for case, talk in converse(server, mode)}
        for name, server in thinking.items()
    }


def converse(server: Server, mode: str) -> Iterator[tuple[Any, tuple[list[Turn], list[Turn]]]]:
    server.wait_idle()
    server.post("/flush_cache")
    talks: dict[tuple[str, bool], list[Turn]] = {
        (policy, opened): [] for policy in POLICIES for opened in (True, False)
    }

    def asked(case: tuple[str, bool], number: object) -> Asked:
        (policy, opened), after = case, talks[case][-1] if talks[case] else None
        text = spoken((mode, case, number), opened, TEXT if after else 90 + TEXT)
        rid = f"talk-{mode}-{policy}-{opened}-{number}"
        return Asked(rid, text, keys(mode, policy), after)

    for number in range(TURNS):
        turns = say(server, *(asked(case, number) for case in talks))
        for talk, turn in zip(talks.values(), turns, strict=True):
            talk.append(turn)
    everything = [asked(case, f"branch {i}") for case in talks for i in range(BRANCHES)]
    branches = iter(say(server, *everything))
    for case, talk in talks.items():
        yield (mode, *case), (talk, [next(branches) for _ in range(BRANCHES)])


@pytest.mark.parametrize("name", SERVERS)
def test_every_turn_is_the_whole_conversation_under_its_masks(talks, judge, name):  # type: ignore[no-untyped-def]
    for talk, branches in talks[name].values():
        assert_judged(judge, *talk, *branches)


@pytest.mark.parametrize("name", SERVERS)
def test_a_thought_is_evicted_as_a_whole_and_the_answer_stays(talks, name):  # type: ignore[no-untyped-def]
    dropped = 0
    for talk, branches in talks[name].values():
        for turn in (*talk, *branches):
            if not turn.drops:
                continue
            dropped += 1
            span = range(len(turn.prompt), len(turn.prompt) + turn.thought)
            *earlier, last = turn.own
            before = earlier[-1] if earlier else None
            held = range(len(turn.prompt) + last["generated"])
            if before is not None:
                end = before["prompt_tokens"] + before["generated"]
                held = [*before["kept"], *range(end, len(held))]
            elif turn.compactions[:-1]:
                end = turn.compactions[-2]["prompt_tokens"] + turn.compactions[-2]["generated"]
                held = [*turn.compactions[-2]["kept"], *range(end, len(held))]
            assert last["kept"] == [position for position in held if position not in span]
    assert dropped >= 0.7 * sum(len(talk) + len(more) for talk, more in talks[name].values())


@pytest.mark.parametrize("name", SERVERS)
def test_kept_sets_behind_dropped_thoughts_have_the_best_scores(talks, score_oracle, name):  # type: ignore[no-untyped-def]
    """Statistics, sentences and queries of what stays go on as they were recorded."""
    behind_drops = 0
    for (mode, policy, _), (talk, _) in talks[name].items():
        if mode != "budget":
            continue
        last, prompt = talk[-1], len(talk[0].prompt)
        events = [
            {**e, "generated": e["prompt_tokens"] + e["generated"] - prompt}
            for e in last.compactions
        ]
        choices = score_oracle("thinking").choices(
            *(last.tokens[:prompt], last.tokens[prompt:], events),
            [token < len(PIECES) and PIECES[token] in LINE_ENDS for token in last.tokens[prompt:]],
            make_policy(policy, interval=INTERVAL, delimiters="any-newline"),
            turns=[turn.info["reused_tokens"] + turn.unsent for turn in talk[1:]],
            uncounted=[(len(a.tokens) - 1, len(b.prompt)) for a, b in pairwise(talk)],
        )
        drops = 0
        for event, choice in zip(last.compactions, choices, strict=True):
            if is_drop(event):  # follows no score
                drops += 1
                continue
            tolerance = SCORE_TOLERANCE * (10 if policy == "h2o" else 1)
            assert choice.inversion < tolerance, (name, policy)
            behind_drops += drops > 0
    assert behind_drops >= 20


@pytest.mark.parametrize("name", SERVERS)
def test_a_turn_computes_its_own_text_only(talks, name):  # type: ignore[no-untyped-def]
    after_thoughts = openers = 0
    for case, (talk, branches) in talks[name].items():
        later = [*pairwise(talk), *((talk[-1], branch) for branch in branches)]
        for earlier, turn in later:
            info, text = turn.info, len(turn.sent) - len(earlier.next_sent)
            assert info["kv_reuse_miss"] == "none", (name, case, info)
            assert len(turn.sent) - info["reused_tokens"] <= text + 1, (name, case, info)
            assert turn.answer["meta_info"]["prompt_tokens"] == len(turn.sent)
            evicted = info["reused_tokens"] + turn.unsent - info["reused_kv_tokens"]
            assert evicted >= earlier.thought if earlier.drops else evicted >= 0
            after_thoughts += turn.unsent > 0
            openers += info["reused_kv_tokens"] > info["reused_tokens"]
    assert after_thoughts >= 24 and openers >= 1


def test_requests_were_retracted(talks, thinking):  # type: ignore[no-untyped-def]
    server = thinking["thinking, no overlap"]
    turns = [
        turn for talk, more in talks["thinking, no overlap"].values() for turn in (*talk, *more)
    ]
    events = [event for turn in turns for event in server.events(turn.rid)]
    assert sum(event["event"] == "restore" for event in events) >= 10


def test_the_masks_matter(talks, judge):  # type: ignore[no-untyped-def]
    """Without those of earlier turns, or of their thoughts alone, the same oracle must object."""
    turns = [talk[-1] for talk, _ in talks["thinking"].values() if talk[-2].drops]
    for masks in (
        lambda turn: turn.own,
        lambda turn: [e for e in turn.compactions if e["rid"] == turn.rid or not is_drop(e)],
    ):
        objections = [
            distance(turn, verdict(judge, turn, masks(turn))) > LOGPROB_TOLERANCE for turn in turns
        ]
        assert len(turns) >= 6 and sum(objections) >= 0.9 * len(turns)


def is_drop(event: Event) -> bool:
    """It is the last of its request, and leaves none of the first generated tokens."""
    return event["prompt_tokens"] not in event["kept"] and event["generated"] >= TOKENS - 1


def first_turn(server: Server, tag: object, mode: str) -> Turn:
    """Of a conversation that drops a thought."""
    for attempt in range(20):
        text = spoken((tag, mode, attempt), True, 60)
        (turn,) = say(server, Asked(f"{tag}-{mode}-{attempt}", text, keys(mode)))
        if turn.drops:
            return turn
    raise AssertionError("the model never thinks")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sent", ["thoughts", "a blank", "the opener"])
def test_another_text_where_the_thought_was(thinking, judge, mode, sent):  # type: ignore[no-untyped-def]
    """The client sends thoughts back, or the template leaves something in their place."""
    server = thinking["thinking"]
    first = first_turn(server, sent, mode)
    prompt = first.sent[: len(first.sent) - opener_tokens(first.sent)]
    between = {"thoughts": first.output[: first.thought], "a blank": [NEWLINE], "the opener": []}
    begin = prompt if sent == "a blank" else first.sent
    text = begin + between[sent] + first.output[first.thought :] + spoken("more", True)
    (second,) = say(server, Asked(f"{sent}-{mode}-second", [], keys(mode), first, sent=text))
    assert (second.info["kv_reuse_miss"], second.info["reused_tokens"]) == ("diverged", 0)
    assert_judged(judge, second)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_prompt_again_is_no_other_turn(thinking, mode):  # type: ignore[no-untyped-def]
    server = thinking["thinking"]
    first = first_turn(server, "again", mode)
    (again,) = say(server, Asked(f"again-{mode}", first.sent, keys(mode)))
    assert again.info["kv_reuse_miss"] == "none" and again.output == first.output


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_out", (1, 2))
def test_the_end_of_an_answer_may_be_left_out(thinking, judge, mode, left_out):  # type: ignore[no-untyped-def]
    server = thinking["thinking"]
    for attempt in range(20):
        first = first_turn(server, f"end-{left_out}-{attempt}", mode)
        ends = [e["prompt_tokens"] + e["generated"] for e in first.own[:-1]]
        cut = len(first.tokens) - left_out
        if cut > max([*ends, len(first.prompt) + first.thought + 1]):
            break
    text = first.next_sent[: len(first.next_sent) - left_out] + spoken("new", True)
    (second,) = say(server, Asked(f"cut-{mode}-{left_out}", [], keys(mode), first, sent=text))
    assert second.info["reused_tokens"] == len(first.next_sent) - left_out
    assert_judged(judge, second)


@pytest.mark.parametrize("mode", MODES)
def test_samples_continue_one_history(thinking, mode):  # type: ignore[no-untyped-def]
    server = thinking["thinking"]
    first = first_turn(server, "samples", mode)
    prompt = first.next_sent + spoken("sampled", True)
    sampling = {"temperature": 1.0, "n": 3, **keys(mode)}
    answers = ask(server, Asked(f"samples-{mode}-all", [], sampling, sent=prompt), rid=None)
    reused = [answer["meta_info"]["skipkv"]["reused_tokens"] for answer in answers]  # type: ignore[index]
    assert reused == [len(prompt) - 1] * 3


def test_positions_end_with_the_context(thinking, judge):  # type: ignore[no-untyped-def]
    """Positions of dropped thoughts count, so a history may leave too few of them."""
    server, context = thinking["thinking"], 32768
    stops = {"stop_token_ids": list(range(3, VOCAB_SIZE + 2)), "ignore_eos": False}
    for tokens, miss in ((None, "none"), (-1, "context"), (0, "none")):
        first = first_turn(server, f"context-{tokens}", "keep")
        asked = first.next_sent + spoken("more", False)
        unsent = len(first.tokens) - len(first.next_sent)
        room = context - 2 - len(asked) - unsent
        wanted = None if tokens is None else room - tokens
        sampling = {**keys("keep"), **stops, "max_new_tokens": wanted}
        (turn,) = say(server, Asked(f"context-{tokens}", [], sampling, first, sent=asked))
        assert turn.info["kv_reuse_miss"] == miss
        assert (turn.info["reused_tokens"] > 0) == (miss == "none")
        assert_judged(judge, turn)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("mode", [None, *MODES])
def test_stripped_rows(thinking, judge, name, mode):  # type: ignore[no-untyped-def]
    """``--strip-thinking-cache`` files the prompt of a thinking request, of ours too. A history is
    filed as a whole."""
    server = thinking[name]
    (plain,) = say(server, Asked(f"plain-{mode}", spoken(("plain", mode), True, 80), {}))
    later = Asked(f"plain-{mode}-2", plain.tokens + draw("more", 9), {"max_new_tokens": 4})
    assert ask(server, later)["meta_info"]["cached_tokens"] == len(plain.sent)
    own = keys(mode, drops=False)
    (first,) = say(server, Asked(f"strip-{mode}", spoken(("strip", mode), True, 80), own))
    assert first.own
    first = replace(first, may_drop=False)
    (second,) = say(
        server, Asked(f"strip-{mode}-2", [], own, first, sent=first.tokens + draw("more", 9))
    )
    reused = second.info.get("reused_tokens", 0)
    if mode is None:
        assert second.answer["meta_info"]["cached_tokens"] == len(first.sent)
    else:
        assert reused >= len(first.tokens) - 1
    assert second.prompt == second.sent
    assert_judged(judge, first, second)


def test_aborted_rows_leave_nothing(thinking):  # type: ignore[no-untyped-def]
    """With a history, compacted or not, on servers that strip the rows of thinking requests."""
    for name, server in thinking.items():
        for mode in MODES:
            first = first_turn(server, f"abort-{name}", mode)
            for tokens in (5, 60):
                rid = f"abort-{name}-{mode}-{tokens}"
                sampling = {**keys(mode), "max_new_tokens": 2000}
                asked = Asked(rid, spoken("more", True), sampling, first)
                with ThreadPoolExecutor(1) as pool:
                    running = pool.submit(ask, server, asked)
                    while not server.used_tokens() and not running.done():
                        pass
                    server.post("/abort_request", {"rid": rid})
                    reason = running.result()["meta_info"]["finish_reason"]["type"]
                assert reason == "abort"
        server.assert_clean()
        assert server.used_tokens() == 0

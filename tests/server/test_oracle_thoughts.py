"""``kv_params.drop_thoughts``: the next turn starts from an answer whose thoughts are evicted.

Every token of every turn is that of a forward over the whole conversation, thoughts included, in
which every turn's evictions are masked, and the thoughts for the tokens of later turns. The servers
run with ``--strip-thinking-cache``, and every request is one that thinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from fleet import Fleet
from oracle import Event
from score_oracle import score_tolerance
from servers import Server
from talks import (
    LOGPROB_TOLERANCE,
    MODES,
    TEXT,
    TOKENS,
    Asked,
    Case,
    Turn,
    assert_judged,
    choices_of,
    converse,
    distance,
    draw,
    keys,
    opener_tokens,
    say,
    verdict,
)
from tiny_models import NEWLINE, THINK_START, VOCAB_SIZE

from sgl_skipkv.request.pages import page_floor

pytestmark = [pytest.mark.server, pytest.mark.slow]

SERVERS = ("thinking", "thinking, no overlap")
PAGES = {"thinking": 16, "thinking, no overlap": 1}
POLICIES = ("skipkv", "rkv", "h2o")
TURNS = 3
THINKS = {"require_reasoning": True}


def dropping(mode: str, policy: str = "rkv") -> dict[str, Any]:
    return {**THINKS, **keys(mode, policy, drop_thoughts=True)}


@pytest.fixture(scope="module")
def thinking(fleet: Fleet) -> Iterator[dict[str, Server]]:
    yield from fleet.all_lent(*SERVERS, stop=True)


@pytest.fixture(scope="module")
def judge(oracle):
    return oracle("thinking")


def spoken(seed: object, opened: bool, count: int = TEXT) -> list[int]:
    """A message, and what the template opens the reply with."""
    return draw(seed, count) + ([THINK_START, NEWLINE] if opened else [])


def asked(case: Case, number: object, after: Turn | None) -> Asked:
    mode, policy, opened = case
    seed = (mode, (policy, opened), number)
    text = spoken(seed, opened, TEXT if after else 90 + TEXT)
    return Asked(f"talk-{mode}-{policy}-{opened}-{number}", text, dropping(mode, policy), after)


@pytest.fixture(scope="module")
def talks(thinking):
    """server -> (mode, policy, opened) -> turns, and branches of the last turn."""
    return {
        name: {
            case: talk
            for mode in MODES
            for case, talk in converse(
                server,
                [(mode, p, opened) for p in POLICIES for opened in (True, False)],
                asked,
                TURNS,
            ).items()
        }
        for name, server in thinking.items()
    }


@pytest.mark.parametrize("name", SERVERS)
def test_every_turn_is_the_whole_conversation_under_its_masks(talks, judge, name):
    for talk, branches in talks[name].values():
        assert_judged(judge, *talk, *branches)


@pytest.mark.parametrize("name", SERVERS)
def test_a_thought_is_evicted_as_a_whole_and_the_answer_stays(talks, name):
    dropped = 0
    for talk, branches in talks[name].values():
        for turn in (*talk, *branches):
            if not turn.drops:
                continue
            dropped += 1
            span = range(len(turn.prompt), len(turn.prompt) + turn.thought)
            assert turn.own
            *before, last = turn.compactions
            held = range(len(turn.prompt) + last["generated"])
            if before:
                end = before[-1]["prompt_tokens"] + before[-1]["generated"]
                held = [*before[-1]["kept"], *range(end, len(held))]
            assert last["kept"] == [position for position in held if position not in span]
    assert dropped >= 0.7 * sum(len(talk) + len(more) for talk, more in talks[name].values())


@pytest.mark.parametrize("name", SERVERS)
def test_kept_sets_behind_dropped_thoughts_have_the_best_scores(talks, score_oracle, name):
    """Statistics, sentences and queries of what stays go on as they were recorded."""
    behind_drops = 0
    for (mode, policy, _), (talk, _) in talks[name].items():
        if mode != "budget":
            continue
        drops = 0
        for event, choice in choices_of(score_oracle("thinking"), talk):
            if is_drop(event):  # follows no score
                drops += 1
                continue
            assert choice.inversion < score_tolerance(policy), (name, policy)
            behind_drops += drops > 0
    assert behind_drops >= 20


@pytest.mark.parametrize("name", SERVERS)
def test_a_turn_computes_its_own_text_only(talks, name):
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


def test_requests_were_retracted(talks, thinking):
    server = thinking["thinking, no overlap"]
    turns = [
        turn for talk, more in talks["thinking, no overlap"].values() for turn in (*talk, *more)
    ]
    events = [event for turn in turns for event in server.events(turn.asked.rid)]
    assert sum(event["event"] == "restore" for event in events) >= 10


def test_the_masks_matter(talks, judge):
    """Without those of earlier turns, or of their thoughts alone, the same oracle must object."""
    turns = [talk[-1] for talk, _ in talks["thinking"].values() if talk[-2].drops]
    for masks in (
        lambda turn: turn.own,
        lambda turn: [e for e in turn.compactions if e in turn.own or not is_drop(e)],
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
        (turn,) = say(server, Asked(f"{tag}-{mode}-{attempt}", text, dropping(mode)))
        if turn.drops:
            return turn
    raise AssertionError("the model never thinks")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sent", ["thoughts", "a blank", "the opener"])
def test_another_text_where_the_thought_was(thinking, judge, mode, sent):
    """The client sends thoughts back, or the template leaves something in their place."""
    server = thinking["thinking"]
    first = first_turn(server, sent, mode)
    prompt = first.sent[: len(first.sent) - opener_tokens(first.sent)]
    between = {"thoughts": first.output[: first.thought], "a blank": [NEWLINE], "the opener": []}
    begin = prompt if sent == "a blank" else first.sent
    text = begin + between[sent] + first.output[first.thought :] + spoken("more", True)
    (second,) = say(server, Asked(f"{sent}-{mode}-second", [], dropping(mode), first, text))
    assert (second.info["kv_reuse_miss"], second.info["reused_tokens"]) == ("diverged", 0)
    assert_judged(judge, second)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_prompt_again_is_no_other_turn(thinking, mode):
    server = thinking["thinking"]
    first = first_turn(server, "again", mode)
    (again,) = say(server, Asked(f"again-{mode}", first.sent, dropping(mode)))
    assert again.info["kv_reuse_miss"] == "none" and again.output == first.output


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_out", (1, 2))
def test_the_end_of_an_answer_may_be_left_out(thinking, judge, mode, left_out):
    server = thinking["thinking"]
    for attempt in range(20):
        first = first_turn(server, f"end-{left_out}-{attempt}", mode)
        ends = [e["prompt_tokens"] + e["generated"] for e in first.own[:-1]]
        cut = len(first.tokens) - left_out
        if cut > max([*ends, len(first.prompt) + first.thought + 1]):
            break
    text = first.next_sent[: len(first.next_sent) - left_out] + spoken("new", True)
    (second,) = say(server, Asked(f"cut-{mode}-{left_out}", [], dropping(mode), first, text))
    assert second.info["reused_tokens"] == len(first.next_sent) - left_out
    assert_judged(judge, second)


@pytest.mark.parametrize("mode", MODES)
def test_samples_continue_one_history(thinking, mode):
    server = thinking["thinking"]
    first = first_turn(server, "samples", mode)
    prompt = first.next_sent + spoken("sampled", True)
    answers: Any = server.generate(prompt, TOKENS, n=3, **{**dropping(mode), "temperature": 1.0})
    reused = [answer["meta_info"]["skipkv"]["reused_tokens"] for answer in answers]
    assert reused == [len(prompt) - 1] * 3


def test_positions_end_with_the_context(thinking, judge):
    """Positions of dropped thoughts count, so a history may leave too few of them."""
    server, context = thinking["thinking"], 32768
    stops = {"stop_token_ids": list(range(3, VOCAB_SIZE + 2)), "ignore_eos": False}
    for tokens, miss in ((None, "none"), (-1, "context"), (0, "none")):
        first = first_turn(server, f"context-{tokens}", "keep")
        text = first.next_sent + spoken("more", False)
        unsent = len(first.tokens) - len(first.next_sent)
        room = context - 2 - len(text) - unsent
        wanted = None if tokens is None else room - tokens
        sampling = {**dropping("keep"), **stops, "max_new_tokens": wanted}
        (turn,) = say(server, Asked(f"context-{tokens}", [], sampling, first, text))
        assert turn.info["kv_reuse_miss"] == miss
        assert (turn.info["reused_tokens"] > 0) == (miss == "none")
        assert_judged(judge, turn)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("mode", [False, *MODES])
def test_stripped_rows(thinking, judge, name, mode):
    """``--strip-thinking-cache`` files the prompt of a thinking request, of ours too. A history is
    filed as a whole."""
    server = thinking[name]
    (plain,) = say(server, Asked(f"plain-{mode}", spoken(("plain", mode), True, 80), THINKS))
    later = server.generate(plain.tokens + draw("more", 9), 4, **THINKS)
    assert later["meta_info"]["cached_tokens"] == page_floor(len(plain.sent), PAGES[name])
    own = {**THINKS, **keys(mode)}
    (first,) = say(server, Asked(f"strip-{mode}", spoken(("strip", mode), True, 80), own))
    assert first.own
    (second,) = say(server, Asked(f"strip-{mode}-2", draw("more", 9), own, first))
    if not mode:
        cached = page_floor(len(first.sent), PAGES[name])
        assert second.answer["meta_info"]["cached_tokens"] == cached
    else:
        assert second.info["reused_tokens"] >= len(first.tokens) - 1
    assert second.prompt == second.sent
    assert_judged(judge, first, second)


def test_aborted_rows_leave_nothing(thinking):
    """With a history, compacted or not, on servers that strip the rows of thinking requests."""
    for name, server in thinking.items():
        for mode in MODES:
            first = first_turn(server, f"abort-{name}", mode)
            for tokens in (5, 60):
                rid = f"abort-{name}-{mode}-{tokens}"
                text = first.next_sent + spoken("more", True)
                with ThreadPoolExecutor(1) as pool:
                    running = pool.submit(server.generate, text, 2000, rid=rid, **dropping(mode))
                    while not server.used_tokens() and not running.done():
                        pass
                    server.post("/abort_request", {"rid": rid})
                    reason = running.result()["meta_info"]["finish_reason"]["type"]
                assert reason == "abort"
        server.assert_clean()
        assert server.used_tokens() == 0

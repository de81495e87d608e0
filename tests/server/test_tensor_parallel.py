"""Two ranks, started by ``--tp-size 2`` alone: they keep the same tokens, and fail together.

The server compares the ranks' kept sets itself and would end; here their traces are compared as
well. ``tests/load/ranks.py`` does the same at length, with more models, and against one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet, addition
from rank_plants import FAILS_ALWAYS, FAILS_ONCE, trace_of
from servers import HTTPFailure, Server, logprob_gap
from tiny_models import prompt_ids
from turns import LOGPROB_TOLERANCE, Turn

from bench.lib.trace import read_trace
from sgl_skipkv.policy import names

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS = 120
POLICIES = [name for name in names() if name != "full"]
COVERING = ("skipkv", "tova")
STEERED = ("streaming", "skipkv+")


def call(rid: str, policy: str, interval: int = 16, **more: Any) -> dict[str, Any]:
    parameters = {"interval": interval, "delimiters": "any-newline", **more.pop("kv_params", {})}
    return {
        "rid": rid,
        "input_ids": prompt_ids(policy, 50),
        "tokens": TOKENS,
        "kv_budget": 40,
        "kv_policy": policy,
        "kv_params": parameters,
        **more,
    }


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Iterator[Server]:
    running = fleet.ready("ranks")
    yield running
    running.wait_idle()
    planted = [line for line in running.complaints() if "Traceback" not in line]
    assert not planted and running.process.poll() is None
    fleet.stop("ranks")


@pytest.fixture(scope="module")
def answers(server: Server) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    calls = [call(f"all-{name}", name) for name in POLICIES]
    calls += [call(f"covers-{name}", name, kv_params={"coverage": 0.8}) for name in COVERING]
    calls += [call(f"steered-{name}", name, steering=1.0) for name in STEERED]
    return list(zip(calls, server.generate_all(calls), strict=True))


def traced(server: Server, rank: int) -> list[dict[str, Any]]:
    return read_trace(trace_of(server.trace_path, rank))


def test_every_greedy_token_is_the_argmax_under_the_trace_masks(server, answers, oracle) -> None:
    for asked, answer in answers:
        events = server.events(asked["rid"])
        ids = answer["output_ids"]
        verdict = oracle("llama").judge(
            asked["input_ids"], ids, events, addition("ranks", asked, ids)
        )
        assert verdict.wrong == [], asked["rid"]
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= LOGPROB_TOLERANCE, asked["rid"]
        assert answer["meta_info"]["skipkv"]["compactions"] >= 4, asked["rid"]


def test_the_traces_of_both_ranks_are_equal(server, answers) -> None:
    server.wait_idle()
    first, second = traced(server, 0), traced(server, 1)
    assert first == second
    assert sum(event["event"] == "compact" for event in first) >= 80
    assert sum(event["event"] == "restore" for event in first) >= 3


@pytest.mark.parametrize("mode", ["keep", "budget"])
def test_a_conversation_goes_on(server, oracle, mode: str) -> None:
    first: Turn | None = None
    for number in range(3):
        text = prompt_ids(f"{mode} {number}", 40)
        asked = call(f"{mode}-{number}", "rkv", kv_reuse=mode)
        asked["input_ids"] = text if first is None else [*first.tokens, *text]
        answer = server.generate(**asked)
        before = () if first is None else (first,)
        turn = Turn(asked["input_ids"], answer, before, server.events(asked["rid"]))
        gap = turn.judge(oracle("llama"))
        assert gap is not None and gap <= LOGPROB_TOLERANCE
        assert first is None or turn.info["reused_tokens"] > 0
        first = turn


@pytest.mark.parametrize("policy", ["distinct", "raas"])
def test_what_fails_on_one_rank_ends_on_all(server, answers, policy: str) -> None:
    """In a plan, or while attention is followed: once, and for good. The others finish."""
    for interval in (FAILS_ONCE, FAILS_ALWAYS):
        others = [call(f"{policy}-{interval}-beside-{name}", name) for name in ("rkv", "random")]
        rid = f"{policy}-{interval}"
        ended = all_but_one(server, call(rid, policy, interval), others)
        assert ended.status == 500 and rid in str(ended)
    server.generate(**call(f"{policy}-again", policy, FAILS_ONCE))


@pytest.mark.parametrize("how", ["once", "always"])
def test_a_request_that_one_rank_cannot_open_ends_on_all(server, answers, how: str) -> None:
    others = [call(f"beside-open-{how}-{name}", name) for name in ("rkv", "random")]
    assert all_but_one(server, call(f"open-{how}", "rkv"), others).status == 500


def test_a_request_that_one_rank_cannot_back_up_ends_on_all(server, answers) -> None:
    """Retractions choose whom they like, so several requests are of that kind."""
    calls = [call(f"backup-{how}-{i}", "rkv") for how in ("once", "always") for i in range(4)]
    outcomes = server_outcomes(server, calls)
    failures = [one for one in outcomes if isinstance(one, HTTPFailure)]
    assert 1 <= len(failures) < len(calls) and all(one.status == 500 for one in failures)


def all_but_one(server: Server, bad: dict[str, Any], others: list[dict[str, Any]]) -> HTTPFailure:
    """The failure of the first, among others that finish."""
    ended, *rest = server_outcomes(server, [bad, *others])
    assert isinstance(ended, HTTPFailure), ended
    assert not any(isinstance(one, HTTPFailure) for one in rest)
    return ended


def server_outcomes(server: Server, calls: list[dict[str, Any]]) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    def outcome(one: dict[str, Any]) -> Any:
        try:
            return server.generate(**one)
        except HTTPFailure as failure:
            return failure

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))

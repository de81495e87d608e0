"""DP attention: one server with two attention groups of two ranks.

Groups of one rank with MLA: ``test_oracle_latents.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fleet import Fleet, addition
from rank_plants import FAILED_UPDATE, FAILS_ONCE, UNMEASURABLE, trace_of
from servers import HTTPFailure, Server, logprob_gap, output_logprobs
from tiny_models import prompt_ids
from turns import LOGPROB_TOLERANCE, Turn

from bench.lib.trace import read_trace
from sgl_skipkv.policy import names

pytestmark = [pytest.mark.server, pytest.mark.slow]

NAME, FAMILY, RANKS = "groups of two ranks", "for_four_ranks", 4
GROUPS, TOKENS = (0, 1), 90
POLICIES = [name for name in names() if name != "full"]
STEERED = ("streaming", "skipkv+")


def call(rid: str, group: int, policy: str = "distinct", **more: Any) -> dict[str, Any]:
    parameters = {"interval": 16, "delimiters": "any-newline", **more.pop("kv_params", {})}
    return {
        "rid": rid,
        "input_ids": prompt_ids(policy, 30),
        "tokens": TOKENS,
        "routed_dp_rank": group,
        "kv_budget": 40,
        "kv_policy": policy,
        "kv_params": parameters,
        **more,
    }


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Iterator[Server]:
    running = fleet.ready(NAME)
    yield running
    running.wait_idle()
    planted = [line for line in running.complaints() if "Traceback" not in line]
    assert not planted and running.process.poll() is None
    fleet.stop(NAME)


@pytest.fixture(scope="module")
def answers(server: Server) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of both groups at once, and then of one alone, beside which the other one idles."""
    calls = [call(f"all-{name}", i % 2, name) for i, name in enumerate(POLICIES)]
    calls += [call(f"steered-{name}", i, name, steering=1.0) for i, name in enumerate(STEERED)]
    alone = call("alone", 1)
    return [*zip(calls, server.generate_all(calls), strict=True), (alone, server.generate(**alone))]


def test_every_greedy_token_is_the_argmax_under_the_trace_masks(server, answers, oracle) -> None:
    judge, seen = oracle(FAMILY).judge, 0
    for asked, answer in answers:
        prompt, ids, events = asked["input_ids"], answer["output_ids"], server.events(asked["rid"])
        verdict = judge(prompt, ids, events, addition(NAME, asked, ids))
        assert verdict.wrong == [], asked["rid"]
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= LOGPROB_TOLERANCE, asked["rid"]
        assert answer["meta_info"]["skipkv"]["compactions"] >= 3, asked["rid"]
        seen += bool(judge(prompt, ids, []).wrong)
    assert seen >= 0.9 * len(answers)  # without masks and vector the oracle objects


def test_a_group_has_a_trace_of_its_own(server, answers) -> None:
    """And its ranks keep the same tokens."""
    server.wait_idle()
    restored = 0
    for group, path in zip(GROUPS, server.trace_files, strict=True):
        assert path.name == f"trace.dp{group}.jsonl"
        events = read_trace(path)
        of_group = {one["rid"] for one, _ in answers if one["routed_dp_rank"] == group}
        assert {event["rid"] for event in events} == of_group
        assert read_trace(trace_of(path, 1)) == events
        restored += sum(event["event"] == "restore" for event in events)
    assert restored >= 3


def test_budgets_in_one_group_leave_the_other_alone(server: Server) -> None:
    prompt = prompt_ids("plain", 30)
    plain: dict[str, Any] = {"input_ids": prompt, "tokens": TOKENS, "routed_dp_rank": 1}
    expected = server.generate(**plain)
    busy = [call(f"beside-{i}", 0, return_logprob=False) for i in range(4)]
    *_, beside = server.generate_all([*busy, plain])
    assert beside["output_ids"] == expected["output_ids"]
    assert logprob_gap(beside, output_logprobs(expected)) <= LOGPROB_TOLERANCE
    assert "skipkv" not in beside["meta_info"]


def test_a_conversation_goes_on_in_its_group(server: Server, oracle) -> None:
    """Another group knows nothing of its history: its prompt is computed."""
    turns: list[Turn] = []
    for number, group in enumerate((0, 0, 1)):
        text = prompt_ids(f"turn {number}", 40)
        before = turns[-1:] if group == 0 else []
        asked = call(f"turn-{number}", group, "rkv", kv_reuse="budget")
        asked["input_ids"] = [*turns[-1].tokens, *text] if turns else text
        answer = server.generate(**asked)
        turn = Turn(asked["input_ids"], answer, tuple(before), server.events(asked["rid"]))
        gap = turn.judge(oracle(FAMILY))
        assert gap is not None and gap <= LOGPROB_TOLERANCE
        assert (turn.info["reused_tokens"] > 0) == bool(before)
        turns.append(turn)


def update_weights(server: Server, version: str) -> None:
    update = {"model_path": server.get("/server_info")["model_path"], "weight_version": version}
    assert server.post("/update_weights_from_disk", update)["success"]


def test_new_weights_are_measured_in_a_step_of_all_ranks(server: Server) -> None:
    """When nothing runs and a request that evicts waits, in whichever group; not before. Also where
    the update has failed on one rank."""
    first = server.generate(**call("weights", 0))
    for number, version in enumerate(["new", FAILED_UPDATE]):
        measured = server.log.count("new weights measured")
        update_weights(server, version)
        plain = [{"input_ids": [5, 6, 7], "tokens": 8, "routed_dp_rank": group} for group in GROUPS]
        server.generate_all(plain)
        assert server.log.count("new weights measured") == measured
        again = server.generate(**call(f"weights again {number}", 1))
        server.generate(**call(f"weights later {number}", 0))
        assert server.log.count("new weights measured") == measured + RANKS
        assert again["output_ids"] == first["output_ids"]


def test_weights_that_one_rank_cannot_measure(server: Server) -> None:
    """Whoever waits for them is told, requests without a budget go on, and other weights serve."""
    update_weights(server, UNMEASURABLE)
    for group in GROUPS:
        with pytest.raises(HTTPFailure, match="new weights were not measured") as ended:
            server.generate(**call(f"unmeasured {group}", group))
        assert ended.value.status == 503
        server.generate([5, 6, 7], 8, routed_dp_rank=group)
    update_weights(server, "new again")
    assert server.generate(**call("measurable again", 1))["meta_info"]["skipkv"]["compactions"] >= 3


def test_what_fails_on_one_rank_ends_alone(server: Server, answers) -> None:
    """The others of its group finish, and those of the other group."""

    def outcome(one: dict[str, Any]) -> Any:
        try:
            return server.generate(**one)
        except HTTPFailure as failure:
            return failure

    calls = [call("bad", 0, kv_params={"interval": FAILS_ONCE})]
    calls += [call(f"beside-bad-{group}", group, "rkv") for group in GROUPS]
    with ThreadPoolExecutor(len(calls)) as pool:
        ended, *rest = pool.map(outcome, calls)
    assert isinstance(ended, HTTPFailure) and ended.status == 500 and "bad" in str(ended)
    assert not any(isinstance(one, HTTPFailure) for one in rest)

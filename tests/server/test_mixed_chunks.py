"""Mixed chunks: requests with budgets decode in the prefills of others.

SGLang mixes no request that asks for log-probabilities, so these ask for tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from fleet import Fleet, addition
from score_oracle import SPELLED_OUT, score_tolerance
from server_specs import SPECS
from servers import Server
from tiny_models import LINE_END_IDS, prompt_ids

from sgl_skipkv.policy import make_policy, names

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS, KV_BUDGET, INTERVAL = 120, 40, 16
POLICIES = [name for name in names() if name != "full"]
STEERED = ("full", "streaming", "skipkv+")
PARAMETERS: dict[str, Any] = {"interval": INTERVAL, "delimiters": "any-newline"}
FILLER = {"tokens": 1, "return_logprob": False, "kv_policy": "full"}


def call(rid: str, policy: str, **keys: Any) -> dict[str, Any]:
    budget = {} if policy == "full" else {"kv_budget": KV_BUDGET, "kv_params": PARAMETERS}
    asked = {"rid": rid, "input_ids": prompt_ids(policy, 30), "tokens": TOKENS, "kv_policy": policy}
    return {**asked, "return_logprob": False, **budget, **keys}


def beside_prefills(server: Server, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of requests that decode while one prompt after the other is prefilled."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(lambda one: server.generate(**one), one) for one in calls]
        for number in count():
            if all(one.done() for one in running):
                return [one.result() for one in running]
            server.generate(prompt_ids(f"filler {number}", 400), **FILLER)


@pytest.fixture(scope="module", params=["mixed chunks", "mixed chunks, no overlap"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Server]:
    yield from fleet.lent(name)


@pytest.fixture(scope="module")
def answers(server: Server) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    calls = [call(policy, policy) for policy in POLICIES]
    calls += [call(f"steered-{policy}", policy, steering=1.0) for policy in STEERED]
    return list(zip(calls, beside_prefills(server, calls), strict=True))


def test_every_greedy_token_is_the_argmax_under_the_trace_masks(
    server, answers, oracle, name: str
) -> None:
    judge, seen = oracle(str(SPECS[name].model)).judge, 0
    for asked, answer in answers:
        prompt, ids, events = asked["input_ids"], answer["output_ids"], server.events(asked["rid"])
        verdict = judge(prompt, ids, events, addition(name, asked, ids))
        assert verdict.wrong == [], asked["rid"]
        seen += bool(judge(prompt, ids, []).wrong)
    assert seen >= 0.9 * len(answers)  # without masks and vector the oracle objects
    assert sum(answer["meta_info"]["num_retractions"] for _, answer in answers) >= 1


def test_every_kept_set_is_the_one_with_the_best_scores(
    server, answers, score_oracle, name: str
) -> None:
    """Also of what was recorded while others were prefilled."""
    compactions = 0
    for asked, answer in answers:
        policy, events = asked["kv_policy"], server.events(asked["rid"])
        recomputed = any(event["event"] == "recompute" for event in events)
        if policy not in SPELLED_OUT or "steering" in asked or recomputed:
            continue
        ids, compacted = answer["output_ids"], [one for one in events if one["event"] == "compact"]
        ends = [token in LINE_END_IDS for token in ids]
        sides = asked["input_ids"], ids, compacted, ends, make_policy(policy, **PARAMETERS)
        for choice in score_oracle(str(SPECS[name].model)).choices(*sides, kv_budget=KV_BUDGET):
            assert choice.inversion < score_tolerance(policy), asked["rid"]
            compactions += 1
    assert compactions >= 20


def test_requests_did_decode_in_prefills(server: Server) -> None:
    """A step that is a decode step says so in the log."""
    server.wait_idle()
    before = server.log.count("Decode batch")
    (answer,) = beside_prefills(server, [call("counted", "rkv")])
    server.wait_idle()
    decode_steps = server.log.count("Decode batch") - before
    assert answer["meta_info"]["completion_tokens"] == TOKENS
    assert decode_steps <= TOKENS - 10

"""PD disaggregation: one server computes prompts, the other one decodes and evicts.

Two real servers and the real Mooncake between them. Every token is that of a forward under the
masks of the decode server's trace, and kept sets are those of one server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from disaggregated import Disaggregated, has_mooncake
from fleet import Fleet, addition
from score_oracle import SPELLED_OUT, score_tolerance
from server_specs import SPECS
from tiny_models import LINE_END_IDS, prompt_ids

from sgl_skipkv.policy import make_policy, names

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not has_mooncake(), reason="needs Mooncake: make mooncake"),
]

TOKENS, KV_BUDGET, INTERVAL = 160, 40, 16
POLICIES = [name for name in names() if name != "full"]
STEERED = ("full", "streaming", "skipkv+")
PARAMETERS: dict[str, Any] = {"interval": INTERVAL, "delimiters": "any-newline"}


def call(rid: str, policy: str, **keys: Any) -> dict[str, Any]:
    budget = {} if policy == "full" else {"kv_budget": KV_BUDGET, "kv_params": PARAMETERS}
    asked = {"rid": rid, "input_ids": prompt_ids(policy, 150), "tokens": TOKENS}
    return {**asked, "kv_policy": policy, "return_logprob": False, **budget, **keys}


@pytest.fixture(scope="module", params=["disaggregated", "disaggregated, two ranks"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Disaggregated]:
    yield from fleet.lent(name)


@pytest.fixture(scope="module")
def answers(server: Disaggregated) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    calls = [call(policy, policy) for policy in POLICIES]
    calls += [call(f"steered-{policy}", policy, steering=1.0) for policy in STEERED]
    return list(zip(calls, server.generate_all(calls), strict=True))


def test_every_greedy_token_is_the_argmax_under_the_trace_masks(
    server, answers, oracle, name: str
) -> None:
    judge, seen = oracle(str(SPECS[name].model)).judge, 0
    for asked, answer in answers:
        prompt, ids, events = asked["input_ids"], answer["output_ids"], server.events(asked["rid"])
        assert len(ids) == TOKENS
        assert judge(prompt, ids, events, addition(name, asked, ids)).wrong == [], asked["rid"]
        seen += bool(judge(prompt, ids, []).wrong)
    assert seen >= 0.9 * len(answers)  # without masks and vector the oracle objects


def test_every_kept_set_is_the_one_with_the_best_scores(
    server, answers, score_oracle, name: str
) -> None:
    compactions = 0
    for asked, answer in answers:
        policy, events = asked["kv_policy"], server.events(asked["rid"])
        if policy not in SPELLED_OUT or "steering" in asked:
            continue
        ids, compacted = answer["output_ids"], [one for one in events if one["event"] == "compact"]
        ends = [token in LINE_END_IDS for token in ids]
        sides = asked["input_ids"], ids, compacted, ends, make_policy(policy, **PARAMETERS)
        for choice in score_oracle(str(SPECS[name].model)).choices(*sides, kv_budget=KV_BUDGET):
            assert choice.inversion < score_tolerance(policy), asked["rid"]
            compactions += 1
    assert compactions >= 20


def test_what_is_retracted_comes_back_from_host_memory(server, answers, name: str) -> None:
    kinds = [one["event"] for asked, _ in answers for one in server.events(asked["rid"])]
    retractions = sum(answer["meta_info"]["num_retractions"] for _, answer in answers)
    assert "recompute" not in kinds
    # In the small pool what requests can ever hold is reserved, so none is retracted.
    assert retractions == 0 if "two ranks" in name else kinds.count("restore") >= 20

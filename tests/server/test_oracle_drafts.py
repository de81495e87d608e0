"""Speculative decoding: a step adds several tokens, and a compaction may come while one runs.

A draft is right or wrong; what is written is what the model itself would have written of what is
kept. Some requests are retracted, and recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet
from server_specs import SPECS
from servers import Server, logprob_gap
from tiny_models import prompt_ids

from sgl_skipkv.policy import make_policy, names

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS, BUDGET, ROUNDS = 120, 40, 4
LOGPROB_TOLERANCE = 2e-4
POLICIES = [name for name in names() if name != "full" and not make_policy(name).needs_track]
SHARES: dict[str, dict[str, Any]] = {
    "keydiff": {"fraction": 0.25},
    "streaming": {"protect_prompt": False},
}


def call(rid: str, policy: str, prompt: list[int], **keys: Any) -> dict[str, Any]:
    parameters = {"interval": 16, "delimiters": "any-newline", **SHARES.get(policy, {})}
    budget = {"kv_budget": BUDGET, "kv_policy": policy, "kv_params": parameters}
    return {"rid": rid, "input_ids": prompt, "tokens": TOKENS} | budget | keys


@pytest.fixture(scope="module", params=["drafts", "drafts, no overlap", "eagle"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Server]:
    yield from fleet.lent(name)


def test_print(server, name, oracle) -> None:
    family = str(SPECS[name].model)
    shared = prompt_ids("shared", 100)
    calls = [call(policy, policy, shared + prompt_ids(policy, 30)) for policy in POLICIES]
    for asked, answer in zip(calls, server.generate_all(calls), strict=True):
        rid, ids, events = asked["rid"], answer["output_ids"], server.events(asked["rid"])
        verdict = oracle(family).judge(asked["input_ids"], ids, events)
        without = oracle(family).judge(asked["input_ids"], ids, [])
        gap = logprob_gap(answer, verdict.logprobs.tolist())
        print(rid, len(ids), verdict.wrong[:5], len(without.wrong), gap, answer["meta_info"]["spec_accept_length"], [e["event"] for e in events], [e.get("running") for e in events])
    assert 0

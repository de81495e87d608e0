"""Two more families under the oracle: one with norms on what its layers add and half of a head
rotated, and one with experts that two ranks share out.

``tests/load/models.py`` does the same with others, for ``make reliability``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet, addition
from server_specs import SPECS
from servers import Server, logprob_gap
from tiny_models import prompt_ids

from sgl_skipkv.policy import names

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS = 90
POLICIES = [name for name in names() if name != "full"]
STEERED = ("full", "skipkv+")
LOGPROB_TOLERANCE = 2e-4  # as with steering elsewhere


def call(rid: str, policy: str, **keys: Any) -> dict[str, Any]:
    parameters = {"interval": 16, "delimiters": "any-newline"}
    budget = {} if policy == "full" else {"kv_budget": 40, "kv_params": parameters}
    prompt = prompt_ids(policy, 30)
    return {"rid": rid, "input_ids": prompt, "tokens": TOKENS, "kv_policy": policy} | budget | keys


@pytest.fixture(scope="module", params=["glm4", "experts on two ranks"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Server]:
    yield from fleet.lent(name)


def test_every_greedy_token_is_the_argmax_under_the_trace_masks(server, oracle, name) -> None:
    family = str(SPECS[name].model)
    calls = [call(policy, policy) for policy in POLICIES]
    calls += [call(f"steered-{policy}", policy, steering=1.25) for policy in STEERED]
    judge, seen = oracle(family).judge, 0
    for asked, answer in zip(calls, server.generate_all(calls), strict=True):
        rid, prompt, ids = asked["rid"], asked["input_ids"], answer["output_ids"]
        events, added = server.events(rid), addition(name, asked, ids)
        verdict = judge(prompt, ids, events, added)
        assert verdict.wrong == [], rid
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= LOGPROB_TOLERANCE, rid
        seen += bool(judge(prompt, ids, []).wrong)
    assert seen >= 0.9 * len(calls)  # without masks and vector the oracle objects

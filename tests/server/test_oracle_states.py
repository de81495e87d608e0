"""Models half of whose layers have a state instead of KV: attention layers lose tokens, states do
not. Some requests are retracted, and recomputed.

``tests/load/models.py`` does the same with longer outputs, for ``make reliability``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet
from score_oracle import SPELLED_OUT, score_tolerance
from server_specs import SPECS
from servers import HTTPFailure, Server, judged
from tiny_models import LINE_END_IDS, prompt_ids

from sgl_skipkv.policy import make_policy, names

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS, BUDGET, ROUNDS = 120, 40, 4
POLICIES = [name for name in names() if name != "full"]
SHARES: dict[str, dict[str, Any]] = {
    "rkv": {"fraction": 0.25},
    "snapkv": {"coverage": 0.3},
    "keydiff": {"quotas": True},
    "streaming": {"protect_prompt": False},
}


def call(rid: str, policy: str, prompt: list[int], **keys: Any) -> dict[str, Any]:
    parameters = {"interval": 16, "delimiters": "any-newline", **SHARES.get(policy, {})}
    budget = {"kv_budget": BUDGET, "kv_policy": policy, "kv_params": parameters}
    return {"rid": rid, "input_ids": prompt, "tokens": TOKENS} | budget | keys


@pytest.fixture(
    scope="module", params=["lfm2", "lfm2, states copied", "lfm2 on two ranks", "qwen3_next"]
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family(name: str) -> str:
    """Short convolutions, and linear attention."""
    return str(SPECS[name].model)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Server]:
    yield from fleet.lent(name)


@pytest.fixture(scope="module")
def said(server: Server) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Calls with the answers, of prompts that begin alike."""
    shared = prompt_ids("shared", 100)
    calls = [call(policy, policy, shared + prompt_ids(policy, 30)) for policy in POLICIES]
    return list(zip(calls, server.generate_all(calls), strict=True))


def test_every_token_and_every_kept_set(said, server, family, oracle, score_oracle) -> None:
    judge, objected, chosen, recomputed = oracle(family).judge, 0, 0, 0
    for asked, answer in said:
        kinds = judged(judge, server, asked, answer)
        objected += bool(judge(asked["input_ids"], answer["output_ids"], []).wrong)
        recomputed += kinds.count("recompute")
        assert "restore" not in kinds
        policy = make_policy(asked["kv_policy"], **asked["kv_params"])
        if policy.name not in SPELLED_OUT or "recompute" in kinds:
            continue
        if policy.needs_rotation and family == "qwen3_next":
            continue  # it turns a quarter of a head, and the score oracle whole heads
        compactions = [one for one in server.events(asked["rid"]) if one["event"] == "compact"]
        delimiters = [token in LINE_END_IDS for token in answer["output_ids"]]
        sides = asked["input_ids"], answer["output_ids"], compactions, delimiters, policy
        choices = score_oracle(family).choices(*sides)
        assert not any(one.kept.all() for one in choices), asked["rid"]
        assert max(one.inversion for one in choices) < score_tolerance(policy.name), asked["rid"]
        chosen += len(choices)
    assert objected >= 0.9 * len(said)  # without masks the oracle objects
    assert chosen >= 2 * len(SPELLED_OUT) and recomputed >= 1


def test_no_state_is_found_behind_other_tokens(said, server, family, oracle) -> None:
    """Whatever begins like an earlier request, recomputed or not, compacted or not, gets the states
    of just these tokens. The pool is small, so the tree loses some of them again."""
    rng, judge = random.Random(3), oracle(family).judge
    texts = [asked["input_ids"] + answer["output_ids"] for asked, answer in said]
    cached = recomputed = 0
    for number in range(ROUNDS):
        calls = []
        for i in range(24):
            text, new = rng.choice(texts), prompt_ids(f"{number} {i}", rng.randrange(1, 40))
            prompt = text[: rng.randrange(10, min(len(text), 300))] + new
            tokens = rng.choice((1, 30, 90, 200))
            calls.append(call(f"{number}-{i}", rng.choice(POLICIES), prompt, tokens=tokens))
            if i % 4 == 0:  # an answer without a budget may begin with what others left
                calls[-1] |= {"kv_policy": "full", "kv_budget": None, "kv_params": None}
        asked_of = [
            {key: value for key, value in one.items() if value is not None} for one in calls
        ]
        for asked, answer in zip(asked_of, server.generate_all(asked_of), strict=True):
            recomputed += judged(judge, server, asked, answer).count("recompute")
            cached += answer["meta_info"]["cached_tokens"]
            texts.append(asked["input_ids"] + answer["output_ids"])
    assert cached > 20 * 24 * ROUNDS and recomputed >= 10


def test_what_a_state_would_break_is_refused(server) -> None:
    for mode in ("keep", "budget"):
        with pytest.raises(HTTPFailure, match="a state instead of KV: it is not kept") as refused:
            server.generate(**call("refused", "rkv", prompt_ids("refused", 30), kv_reuse=mode))
        assert refused.value.status == 400


def test_new_weights_are_measured(server, family, model_folder, oracle) -> None:
    """The text that measures them takes a slot for its states, and gives it back."""
    answer = server.post("/update_weights_from_disk", {"model_path": str(model_folder(family))})
    assert answer["success"]
    asked = call("new weights", "expected", prompt_ids("new weights", 30))
    assert "compact" in judged(oracle(family).judge, server, asked, server.generate(**asked))

"""Invariants 2 and 5: what the server generates is what a masked forward generates, in any company.

One set of requests (every policy, budgets down to the minimum, prompts that share a prefix and are
prefilled in chunks) runs on three model families, with and without the overlap scheduler, with
pages of 1, 16 and 32 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from budgets import budget_at
from fleet import Fleet
from score_oracle import SPELLED_OUT, score_tolerance
from servers import HTTPFailure, Server, logprob_gap
from tiny_models import LINE_END_IDS, VOCAB_SIZE

from sgl_skipkv.policy import make_policy, names

pytestmark = pytest.mark.server

LOGPROB_TOLERANCE = 2e-3
INTERVAL = 16
TOKENS = 150
SHARE, COVERAGE = 0.375, 0.8
# Random models repeat themselves less than real ones, and attend to everything a little.
PARAMETERS: dict[tuple[str, int], dict[str, Any]] = {
    ("distinct", 40): {"beginning": 0},
    ("distinct", 240): {"beginning": 0},
    ("skipkv", 40): {"tau": 0.3},
    ("skipkv+", 40): {"tau": 0.3, "ending": 2, "recent": 12},
    ("raas", 40): {"alpha": 0.01},
    ("lazy", 40): {"alpha": 0.01},
    ("crystal", 40): {"alpha": 0.05},
}
WITH_QUOTAS = ("rkv", "keydiff", "distinct")
# A third of it is more than 64 recent tokens.
LARGE_BUDGET, LARGE_TOKENS = 240, 300
# (family, overlap) -> name in the fleet
SERVERS = {
    ("qwen2", True): "main",
    ("qwen2", False): "qwen2, no overlap",
    ("llama", True): "llama",
    ("qwen3", False): "qwen3, no overlap",
}


def make_calls(tag: str) -> list[dict[str, Any]]:
    """Two budgets per policy on prompts of 120 to 131 tokens, 100 of them shared, every other one
    of the larger budgets under a share; a few follow their demand. And one large budget."""
    rng = random.Random(7)
    draw = lambda n: [rng.randrange(3, VOCAB_SIZE) for _ in range(n)]  # noqa: E731
    prefix = draw(100)
    calls = []
    for i, policy in enumerate(names()):
        for kv_budget in (make_policy(policy).min_budget_tokens, 40):
            parameters = PARAMETERS.get((policy, kv_budget), {})
            if kv_budget == 40 and i % 2:
                parameters = {**parameters, "fraction": SHARE}
            elif kv_budget == 40 and i % 4 == 2:
                parameters = {**parameters, "coverage": COVERAGE}
            calls.append((f"{policy}-{kv_budget}", i, policy, kv_budget, parameters))
    for i, policy in enumerate(WITH_QUOTAS):
        calls.append((f"{policy}-quotas", i, policy, 56, {"quotas": True}))
    large = PARAMETERS["distinct", LARGE_BUDGET]
    calls.append((f"distinct-{LARGE_BUDGET}", 0, "distinct", LARGE_BUDGET, large))
    return [
        {
            "rid": f"{tag}-{name}",
            "input_ids": prefix + draw(20 + i),
            "tokens": LARGE_TOKENS if kv_budget == LARGE_BUDGET else TOKENS,
            "kv_budget": kv_budget,
            "kv_policy": policy,
            "kv_params": {"interval": INTERVAL, "delimiters": "any-newline", **parameters},
        }
        for name, i, policy, kv_budget, parameters in calls
    ]


@pytest.fixture(scope="module")
def families(fleet: Fleet) -> Iterator[dict[tuple[str, bool], Server]]:
    """(family, overlap) -> server; test_oracle_steering.py goes on with all but the session's."""
    for servers in fleet.all_lent(*SERVERS.values(), stop=False):
        yield {key: servers[name] for key, name in SERVERS.items()}


@pytest.fixture(scope="module")
def answers(families) -> dict[Any, list[dict[str, Any]]]:
    """Each server's answers to the same requests, sent all at once (so in batches of up to 24)."""
    return {key: server.generate_all(make_calls("all")) for key, server in families.items()}


@pytest.mark.parametrize("key", SERVERS, ids=str)
def test_every_greedy_token_is_the_argmax_under_the_trace_masks(families, answers, oracle, key):
    server, judge = families[key], oracle(key[0]).judge
    compactions = 0
    for call, answer in zip(make_calls("all"), answers[key], strict=True):
        events = server.events(call["rid"])
        verdict = judge(call["input_ids"], answer["output_ids"], events)
        assert verdict.wrong == [], (call["rid"], verdict.wrong[:5])
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= LOGPROB_TOLERANCE, call["rid"]
        compactions += answer["meta_info"]["skipkv"]["compactions"]
    assert compactions >= 40  # the test would be empty without them


def test_the_masks_matter(server, answers, oracle):
    """Without the trace's masks the same oracle must object, or it proves nothing."""
    call = next(c for c in make_calls("all") if c["kv_policy"] == "streaming")
    answer = answers["qwen2", True][make_calls("all").index(call)]
    assert oracle("qwen2").judge(call["input_ids"], answer["output_ids"], []).wrong


def test_budgets_hold_and_prompts_stay(families, answers):
    below = 0
    for key, server in families.items():
        for call, answer in zip(make_calls("all"), answers[key], strict=True):
            info, prompt = answer["meta_info"]["skipkv"], len(call["input_ids"])
            if call["kv_policy"] == "full":
                assert info["compactions"] == info["evicted_tokens"] == 0
                continue
            policy = make_policy(call["kv_policy"], **call["kv_params"])
            compactions = [e for e in server.events(call["rid"]) if e["event"] == "compact"]
            for count, event in enumerate(compactions):
                budget = partial(budget_at, policy, call["kv_budget"])
                before, after = (budget(count + i, event["generated"]) for i in (0, 1))
                assert event["kept"][:prompt] == list(range(prompt))
                assert event["kept"] == sorted(set(event["kept"]))
                assert event["after"] == len(event["kept"]) <= prompt + after
                assert event["before"] <= prompt + before + INTERVAL
                below += event["after"] < prompt + after
                if policy.params.coverage == 1:
                    assert event["after"] == prompt + after
                    assert event["before"] == prompt + before + INTERVAL
            bound = budget_at(policy, call["kv_budget"], len(compactions), call["tokens"])
            assert info["peak_kv_tokens"] <= bound + INTERVAL + 1
            assert info["kv_tokens"] == info["full_kv_tokens"] - info["evicted_tokens"]
    assert below >= 10  # of those that follow their demand


@pytest.mark.parametrize("key", SERVERS, ids=str)
def test_every_kept_set_is_the_one_with_the_best_scores(families, answers, score_oracle, key):
    """Recorded queries and hidden states, and every step's attention, are the model's own."""
    exact = penalised = compactions = 0
    for call, answer in zip(make_calls("all"), answers[key], strict=True):
        if call["kv_policy"] not in SPELLED_OUT:
            continue
        events = [e for e in families[key].events(call["rid"]) if e["event"] == "compact"]
        delimiters = [token in LINE_END_IDS for token in answer["output_ids"]]
        policy = make_policy(call["kv_policy"], **call["kv_params"])
        sides = call["input_ids"], answer["output_ids"], events, delimiters, policy
        judged = score_oracle(key[0]).choices(*sides, kv_budget=call["kv_budget"])
        for choice in judged:
            assert choice.inversion < score_tolerance(call["kv_policy"]), call["rid"]
            exact += choice.inversion <= 0
            penalised += call["kv_policy"] == "skipkv" and bool((choice.scores < -0.3).any())
            compactions += 1
            free = choice.scores[choice.scores.isfinite()]
            if call["kv_budget"] >= 40:  # in the smallest budgets everything may be as recent
                assert free.std() > 100 * score_tolerance("rkv")  # any other set would be seen
    assert exact >= 0.9 * compactions > 80 and penalised >= 3


def test_neither_overlap_nor_pages_change_anything(families, answers):
    """Invariant 5: the same tokens and kept sets with the overlap scheduler and pages of one token,
    and without it in pages of 16."""
    with_overlap, without = answers["qwen2", True], answers["qwen2", False]
    for call, one, other in zip(make_calls("all"), with_overlap, without, strict=True):
        assert one["output_ids"] == other["output_ids"]
        kept = [_kept_sets(families["qwen2", on], call["rid"]) for on in (True, False)]
        assert kept[0] == kept[1]


def test_alone_is_as_in_a_batch(server, answers):
    """Invariant 5: a request keeps the same set and says the same alone as among all the others."""
    calls = zip(make_calls("all"), answers["qwen2", True], strict=True)
    for call, together in calls:
        if call["kv_budget"] not in (40, 56):  # of each policy one budget, and with quotas
            continue
        rid_alone = call["rid"].replace("all", "alone")
        alone = server.generate(**{**call, "rid": rid_alone})
        assert alone["output_ids"] == together["output_ids"], call["rid"]
        assert _kept_sets(server, rid_alone) == _kept_sets(server, call["rid"])


def test_flags_set_the_default_of_calls_without_keys(families, oracle):
    server = families["qwen3", False]
    prompt = make_calls("all")[0]["input_ids"]
    answer = server.generate(prompt, TOKENS, rid="default")
    info = answer["meta_info"]["skipkv"]
    assert (info["policy"], info["kv_budget"]) == ("rkv", 96)
    assert info["compactions"] == (TOKENS - 1 - 96) // 32 == 1
    verdict = oracle("qwen3").judge(prompt, answer["output_ids"], server.events("default"))
    assert verdict.wrong == []
    with pytest.raises(HTTPFailure, match=r"kv_budget: expected an integer in \[13, 512\]"):
        server.generate(prompt, 4, kv_budget=513)
    full = server.generate(prompt, 4, kv_policy="full")["meta_info"]["skipkv"]
    assert full["policy"] == "full" and "kv_budget" not in full  # the server's evicts nothing here


def _kept_sets(server: Server, rid: str) -> list[list[int]]:
    return [event["kept"] for event in server.events(rid) if event["event"] == "compact"]


def test_a_null_key_is_a_key_not_set(families) -> None:
    """On a server with defaults a request of nulls is one without keys."""
    server = families["qwen3", False]
    nulls = dict.fromkeys(("kv_budget", "kv_policy", "kv_params", "steering"))
    for keys in (nulls, {"custom_params": nulls}, {**nulls, "kv_budget": 64}):
        params = {"max_new_tokens": 4, **keys}
        answer = server.post("/generate", {"text": "abc", "sampling_params": params})
        assert answer["meta_info"]["skipkv"]["kv_budget"] == (keys.get("kv_budget") or 96)


def test_defaults_are_for_requests_that_can_have_them(families) -> None:
    """Who asks for nothing of ours is served in full; who asks for both is refused."""
    server = families["qwen3", False]
    session = server.post("/open_session", {"capacity_of_str_len": 1000})
    try:
        in_session = {"text": "abc", "session_params": {"id": session}}
        for keys in ({}, {"kv_budget": None}):
            params = {"max_new_tokens": 200, "ignore_eos": True, **keys}
            answer = server.post("/generate", {**in_session, "sampling_params": params})
            info = answer["meta_info"]["skipkv"]
            assert info["policy"] == "full" and info["compactions"] == 0
        with pytest.raises(HTTPFailure, match="kv_budget: expected no session with it"):
            server.post("/generate", {**in_session, "sampling_params": {"kv_budget": 64}})
    finally:
        server.post("/close_session", {"session_id": session})

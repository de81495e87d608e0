"""When a request compacts, end to end: Runtime and Recorder on made-up content. What stays:
``test_kept_sets.py``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from budgets import budget_at
from synthetic import (
    BUDGET,
    INTERVAL,
    PROMPT,
    Call,
    SyntheticServer,
    served,
    words,
)

from sgl_skipkv.eviction import planner
from sgl_skipkv.policy import Policy

POLICIES = ("skipkv", "h2o", "rkv", "snapkv")


def decoded(server: SyntheticServer, call: Call, steps: int) -> tuple[list[int], list[int]]:
    """Tokens fed at each compaction, and own KV tokens after each step."""
    at: list[int] = []
    own: list[int] = []
    for _ in range(steps):
        done, fed = len(call.compactions), call.generated
        server.decode(call)
        if len(call.compactions) > done:
            at.append(fed)
        own.append(len(call.slots) - PROMPT)
    return at, own


def test_a_compaction_is_due_when_the_call_grew_an_interval_past_its_budget() -> None:
    server = SyntheticServer()
    call = served(server)
    at, own = decoded(server, call, 110)
    assert at == [52, 64, 76, 88, 100]
    assert max(own) == BUDGET + INTERVAL and min(own[52:]) == BUDGET + 1
    assert call.state.report.peak_budgeted_tokens == BUDGET + INTERVAL


def test_requests_that_are_due_together_are_scored_together() -> None:
    """Once per policy and parameters; test_launches.py has that each keeps what it keeps alone."""
    server = SyntheticServer()
    names = ("rkv", "skipkv", "rkv", "streaming")
    calls = [
        served(server, seed=seed, kv_policy=name, kv_params={"sink": 2})
        for seed, name in enumerate(names)
    ]
    for _ in range(BUDGET + INTERVAL):
        server.decode(*calls)
    asked: list[list[str]] = []
    stock = Policy.scores_together

    def scores_together(policy: Policy, together: Any) -> Any:
        asked.append([policy.name for _ in together])
        return stock(policy, together)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "scores_together", scores_together)
        server.plans(calls)
    assert sorted(asked) == [["rkv", "rkv"], ["skipkv"], ["streaming"]]


@pytest.mark.parametrize(("name", "share"), [("h2o", 0.5), ("skipkv+", 0.5), ("distinct", 0.6)])
def test_the_recent_part_is_a_share_of_what_a_prompt_leaves(name: str, share: float) -> None:
    """A prompt of 120 tokens that counts and stays leaves 80 of 200."""
    server = SyntheticServer()
    parameters = {"count_prompt": True, "window": 8}
    keys = {"kv_policy": name, "kv_budget": 200, "kv_params": parameters}
    call = served(server, prompt=[3] * 120, **keys)
    (_, (start, stop)) = planner._protected(call.state, 328)
    assert (start, stop) == (328 - int(share * 80), 328)


def test_nothing_is_due_before_the_first_decode_step() -> None:
    """A counted prompt may be past the budget at once; its prefill may still be running."""
    server = SyntheticServer()
    parameters = {"protect_prompt": False, "count_prompt": True}
    call = served(server, prompt=[3] * 90, kv_params=parameters)
    assert server.compact_due(call) == []
    server.decode(call)
    assert call.compactions == [] and len(call.slots) == 91
    server.decode(call)
    assert len(call.compactions[0]) == BUDGET and len(call.slots) == BUDGET + 1
    server.run(call, 60)
    assert len(call.slots) <= BUDGET + INTERVAL + 1


@pytest.mark.parametrize(("budget", "interval"), [(13, 8), (13, 128), (100, 8), (64, 33)])
def test_own_tokens_never_pass_the_bound_of_the_contract(budget: int, interval: int) -> None:
    server = SyntheticServer()
    call = served(server, words(4) * 75, kv_budget=budget, kv_params={"interval": interval})
    for _ in range(290):
        server.decode(call)
        assert len(call.slots) - PROMPT <= budget + interval + 1
    assert call.compactions
    assert server.finish(call)["peak_kv_tokens"] <= budget + interval + 1


SHARED = {"interval": INTERVAL, "fraction": 0.25}


def test_a_share_is_due_when_an_interval_is_past_it() -> None:
    """Every compaction evicts ``interval`` tokens once the share is more than the least budget."""
    server = SyntheticServer()
    call = served(server, words(4) * 130, kv_budget=60, kv_params=SHARED)
    at, own = decoded(server, call, 400)
    shares = [max(13, fed // 4) for fed in at]
    assert at[:9] == [25, 37, 49, 63, 79, 95, 111, 127, 143] and len(at) == 28
    assert [len(kept) - PROMPT for kept in call.compactions] == [min(60, one) for one in shares]
    bounds = [min(60, max(13, fed // 4)) + INTERVAL for fed in range(1, 401)]
    assert all(held <= bound + 1 for held, bound in zip(own, bounds, strict=True))
    assert {before - after for before, after in pairwise(own) if after < before} == {INTERVAL - 1}
    summary = server.finish(call)
    assert (summary["kv_budget"], summary["peak_kv_tokens"]) == (60, 72)
    assert summary["kv_tokens"] == own[-1] == 400 - summary["evicted_tokens"]


def test_a_share_below_the_least_budget_is_the_least_budget() -> None:
    server = SyntheticServer()
    call = served(server, kv_params={"fraction": 1e-6})
    decoded(server, call, 100)
    assert {len(kept) - PROMPT for kept in call.compactions} == {13}


@pytest.mark.parametrize("policy", ["skipkv", "rpc"])
def test_a_share_of_everything_changes_nothing(policy: str) -> None:
    server = SyntheticServer()
    calls = [served(server, kv_policy=policy, kv_params=one) for one in ({}, {"fraction": 1})]
    server.run(calls[0], 120)
    server.run(calls[1], 120)
    assert calls[0].compactions == calls[1].compactions != []


def test_a_budget_that_grows_stays_within_its_share() -> None:
    """RPC's own budgets are 13, 14, 17, 20 ... tokens."""
    server = SyntheticServer()
    for fraction, kept in ((1.0, [13, 14, 17, 20, 23]), (0.25, [13, 13, 13, 14, 18])):
        call = served(server, kv_policy="rpc", kv_params={"fraction": fraction})
        at, _ = decoded(server, call, 150)
        assert [len(one) - PROMPT for one in call.compactions][:5] == kept
        policy = call.state.settings.policy
        expected = [budget_at(policy, BUDGET, i, fed) for i, fed in enumerate(at, start=1)]
        assert [len(one) - PROMPT for one in call.compactions] == expected


def test_requests_of_several_shares_keep_in_a_batch_what_they_keep_alone() -> None:
    shares = (0.2, 0.5, 0.5, 1.0)
    servers = [SyntheticServer() for _ in range(2)]
    together, alone = (
        [
            served(server, seed=seed, kv_policy=policy, kv_params={"fraction": share})
            for seed, (share, policy) in enumerate(zip(shares, POLICIES, strict=True))
        ]
        for server in servers
    )
    for _ in range(150):
        servers[0].decode(*together)
    for call in alone:
        servers[1].run(call, 150)
    assert [call.compactions for call in together] == [call.compactions for call in alone]
    assert all(len(call.compactions) > 4 for call in together)


@pytest.mark.parametrize("policy", ["skipkv", "h2o", "rpc", "streaming"])
def test_a_recomputed_request_keeps_the_share_of_all_it_generated(policy: str) -> None:
    server = SyntheticServer()
    call = served(server, words(5) * 50, kv_budget=60, kv_policy=policy, kv_params=SHARED)
    server.run(call, 90)
    done = len(call.compactions)
    server.retract(call)
    server.prefill(call)
    assert len(call.slots) == PROMPT + 91 and len(call.compactions) == done
    server.run(call, 2)  # the first decode step may still be running beside the prefill
    assert len(call.compactions) == done + 1
    assert len(call.compactions[-1]) == PROMPT + 92 // 4
    server.run(call, 100)
    assert len(call.slots) - PROMPT <= 192 // 4 + INTERVAL + 1


@pytest.mark.parametrize("prefilled", [5, 60])
def test_admission_counts_with_the_share_of_the_longest_output(prefilled: int) -> None:
    """What a request holds never passes what was set aside for it."""
    server = SyntheticServer()
    call = served(server, words(4) * 130, kv_budget=60, kv_params=SHARED)
    server.run(call, prefilled)
    for steps in (4, 100, 300):
        left = call.state.future_tokens(len(call.slots), steps)
        share = max(13, min((prefilled + steps) // 4, 60))
        assert left == min(steps, share + INTERVAL + 1 - (len(call.slots) - PROMPT))
    own = []
    set_aside = len(call.slots) + call.state.future_tokens(len(call.slots), 200)
    for _ in range(200):
        server.decode(call)
        own.append(len(call.slots))
    assert max(own) <= set_aside


def test_a_budget_above_the_length_changes_nothing() -> None:
    server = SyntheticServer()
    call = served(server, kv_budget=500)
    server.run(call, 200)
    assert call.positions == list(range(PROMPT + 200)) and call.compactions == []
    assert server.finish(call)["evicted_tokens"] == 0

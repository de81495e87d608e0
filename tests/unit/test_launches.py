"""A compaction of many requests starts hardly more than one of a few, and every request keeps its
own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_on_cpu import on_triton
from launches import POLICIES, decode_to_due, launches
from synthetic import SyntheticServer, served, words


@pytest.mark.parametrize("name", POLICIES)
def test_many_due_requests_start_few_operations(name: str) -> None:
    """At most 60, replay and rewrite included; each kernel as often as for two requests."""
    few, many = launches(name, 2), launches(name, 16)
    assert many.total() <= 60, many
    kernels = {one: count for one, count in many.items() if one.endswith("_kernel")}
    assert kernels == {one: count for one, count in few.items() if one.endswith("_kernel")}
    assert many["_select_kernel"] == many["_compact_rows_kernel"] == 1
    replays = name in ("h2o", "raas", "lazy", "tova", "rpc")
    assert many["_mean_attention_kernel"] == replays


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_keeps_in_a_batch_what_it_keeps_alone(name: str) -> None:
    """Two servers with the same requests; one plans them together, replay included."""
    together, alone = SyntheticServer(check_ledger=False), SyntheticServer(check_ledger=False)
    opened = [
        [
            served(server, seed=seed, kv_policy=name, prompt=[3] * (5 + 9 * seed))
            for seed in range(4)
        ]
        for server in (together, alone)
    ]
    for server, calls in zip((together, alone), opened, strict=True):
        decode_to_due(server, calls)
    with on_triton():
        expected = [alone.plan(call) for call in opened[1]]
        for plan, other in zip(together.plans(opened[0]), expected, strict=True):
            assert torch.equal(plan.selection.kept, other.selection.kept)
            statistics, others = plan.state.kv.statistics, other.state.kv.statistics
            assert statistics.keys() == others.keys()
            assert all(torch.equal(values, others[one]) for one, values in statistics.items())


def test_calls_with_knobs_of_their_own_keep_what_they_keep_alone() -> None:
    """Requests with the same parameters are scored as one; who else is due changes nothing."""
    asked: list[tuple[str, dict[str, Any]]] = [
        *(("skipkv+", {}), ("skipkv", {"tau": 0.1}), ("skipkv", {"sigma": 0.4}), ("skipkv+", {}))
    ]
    server = SyntheticServer(check_ledger=False)
    calls = [
        served(
            server,
            words(*(2 + (seed + i) % 7 for i in range(40))),
            seed=seed,
            kv_policy=name,
            kv_params=one,
            prompt=[3] * (5 + 3 * seed),
        )
        for seed, (name, one) in enumerate(asked)
    ]
    for _ in range(2):
        decode_to_due(server, calls)
        with on_triton():
            together = server.plans(calls)
            for call, plan in zip(calls, together, strict=True):
                alone = server.plan(call)
                assert torch.equal(plan.selection.kept, alone.selection.kept)
                assert torch.equal(plan.positions, alone.positions)
            server.decode(*calls)
    assert all(len(call.compactions) == 2 for call in calls)

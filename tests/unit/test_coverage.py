"""Budgets that follow the attention of the last queries, against float64."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels_on_cpu import on_triton
from refusals import assert_refused
from synthetic import (
    INTERVAL,
    PROMPT,
    Call,
    SyntheticServer,
    served,
    words,
)

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.compactor import StepWork
from sgl_skipkv.eviction.coverage import needed_tokens
from sgl_skipkv.policy import make_policy, names, policy_class
from sgl_skipkv.request.demand import AHEAD_TOKENS
from sgl_skipkv.request.settings import resolve_request

EVICTING = [name for name in names() if policy_class(name).evicts]
CEILING, WINDOW = 60, 8
LEAST = 4 + WINDOW + 1


def covering(server: SyntheticServer, coverage: float = 0.8, **call: Any) -> Call:
    """A request with sentences whose attention is far from uniform."""
    parameters = {"coverage": coverage, **call.pop("kv_params", {})}
    opened = served(
        *(server, words(5, 3, 7, 4, 9) * 14),
        **{"kv_budget": CEILING, "kv_params": parameters, **call},
        prefill=False,
    )
    opened.queries *= 2.0
    server.prefill(opened)
    return opened


# -- how many


def fewest(mass: list[float], coverage: float) -> int:
    """The fewest numbers that reach this share of all."""
    total, wanted = 0.0, coverage * math.fsum(mass)
    for count, one in enumerate(sorted(mass, reverse=True), start=1):
        total += one
        if total >= wanted:
            return count
    return len(mass)


ROW = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=30).filter(any)
COVERAGE = st.sampled_from([1e-9, 0.25, 0.5, 0.875, 1.0])


@given(st.lists(st.tuples(ROW, st.integers(0, 9), COVERAGE), min_size=1, max_size=5), st.data())
def test_the_fewest_tokens_that_reach_the_coverage(
    asked: list[tuple[list[int], int, float]], data: st.DataObject
) -> None:
    """In any batch; numbers that float32 and float64 have exactly, shared out to two queries."""
    rows, pinned = [row for row, _, _ in asked], [min(n, len(row) - 1) for row, n, _ in asked]
    first = torch.tensor([one / (1 << 21) for row in rows for one in row])
    share = torch.tensor([data.draw(st.sampled_from([0.0, 0.5, 1.0]))])
    attention = torch.stack([first * share, first * (1 - share)])
    coverages = [coverage for _, _, coverage in asked]
    found = needed_tokens(attention, [len(row) for row in rows], pinned, coverages).tolist()
    exact = [
        count + fewest([float(one) for one in row[count:]], coverage)
        for row, count, coverage in zip(rows, pinned, coverages, strict=True)
    ]
    assert found == exact


def received(call: Call, positions: list[int]) -> list[float]:
    """Of each token, from the last queries."""
    total = torch.zeros(len(positions), dtype=torch.float64)
    for query in positions[-WINDOW:]:
        seen = [position for position in positions if position <= query]
        total[: len(seen)] += call.attention(query, seen)
    return total.tolist()


@pytest.mark.parametrize("parameters", [{}, {"protect_prompt": False, "count_prompt": True}])
@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_kept_sets_are_as_large_as_float64_says(
    coverage: float, parameters: dict[str, Any]
) -> None:
    """Of what stood in the row four steps before; what came after is needed."""
    server = SyntheticServer()
    call = covering(server, coverage, kv_policy="rkv", kv_params=parameters)
    counted = PROMPT if parameters else 0
    sizes = set()
    for before in server.compacting(call, 200):
        measured = before[:-AHEAD_TOKENS]
        exact = fewest(received(call, measured)[PROMPT - counted :], coverage) + AHEAD_TOKENS
        kept = len(call.compactions[-1]) - PROMPT + counted
        assert kept == min(CEILING, max(exact, LEAST))
        sizes.add(kept)
    assert len(call.compactions) >= 10 and len(sizes) >= 4


# -- when


@pytest.mark.parametrize("name", EVICTING)
def test_every_policy_follows_its_demand_below_the_ceiling(name: str) -> None:
    """Not more often than every ``interval`` tokens, and the bound of the contract holds."""
    server = SyntheticServer()
    call = covering(server, kv_policy=name)
    at, sizes = [], []
    for _ in range(200):
        fed, done = call.generated, len(call.compactions)
        server.decode(call)
        assert len(call.slots) - PROMPT <= CEILING + INTERVAL + 1
        if len(call.compactions) > done:
            at.append(fed)
            sizes.append(len(call.compactions[-1]) - PROMPT)
    assert at[0] <= LEAST + INTERVAL
    assert {after - before for before, after in pairwise(at)} == {INTERVAL}
    assert LEAST <= min(sizes) and max(sizes) < CEILING and len(set(sizes)) > 4
    summary = server.finish(call)
    assert summary["kv_budget"] == CEILING and summary["kv_tokens"] < CEILING
    server.assert_idle()


def test_the_ceiling_and_a_share_hold_whatever_is_needed() -> None:
    server = SyntheticServer()
    high = covering(server, 0.999, kv_budget=30)
    shared = covering(server, 0.999, kv_params={"fraction": 0.25})
    for _ in range(200):
        server.decode(high, shared)
        assert len(high.slots) - PROMPT <= 30 + INTERVAL + 1
        assert len(shared.slots) - PROMPT <= max(LEAST, shared.generated // 4) + INTERVAL + 1
    assert {len(kept) - PROMPT for kept in high.compactions[2:]} == {30}


def test_nothing_is_evicted_while_everything_is_needed() -> None:
    """It is measured again ``interval`` tokens later."""
    server = SyntheticServer()
    call = covering(server, 0.5)
    call.queries.zero_()  # every token is as good as any other: half of them are needed
    call.state.kv.demand = None
    flat = covering(server, 1 - 1e-9)
    flat.queries.zero_()
    for _ in range(48):
        server.decode(call, flat)
    assert flat.compactions == [] and flat.state.kv.demand is not None
    measured = LEAST + INTERVAL - AHEAD_TOKENS
    assert flat.state.kv.demand.logical_tokens == PROMPT + measured + 2 * INTERVAL
    assert len(call.compactions) >= 2


@pytest.mark.parametrize("name", ["skipkv", "streaming"])
def test_a_coverage_of_everything_changes_nothing(name: str) -> None:
    server = SyntheticServer()
    calls = [served(server, kv_policy=name, kv_params=one) for one in ({}, {"coverage": 1})]
    for _ in range(120):
        server.decode(*calls)
    assert calls[0].compactions == calls[1].compactions != []
    assert calls[1].state.kv.demand is None
    assert bool(calls[1].state.held.track_id) == (name == "skipkv")


# -- the same in any company


def test_requests_are_measured_in_a_batch_as_alone() -> None:
    """Of every policy, with windows, prompts and coverages of their own."""
    servers = [SyntheticServer(rows=len(EVICTING), tracks=len(EVICTING)) for _ in range(2)]
    asked = [
        {
            **{"kv_policy": name, "seed": i, "prompt": [3] * (6 + i)},
            "kv_params": {"coverage": 0.6 + 0.02 * i, "window": 4 + i % 5},
        }
        for i, name in enumerate(EVICTING)
    ]
    together, alone = ([covering(server, **one) for one in asked] for server in servers)
    for _ in range(120):
        servers[0].decode(*together)
    for call in alone:
        servers[1].run(call, 120)
    assert [call.compactions for call in together] == [call.compactions for call in alone]
    assert all(len(call.compactions) >= 6 for call in together)


def test_kernels_measure_what_torch_measures() -> None:
    """Interpreted: the same counts, but where a sum is as near to the share as float32's error."""
    counts = []
    for kernels in (False, True):
        server = SyntheticServer(check_ledger=False)
        calls = [covering(server, seed=seed, kv_policy="rkv") for seed in range(2)]
        server.run(calls[0], 30)
        server.run(calls[1], 44)
        with on_triton() if kernels else nullcontext():
            assert all((server.due(call).cache is not None) == kernels for call in calls)
            server.before_step(StepWork([], [], [call.state for call in calls]), calls)()
        demands = [call.state.kv.demand for call in calls]
        counts.append([one.measured_row_tokens for one in demands if one is not None])
    assert len(counts[0]) == 2
    assert all(abs(one - other) <= 1 for one, other in zip(*counts, strict=True))


@pytest.mark.parametrize("name", ["rkv", "h2o", "streaming"])
def test_a_recomputed_request_is_measured_anew(name: str) -> None:
    server = SyntheticServer()
    call = covering(server, kv_policy=name)
    server.run(call, 70)
    done = len(call.compactions)
    server.retract(call)
    filler = covering(server, seed=9, kv_policy=name)  # dirties the track in between
    server.run(filler, 40)
    server.finish(filler)
    server.prefill(call, chunk=7)
    assert call.state.kv.demand is None
    server.run(call, 1)
    server.compact_due(call)
    ring = server.recorder.queries.read(call.state.held.track_id, call.positions[-1], WINDOW)
    assert torch.equal(ring[0], call.queries[0, call.positions[-1] + 1 - WINDOW :][:WINDOW].flip(0))
    server.run(call, INTERVAL + 1)
    assert len(call.compactions) > done and len(call.slots) - PROMPT < CEILING + INTERVAL


# -- what is refused, and what it costs


def test_the_window_is_recorded_for_every_policy() -> None:
    server = ServerConfig(query_window=8)
    keys = {"kv_budget": 64, "kv_policy": "streaming"}
    with assert_refused("kv_params.window"):
        resolve_request({**keys, "kv_params": {"window": 9, "coverage": 0.5}}, server)
    assert resolve_request({**keys, "kv_params": {"window": 9}}, server) is not None
    assert make_policy("random", coverage=0.5).records_queries
    assert not make_policy("random").records_queries

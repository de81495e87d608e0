"""A compaction of many requests starts hardly more than one of a few, and every request keeps its
own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_on_cpu import on_triton
from launches import decode_to_due, launches
from synthetic import SyntheticServer, served, words


@pytest.mark.parametrize(("name", "per_call"), [("snapkv", 1), ("skipkv+", 0)])
def test_more_due_calls_start_hardly_more(name: str, per_call: int) -> None:
    """One operation per request at the most, and nothing that waits for the device."""
    few, many = launches(name, 2), launches(name, 6)
    assert many.total() - few.total() <= 4 * per_call, many - few
    assert many["_importance_kernel"] == many["_compact_rows_kernel"] == 1, "something was counted"


def test_calls_with_knobs_of_their_own_keep_what_they_keep_alone() -> None:
    """Requests with the same parameters are scored as one; who else is due changes nothing."""
    asked: list[tuple[str, dict[str, Any]]] = [
        *(("skipkv+", {}), ("skipkv", {"tau": 0.1}), ("skipkv", {"sigma": 0.4}), ("skipkv+", {})),
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

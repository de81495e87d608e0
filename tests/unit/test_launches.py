"""A compaction of many requests starts hardly more than one of a few, and every request keeps its
own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_on_cpu import on_triton
from launches import POLICIES, launches
from synthetic import SyntheticServer, decode_until_due, unlike

from sgl_skipkv.policy import policy_class

#: one that reads values, one that reads sentences, one that follows attention; the others are slow
QUICK = ("distinct", "skipkv", "h2o")


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in POLICIES],
)
def test_many_due_requests_start_few_operations(name: str) -> None:
    """At most 60, replay and rewrite included; each kernel as often as for two requests. Rows of
    the benchmark have sixteen."""
    few, many = launches(*[name] * 2), launches(*[name] * 6)
    assert many.total() <= 60, many
    kernels = {one: count for one, count in many.items() if one.endswith("_kernel")}
    assert kernels == {one: count for one, count in few.items() if one.endswith("_kernel")}
    assert many["_select_kernel"] == many["_compact_rows_kernel"] == 1
    follows = policy_class(name).needs_attention
    assert many["_mean_attention_kernel"] == (follows or name in ("tova", "rpc", "vase"))
    assert many["_importance_kernel"] == (name in ("skipkv", "skipkv+", "rkv", "snapkv"))
    assert many["_last_similar_kernel"] == (name in ("skipkv", "skipkv+", "rkv", "gkv"))


def test_policies_share_the_launches_behind_their_scores() -> None:
    """Each policy scores by itself; all requests are selected and rewritten together."""
    counted = launches("skipkv", "rkv", "snapkv")
    assert (counted["_importance_kernel"], counted["_last_similar_kernel"]) == (3, 2)
    assert counted["_select_kernel"] == counted["_compact_rows_kernel"] == 1


#: requests that are due together; rpc's budget grows, so it is due when the others are not
ALIKE = [(name, {}) for name in POLICIES if name != "rpc"]
OWN = [
    ("skipkv", {"tau": 0.1}),
    ("skipkv", {"sigma": 0.4}),
    ("lazy", {"alpha": 0.02}),
    ("gkv", {"window": 3}),
    ("crystal", {"alpha": 0.3}),
    ("vase", {"kernel": 31}),
    ("expected", {"horizon": 7}),
    *((name, {"quotas": True}) for name in ("rkv", "keydiff", "distinct")),
]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param([*ALIKE, *OWN, *ALIKE], id="all", marks=pytest.mark.slow),
        pytest.param([("rpc", {})] * 3, id="rpc"),
    ],
)
def test_a_request_keeps_in_a_batch_what_it_keeps_alone(asked: list[tuple[str, Any]]) -> None:
    """Two servers with the same requests; one plans them together, replay included. Requests with
    the same policy and parameters are scored as one; who else is due changes nothing."""
    size = {"rows": len(asked), "tracks": len(asked), "pool_tokens": 4000}
    servers = [SyntheticServer(check_ledger=False, **size) for _ in range(2)]
    together, alone = (unlike(server, asked, kv_budget=24) for server in servers)
    for server, calls in zip(servers, (together, alone), strict=True):
        decode_until_due(server, calls)
        server.decode(*calls)  # the first compaction, in plain torch
        decode_until_due(server, calls)
    with on_triton():
        plans = servers[0].plans(together)
        for plan, other in zip(plans, map(servers[1].plan, alone), strict=True):
            assert torch.equal(plan.selection.kept, other.selection.kept)
            assert torch.equal(plan.positions, other.positions)
            statistics, others = plan.state.kv.statistics, other.state.kv.statistics
            assert statistics.keys() == others.keys()
            assert all(torch.equal(values, others[one]) for one, values in statistics.items())
    assert all(len(call.compactions) == 1 for call in together)

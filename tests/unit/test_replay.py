"""The replay of decode steps: of many requests at once what it is of one, and one fails alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernels_on_cpu import on_triton
from synthetic import Call, SyntheticServer, served
from torch import Tensor

from sgl_skipkv.eviction.replay import kept_statistics

ASKED: list[tuple[str, dict[str, Any]]] = [
    *(("h2o", {}), ("lazy", {"alpha": 0.02}), ("raas", {"alpha": 0.02}), ("h2o", {})),
    *(("crystal", {"alpha": 0.2}), ("gkv", {}), ("crystal", {"alpha": 0.2}), ("gkv", {})),
    *(("rkv", {"quotas": True}), ("rkv", {"quotas": True})),
]


def opened(steps: int) -> tuple[SyntheticServer, list[Call]]:
    """Requests with prompts of different lengths; each joins when the others are further."""
    server, calls = SyntheticServer(query_window=16, rows=10, tracks=10), list[Call]()
    for seed, (name, parameters) in enumerate(ASKED):
        prompt = [3] * (4 + 11 * seed)
        calls.append(served(server, seed=seed, kv_policy=name, kv_params=parameters, prompt=prompt))
        server.decode(*calls)
    for _ in range(steps):
        server.decode(*calls)
    return server, calls


@pytest.mark.parametrize("way", ["torch", "kernels"])
@pytest.mark.parametrize("steps", [3, 9, pytest.param(33, marks=pytest.mark.slow)])
def test_together_is_alone_to_the_bit(steps: int, way: str) -> None:
    (server, calls), (other, others) = opened(steps), opened(steps)
    with on_triton() if way == "kernels" else nullcontext():
        server.runtime.compactor.follow([server.due(call) for call in calls])
        for call in others:
            other.runtime.compactor.follow([other.due(call)])
    for call, alone in zip(calls, others, strict=True):
        assert call.state.kv.followed_tokens == alone.state.kv.followed_tokens
        assert call.state.kv.followed_tokens == len(call.slots)
        found, expected = call.state.kv.statistics, alone.state.kv.statistics
        assert found.keys() == expected.keys() and found
        for name, values in found.items():
            assert torch.equal(values, expected[name]), (call.state.settings.policy.name, name)
            assert len(values) == len(call.slots)


def test_kernels_replay_what_torch_replays() -> None:
    (server, calls), (other, others) = opened(9), opened(9)
    server.runtime.compactor.follow([server.due(call) for call in calls])
    with on_triton():
        other.runtime.compactor.follow([other.due(call) for call in others])
    for call, on_kernel in zip(calls, others, strict=True):
        for name, values in call.state.kv.statistics.items():
            torch.testing.assert_close(on_kernel.state.kv.statistics[name], values)


def test_a_request_that_cannot_be_replayed_fails_alone() -> None:
    server, calls = opened(9)

    def broken(layer: int) -> Tensor:
        raise RuntimeError("no keys")

    due = [server.due(call) for call in calls]
    due[1] = due[1]._replace(keys=broken)
    server.runtime.compactor.follow(due)
    for i, call in enumerate(calls):
        tracked = call.state.kv.followed_tokens == len(call.slots)
        assert tracked == (call.state.failure is None) == (i != 1)


def test_an_up_to_date_request_is_left_alone() -> None:
    server, calls = opened(9)
    server.runtime.compactor.follow([server.due(call) for call in calls])
    before = [call.state.kv.statistics for call in calls]
    server.runtime.compactor.follow([server.due(call) for call in calls])
    assert all(call.state.kv.statistics is was for call, was in zip(calls, before, strict=True))


def test_what_remains_of_statistics() -> None:
    """Requests with other names and with none among them."""
    a, b = torch.arange(5.0), torch.arange(10.0, 13.0)
    statistics = [{"x": a}, {}, {"x": b}, {"x": b, "y": -b}]
    kept = [torch.tensor(one) for one in ([0, 4], [1], [2], [0, 1])]
    found = kept_statistics(statistics, kept, [5, 3, 3, 3])
    lists = [{name: values.tolist() for name, values in one.items()} for one in found]
    assert lists == [{"x": [0, 4]}, {}, {"x": [12]}, {"x": [10, 11], "y": [-10, -11]}]

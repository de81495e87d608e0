"""Requests that are due in the same step: one plan, one commit, and each as if it were alone.

With the Triton kernels, interpreted, and in plain torch. ``SyntheticServer.decode`` compacts a
request after the other, so what requests share is looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from kernels_on_cpu import on_triton
from synthetic import PROMPT, Call, SyntheticServer, served, words

#: requests of one launch that ask for different things
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rkv", {}),
    ("rkv", {"kernel": 1}),
    ("rkv", {"threshold": -0.1}),
    ("skipkv", {"threshold": 0.9, "kernel": 15}),
)
#: and of policies that replay the attention of decode steps
REPLAYED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("h2o", {}),
    ("raas", {"alpha": 0.02}),
    ("lazy", {"alpha": 0.02}),
    ("tova", {}),
)
SELECTOR: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rpc", {}),
    ("rpc", {}),
    ("rpc", {"kernel": 31}),
)


def step(server: SyntheticServer, calls: Sequence[Call]) -> int:
    """Compact who is due together, as a server does, and decode; how many were due."""
    runtime, due = server.runtime, []
    for call in calls:
        runtime.observe(call.state, len(call.slots))
        if call.decoded >= 1 and runtime.due(call.state, len(call.slots)):
            due.append(call)
    if due:
        server.compact(due)
    server.decode(*calls)
    return len(due)


def lives(
    asked: Sequence[tuple[str, dict[str, Any]]],
    steps: int,
    prompts: Sequence[int],
    broken: int = -1,
) -> tuple[list[Call], int]:
    """What became of requests that began together, and how many compacted in one step."""
    server = SyntheticServer(check_ledger=False)
    calls = [
        served(
            *(server, words(*(2 + (i + j) % 7 for j in range(40)))),
            **{"seed": i, "kv_policy": name, "kv_params": parameters, "prompt": [3] * prompts[i]},
            kv_budget=24,
        )
        for i, (name, parameters) in enumerate(asked)
    ]
    if broken >= 0:
        calls[broken].keys[:, 20:] = float("nan")
    return calls, max(step(server, calls) for _ in range(steps))


@pytest.mark.parametrize("asked", [ASKED, REPLAYED, SELECTOR])
def test_kernels_and_torch_keep_the_same(asked: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Several compactions of each."""
    prompts = [PROMPT + 3 * i for i in range(len(asked))]
    expected, most = lives(asked, 62, prompts)
    with on_triton():
        found, _ = lives(asked, 62, prompts)
    assert most == len(asked)
    assert [call.compactions for call in found] == [call.compactions for call in expected]
    assert all(len(call.compactions) >= 3 for call in found)


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("prompts", [(10, 10, 10), (70, 5, 60)], ids=["alike", "unlike"])
def test_a_broken_call_ends_alone(broken: int, prompts: tuple[int, ...]) -> None:
    """Rows of other lengths are laid side by side with its own."""
    calls, most = lives([("rkv", {})] * 3, 80, prompts, broken)
    assert most == 3
    assert [call.state.failure is not None for call in calls] == [i == broken for i in range(3)]

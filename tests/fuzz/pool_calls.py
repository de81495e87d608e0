"""What tests of single lives share: requests that run, and steps that are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pool_content import POOL
from pool_machine import PARAMETERS, own_draws
from pool_world import World


@pytest.fixture(autouse=True)
def same_draws() -> Iterator[None]:
    with own_draws():
        yield


def turn(world: World, steps: int) -> None:
    for _ in range(steps):
        world.step()
        world.check()


def asks(kv_budget: int, kv_policy: str) -> dict[str, Any]:
    return {"kv_budget": kv_budget, "kv_policy": kv_policy, "kv_params": PARAMETERS}


def long_calls(world: World, *lengths: int) -> list[Any]:
    """Budgeted requests that have generated this much, all running."""
    calls = []
    for i, start in enumerate(sorted(lengths, reverse=True)):
        while calls and len(calls[0].output_ids) < lengths[0] - start:
            world.step()
        calls.append(world.arrive([5, 6, 7, 20 + i], 3 * POOL, **asks(8, "streaming")))
    while len(calls[0].output_ids) < lengths[0]:
        world.step()
    return calls

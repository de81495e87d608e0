"""Admission: a request reserves what it can ever hold, so a pool serves what arithmetic says."""

from __future__ import annotations

from typing import Any

import pytest
from servers import Server
from tiny_models import prompt_ids

from bench.lib.server_log import running_requests

pytestmark = pytest.mark.server

POOL_TOKENS, PROMPT_TOKENS, BUDGET, INTERVAL = 8192, 100, 128, 32


def calls(count: int, tokens: int, **keys: Any) -> list[dict[str, Any]]:
    """Prompts without a common first token, so nothing is shared."""
    prompts = [[3 + i, *prompt_ids(i, PROMPT_TOKENS - 1)] for i in range(count)]
    return [{"input_ids": prompt, "tokens": tokens, **keys} for prompt in prompts]


def peak_running(server: Server, work: list[dict[str, Any]]) -> int:
    """The largest batch that SGLang logs while it serves these requests, sent all at once."""
    server.post("/flush_cache")
    at = len(server.log)
    for answer in server.generate_all(work):
        assert len(answer["output_ids"]) == work[0]["tokens"]
    server.wait_idle()
    return max(running_requests(server.log[at:]))


@pytest.mark.slow
def test_a_pool_runs_as_many_budgeted_calls_as_it_can_hold(server: Server) -> None:
    arithmetic = POOL_TOKENS // (PROMPT_TOKENS + BUDGET + INTERVAL + 1)
    keys = {"kv_budget": BUDGET, "kv_policy": "streaming", "kv_params": {"interval": INTERVAL}}
    at = len(server.log)
    budgeted = peak_running(server, calls(40, 300, **keys))
    assert "Retract" not in server.log[at:]  # reserved in full, so nobody had to give way
    without = peak_running(server, calls(16, 600))
    print(f"peak running: {budgeted} with a budget, {without} without, {arithmetic} by arithmetic")
    assert arithmetic == 31
    assert budgeted >= 0.9 * arithmetic
    assert without < budgeted / 2


def test_freed_slots_are_admitted_into_at_once(server: Server) -> None:
    """A queue of requests that fills the pool drains without a retraction."""
    at = len(server.log)
    keys = {"kv_budget": 32, "kv_policy": "random", "kv_params": {"interval": 16}}
    server.generate_all(calls(44, 200, **keys))
    assert "Retract" not in server.log[at:]

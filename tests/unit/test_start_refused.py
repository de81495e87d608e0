"""Who refuses a start, and whether anybody does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.engine import SchedulerInitResult

from sgl_skipkv.patches.startup import bind, open_gate

pytestmark = pytest.mark.usefixtures("plugin_loaded")


def test_a_scheduler_that_reports_nothing_opens_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests would be accepted with our keys, and run in full."""
    accepted: list[Any] = []
    keep = lambda manager, readiness, limits: accepted.append(readiness)  # noqa: E731
    monkeypatch.setattr(open_gate, "_accept_requests", keep)
    server_args = SimpleNamespace(_skipkv={}, is_embedding=False)
    manager = SimpleNamespace(server_args=server_args, preferred_sampling_params=None)
    ready = {"skipkv": {"reasons": [], "limits": {}}}
    for infos, state in (([ready], "ready"), ([{}], "unavailable"), ([ready, {}], "unavailable")):
        open_gate.open_gate(None, manager, SchedulerInitResult(scheduler_infos=infos))
        assert accepted.pop().state == state
    server_args._skipkv = {"kv_budget": 64}
    with pytest.raises(SystemExit, match="the scheduler did not report its state"):
        open_gate.open_gate(None, manager, SchedulerInitResult(scheduler_infos=[{}]))


def test_a_scheduler_without_a_gate_refuses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would: with gRPC no main process hears of its reasons, those from before its
    pools existed included."""

    def scheduler(**modes: bool) -> Any:
        return SimpleNamespace(
            server_args=SimpleNamespace(_skipkv={"kv_budget": 64}, **modes),
            rust_server=None,
            metrics_reporter=SimpleNamespace(enable_metrics=False),
            req_to_token_pool=SimpleNamespace(),
            skipkv_reasons=["no memory"],
        )

    monkeypatch.setattr(bind.registry, "problems", lambda: ["a hook is missing"])
    monkeypatch.setattr(bind, "reasons_of_ranks", lambda reasons: reasons)
    for mode in ("grpc_mode", "smg_grpc_mode"):
        with pytest.raises(SystemExit, match="refused: a hook is missing; no memory"):
            bind.bind(None, scheduler(**{mode: True}))
    with_gate = scheduler()
    bind.bind(None, with_gate)
    assert with_gate.skipkv.readiness.reasons == ("a hook is missing", "no memory")

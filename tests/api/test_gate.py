"""The gate before the schedulers: what it learns when a server starts, and whose requests it checks
against the server's defaults."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest
from sglang.srt import runtime_context
from sglang.srt.entrypoints.engine import SchedulerInitResult
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.patches import registry
from sgl_skipkv.patches.api import generate, tokenizer
from sgl_skipkv.patches.api.gate import Gate
from sgl_skipkv.patches.readiness import Readiness
from sgl_skipkv.patches.startup.open_gate import open_gate, open_worker


def test_preferred_parameters_of_the_operator() -> None:
    """A request's keys leave others' ``custom_params`` alone; keys among them would go past us."""
    gate = Gate(ServerConfig(), Readiness((), enabled=False))
    theirs = {"temperature": 0.5, "custom_params": {"theirs": 1}}
    manager = SimpleNamespace(skipkv=gate, preferred_sampling_params=theirs)
    manager.model_config = SimpleNamespace(vocab_size=7)
    for params, custom in (
        ({"kv_budget": 64}, {"theirs": 1, "kv_budget": 64}),
        ({"kv_budget": 64, "custom_params": {"own": 2}}, {"own": 2, "kv_budget": 64}),
        ({"kv_budget": 64, "custom_params": None}, {"kv_budget": 64}),
    ):
        call = SimpleNamespace(sampling_params=params)
        tokenizer.move_keys(manager, call, "", [5, 6])
        assert call.sampling_params == {"custom_params": custom}

    started = SchedulerInitResult(scheduler_infos=[{"skipkv": {"reasons": [], "limits": {}}}])
    manager.server_args, manager.enable_metrics = SimpleNamespace(_skipkv={}), False
    open_gate(None, manager, started)
    for wrong in ({"kv_budget": 64}, {"custom_params": {"kv_policy": "rkv"}}):
        manager.preferred_sampling_params = wrong
        with pytest.raises(SystemExit, match="preferred_sampling_params: expected no kv_"):
            open_gate(None, manager, started)
    manager.preferred_sampling_params = {"custom_params": {"kv_bugdet": 64}}
    with pytest.raises(SystemExit, match="kv_bugdet: expected a key of a request"):
        open_gate(None, manager, started)


def test_a_router_speaks_for_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They learn the state that it was told. What they would get wrong ends its start: keys among
    the operator's parameters, and an explorer whose key they would not ask for."""
    serving = SimpleNamespace(preferred_sampling_params={}, admin_api_key="secret")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    monkeypatch.setattr(registry, "problems", list)
    router = object.__new__(MultiTokenizerRouter)
    router.server_args, router.startup_time = SimpleNamespace(_skipkv={}), {"load_weight": 1.0}
    report = {"reasons": ["why"], "limits": {"has_thoughts": True}}
    started = SchedulerInitResult(scheduler_infos=[{"skipkv": report}])
    open_gate(None, router, started)
    worker = SimpleNamespace(server_args=router.server_args, enable_metrics=False)
    open_worker(None, worker, router.startup_time)
    assert worker.skipkv.readiness == Readiness(("why",), enabled=False)
    assert worker.skipkv.limits.has_thoughts and router.startup_time == {"load_weight": 1.0}
    alone = SimpleNamespace()
    open_worker(None, alone, router.startup_time)
    assert not vars(alone)  # a manager without a router hears of the schedulers itself

    report["reasons"] = []
    router.server_args = SimpleNamespace(_skipkv={"explorer": True, "trace": "trace.jsonl"})
    with pytest.raises(SystemExit, match="explorer: expected no --admin-api-key") as ended:
        open_gate(None, router, started)
    assert "secret" not in str(ended.value)
    serving.admin_api_key, serving.preferred_sampling_params = None, {"kv_budget": 64}
    with pytest.raises(SystemExit, match="preferred_sampling_params: expected no kv_budget"):
        open_gate(None, router, started)


@pytest.mark.parametrize("key", ["api_key", "admin_api_key", None])
def test_the_explorer_knows_whether_a_key_is_asked_for(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(registry, "problems", list)
    monkeypatch.setitem(
        sys.modules, "sglang.srt.entrypoints.http_server", SimpleNamespace(app=fastapi.FastAPI())
    )
    monkeypatch.setattr(
        "sgl_skipkv.patches.startup.open_gate.add_explorer",
        lambda app, paths, tokenizer, *, has_key: opened.append(has_key),
    )
    keys = {"api_key": None, "admin_api_key": None, **({} if key is None else {key: "secret"})}
    arguments = SimpleNamespace(_skipkv={"explorer": True, "trace": "t.jsonl"}, dp_size=1, **keys)
    manager = SimpleNamespace(
        server_args=arguments, tokenizer=None, enable_metrics=False, preferred_sampling_params=None
    )
    report = {"reasons": [], "limits": {}}
    open_gate(None, manager, SchedulerInitResult(scheduler_infos=[{"skipkv": report}]))
    assert opened == [key is not None]


def test_whose_ids_are_checked() -> None:
    """Everybody's where eviction was enabled at start, elsewhere those of requests with a key."""
    for settings, keys, checked in (
        ({}, {}, False),
        ({}, {"kv_budget": 64}, True),
        ({"kv_interval": 16}, {}, True),
    ):
        gate = Gate(ServerConfig(**settings), Readiness((), enabled=bool(settings)))
        manager = SimpleNamespace(skipkv=gate, preferred_sampling_params={"min_new_tokens": 1})
        manager.model_config = SimpleNamespace(vocab_size=7)
        for field, ids, stop_ids in (("input_ids", [7], []), ("stop_token_ids", [6], [-1])):
            call = SimpleNamespace(sampling_params={**keys, "stop_token_ids": stop_ids})
            with pytest.raises(ValueError, match=field) if checked else contextlib.nullcontext():
                tokenizer.move_keys(manager, call, "", ids)


@pytest.mark.parametrize(
    ("params", "of_request"),
    [
        ({"beam_width": 2}, {}),
        ({}, {"session_params": {"id": "a"}}),
    ],
)
def test_defaults_are_not_for_every_kind_of_request(params: Any, of_request: Any) -> None:
    """A prompt for which a counted budget has no room is refused to others alone."""
    gate = Gate(ServerConfig(kv_budget=64, count_prompt=True), Readiness((), enabled=True))
    manager = SimpleNamespace(skipkv=gate, preferred_sampling_params=None)
    manager.model_config = SimpleNamespace(vocab_size=7)
    call = SimpleNamespace(sampling_params=params, **of_request)
    tokenizer.move_keys(manager, call, "", [5] * 100)
    assert call.sampling_params == params
    for keys, more in (({}, {}), ({**params, "kv_budget": 60}, of_request)):
        other = SimpleNamespace(sampling_params=keys, **more)
        with pytest.raises(ValueError, match="kv_budget: expected an integer in"):
            tokenizer.move_keys(manager, other, "", [5] * 100)


def test_nor_are_they_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is checked before it is answered."""
    gate = Gate(ServerConfig(kv_budget=64, count_prompt=True), Readiness((), enabled=True))
    manager = SimpleNamespace(skipkv=gate, preferred_sampling_params=None)
    manager.model_config = SimpleNamespace(vocab_size=7)
    monkeypatch.setattr(generate, "_manager", lambda: manager)
    body = {"input_ids": [5] * 100, "stream": True, "sampling_params": {}}
    for more in ({"session_params": {"id": "a"}}, {"sampling_params": {"beam_width": 2}}):
        assert generate.allow_keys(lambda body: None, body | more) is None
    for more in ({}, {"session_params": {"id": "a"}, "sampling_params": {"kv_budget": 60}}):
        refused = generate.allow_keys(lambda body: None, body | more)
        assert refused is not None and "kv_budget: expected an integer in" in refused

"""The version gate, the hooks of each tested version, and where our own version is written."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
from sglang.srt.entrypoints.engine import SchedulerInitResult
from sglang.srt.plugins.hook_registry import HookType

import sgl_skipkv
from sgl_skipkv import cpu, plugin
from sgl_skipkv.patches import registry
from sgl_skipkv.patches.api.metadata import Keys
from sgl_skipkv.patches.hook import Hook, before
from sgl_skipkv.patches.startup import bind, flags, hook_bodies, open_gate

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
UNTESTED = "0.5.99"


def test_our_version_is_written_once() -> None:
    assert "version" not in PROJECT["project"] and "version" in PROJECT["project"]["dynamic"]
    assert metadata.version("sgl-skipkv") == sgl_skipkv.__version__


def test_the_wheel_pins_no_sglang_and_the_extra_brings_the_newest() -> None:
    project = PROJECT["project"]
    heavy = ("sglang", "torch", "triton", "transformers")
    assert not [name for name in project["dependencies"] if name.startswith(heavy)]
    newest = registry.TESTED_SGLANG[-1]
    assert project["optional-dependencies"]["sglang"] == [f"sglang=={newest}"]
    assert f"sglang=={newest}" in (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    for version in registry.TESTED_SGLANG[:-1]:
        assert f"sglang=={version}\n" in (ROOT / ".ci" / f"sglang-{version}.txt").read_text()


def test_each_version_has_its_hooks_and_their_hashes() -> None:
    hashes = json.loads(hook_bodies.FILE.read_text())
    assert set(hashes) == set(registry.TESTED_SGLANG)
    for version in registry.TESTED_SGLANG:
        hooks = registry.of_version(registry.HOOKS, version)
        assert {hook.target for hook in hooks} == hashes[version].keys()
    named = {version for hook in registry.HOOKS for version in hook.versions}
    assert named <= set(registry.TESTED_SGLANG), "a hook of a version that is not tested"
    newest = registry.TESTED_SGLANG[-1]
    assert registry.of_version(registry.HOOKS, UNTESTED) == registry.of_version(
        registry.HOOKS, newest
    )


def test_a_hook_of_one_version() -> None:
    one = before("a.b(self)", "c:d", "why", "0.5.22")
    every = before("a.b(self)", "c:d", "why")
    assert registry.of_version((one, every), "0.5.22") == (one, every)
    assert registry.of_version((one, every), "0.5.23") == (every,)


def test_a_hook_that_does_not_import_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would swallow the error and serve with half of the hooks."""
    registered: list[str] = []
    newest = registry.TESTED_SGLANG[-1]
    always = [hook for hook in registry.of_version(registry.ALWAYS, newest) if hook.hooked]
    broken = always[-1]

    def function_of(hook: Hook) -> Callable[..., None]:
        if hook is broken:
            raise AttributeError("module 'sglang' has no attribute 'Renamed'")
        return print

    monkeypatch.setattr(registry, "check", lambda hook: None)
    monkeypatch.setattr(registry, "function_of", function_of)
    monkeypatch.setattr(registry, "_problems_before", [])
    monkeypatch.setattr(registry.HookRegistry, "register", lambda path, *_: registered.append(path))
    (problem,) = registry.install(newest)
    assert broken.target in problem and "AttributeError" in problem
    assert registered == [hook.path for hook in always[:-1]]


def test_the_gate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Closed for a version that nobody tested; open for the one that the variable names."""
    refused = f"SGLang {UNTESTED} is not a tested version (0.5.22, 0.5.23)"
    monkeypatch.setattr(registry, "check", lambda hook: None)
    monkeypatch.setattr(registry.HookRegistry, "register", lambda *hook: None)
    monkeypatch.setattr(registry, "_problems_before", [])
    assert registry.install(UNTESTED) == registry.problems() == [refused]
    monkeypatch.setenv(registry.GATE_VARIABLE, "0.5.98")
    assert registry.install(UNTESTED) == [refused]
    monkeypatch.delenv(registry.GATE_VARIABLE)
    for name in ("SGLANG_SKIPKV_UNTESTED_SGLANG", registry.GATE_VARIABLE):
        monkeypatch.setenv(name, UNTESTED)
        assert registry.install(UNTESTED) == []
        monkeypatch.delenv(name)
    monkeypatch.setenv(registry.GATE_VARIABLE, UNTESTED)
    monkeypatch.setattr(registry, "check", lambda hook: f"hook {hook.target} not found")
    assert "not found" in registry.install(UNTESTED)[0]  # it opens nothing else

    monkeypatch.setattr(sglang, "__version__", UNTESTED)
    monkeypatch.setattr(open_gate.registry, "problems", list)
    manager = SimpleNamespace(
        server_args=SimpleNamespace(_skipkv={}), preferred_sampling_params={}, enable_metrics=False
    )
    started = SchedulerInitResult(scheduler_infos=[{"skipkv": {"reasons": [], "limits": {}}}])
    with caplog.at_level(logging.WARNING):
        open_gate.open_gate(None, manager, started)
    assert f"{registry.GATE_VARIABLE} names it" in caplog.text and UNTESTED in caplog.text


def test_an_untested_sglang_serves_whatever_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the package: of the scheduler nothing is read. If enabled, it does not start."""
    monkeypatch.setattr(registry, "_problems_before", ["hook a.b not found"])
    scheduler = SimpleNamespace(server_args=SimpleNamespace(_skipkv={}, is_embedding=False))
    bind.bind(None, scheduler)
    assert scheduler.skipkv.readiness.state == "unavailable" and scheduler.skipkv.runtime is None
    manager = SimpleNamespace(server_args=scheduler.server_args, preferred_sampling_params={})
    open_gate.open_gate(None, manager, SimpleNamespace(all_child_pids=[]))
    with pytest.raises(ValueError, match=r"hook a\.b not found"):
        manager.skipkv.check(Keys({"kv_budget": 64}))
    manager.server_args._skipkv = {"kv_budget": 64}
    with pytest.raises(SystemExit, match=r"refused: hook a\.b not found"):
        open_gate.open_gate(None, manager, SimpleNamespace(all_child_pids=[]))


def test_an_untested_sglang_says_so_in_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every rank joins the gather of reasons: another one may have no problem, and waits."""
    monkeypatch.setattr(registry, "_problems_before", ["hook a.b not found"])
    monkeypatch.setattr(bind, "is_first_rank", lambda: True)
    monkeypatch.setattr(bind, "reasons_of_ranks", lambda reasons: [*reasons, "of another rank"])
    exported: list[Any] = []

    class Metrics:
        def __init__(self, labels: Any) -> None:
            exported.append(labels)

        def decided(self, state: str) -> None:
            exported.append(state)

    monkeypatch.setattr(bind, "Metrics", Metrics)
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(_skipkv={}, is_embedding=False),
        metrics_reporter=SimpleNamespace(enable_metrics=True),
        metrics_collector=SimpleNamespace(labels={"model_name": "m"}),
    )
    bind.bind(None, scheduler)
    assert scheduler.skipkv.readiness.reasons == ("hook a.b not found", "of another rank")
    assert exported == [{"model_name": "m"}, "unavailable"]


def test_a_flag_of_sglangs_own_remains_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_problems_before", [])
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-policy", default="theirs")
    flags.add_flags(None, parser)
    given, server_args = parser.parse_args(["--kv-budget", "64"]), SimpleNamespace()
    assert given.kv_policy == "theirs"
    assert registry.problems() == ["--kv-policy is a flag of this SGLang's own"]
    with pytest.raises(SystemExit, match="refused: --kv-policy is a flag of this SGLang's own"):
        flags.read_flags(server_args, object, given)
    flags.read_flags(server_args, object, parser.parse_args([]))
    assert server_args._skipkv == {}


def test_the_platform_asks_nothing_of_an_sglang_that_is_not_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang asks every installed platform, and some have not got what ours is made of."""
    monkeypatch.setitem(sys.modules, "sgl_skipkv.cpu.platform", None)
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert cpu.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "skipkv_cpu")
    with pytest.raises(SystemExit, match=r"not with this SGLang .*docs/versions\.md"):
        cpu.activate()


def test_an_installation_without_its_links_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang swallows every other exception of a plugin, and would serve without budgets."""
    monkeypatch.setitem(sys.modules, "sgl_skipkv.patches", None)
    with pytest.raises(SystemExit, match="sgl_skipkv lacks the link patches"):
        plugin.register()


def test_flags_are_refused_where_hooks_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the scheduler's hook, which refuses as well, is one of these."""
    problems = ["SGLang 0.5.15 is not a tested version (0.5.22, 0.5.23)"]
    monkeypatch.setattr(registry, "_problems_before", problems)
    parser, server_args = argparse.ArgumentParser(), SimpleNamespace()
    flags.add_flags(None, parser)
    with pytest.raises(SystemExit, match=r"refused: SGLang 0\.5\.15 is not a tested"):
        flags.read_flags(server_args, object, parser.parse_args(["--kv-budget", "64"]))
    flags.read_flags(server_args, object, parser.parse_args([]))


def test_a_function_that_another_plugin_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ours was loaded or behind it."""
    newest = registry.TESTED_SGLANG[-1]
    hooked = [one for one in registry.of_version(registry.HOOKS, newest) if one.hooked]
    entries: Any = {
        one.path: [(HookType(one.kind), registry.function_of(one), None)] for one in hooked
    }
    monkeypatch.setattr(registry, "_problems_before", [])
    monkeypatch.setattr(registry.HookRegistry, "_hooks", entries)
    monkeypatch.setattr(registry.HookRegistry, "_patched", set(entries))
    assert registry.problems() == []
    target = next(one for one in hooked if one.kind == "around")
    entries[target.path].append((HookType.REPLACE, print, None))
    assert registry.problems() == [f"hook {target.target} is replaced by another plugin"]


def test_replicas_of_an_older_sglang_report_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_gate.registry, "problems", list)
    started = SchedulerInitResult(scheduler_infos=[{}])
    for keys, refused in (({}, False), ({"kv_budget": 64}, True)):
        manager = SimpleNamespace(
            server_args=SimpleNamespace(_skipkv=keys),
            preferred_sampling_params={},
            enable_metrics=False,
        )
        if refused:
            with pytest.raises(SystemExit, match=r"refused: .*--dp-size needs SGLang 0\.5\.23"):
                open_gate.open_gate(None, manager, started)
        else:
            open_gate.open_gate(None, manager, started)
            assert manager.skipkv.readiness.state == "unavailable"

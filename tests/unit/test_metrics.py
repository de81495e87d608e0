"""What is exported, seen without a server: every label has a bound; where metrics are off, nothing
is."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import yaml
from pool_world import World
from test_bad_input import WRONG
from test_unready import KEYS as KEYS_8

from sgl_skipkv import metrics, policy
from sgl_skipkv.config import METRIC_PREFIX, ServerConfig, SettingError
from sgl_skipkv.metrics import METRICS, REFUSALS, Metrics, Refusals, reason_of
from sgl_skipkv.patches.api.gate import Gate, collect_keys
from sgl_skipkv.patches.readiness import Readiness, State, Unavailable
from sgl_skipkv.request.settings import KEYS
from sgl_skipkv.request.state import RequestState

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "examples" / "monitoring"
SGLANG_LABELS = {"model_name": "m", "tp_rank": 0}


@pytest.fixture
def exported() -> Iterator[Any]:
    """Metrics in this process's registry, and how to read a sample of it; gone afterwards."""
    from prometheus_client import REGISTRY

    own = Metrics(SGLANG_LABELS)

    def value(name: str, **labels: str) -> float | None:
        labels = {"model_name": "m", "tp_rank": "0", **labels}
        return REGISTRY.get_sample_value(METRIC_PREFIX + name, labels)

    yield own, value
    for one in own._exported.values():
        REGISTRY.unregister(one)


def test_every_label_has_a_bound() -> None:
    """All values of all labels, and where they come from."""
    values = {label: {*known} for metric in METRICS for label, known in metric.labels.items()}
    assert values.keys() == {"state", "policy", "outcome", "how", "reason"}
    assert values["policy"] == {*policy.names()}
    assert values["state"] == {*get_args(State)}
    series = [math.prod(map(len, metric.labels.values())) for metric in METRICS]
    assert sum(series) < 400 and len(METRICS) == len({metric.name for metric in METRICS})


def test_the_reasons_of_misses_and_returns_are_those_that_the_code_gives() -> None:
    """Every text that is assigned to ``state.reuse.miss``, and every reason of ``_why_not``."""
    tree = ast.parse((ROOT / "patches" / "engine" / "reuse.py").read_text())
    (why_not,) = (node for node in tree.body if getattr(node, "name", "") == "_why_not")
    values = [node.value for node in ast.walk(why_not) if isinstance(node, ast.Return)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "reuse.miss" in ast.unparse(node.targets[0]):
            values.append(node.value)
    constants = [
        part.value for value in values for part in ast.walk(value) if isinstance(part, ast.Constant)
    ]
    found = {text for text in constants if isinstance(text, str)}
    assert found - {"none"} == {*metrics.MISSES}


@pytest.mark.parametrize(("field", "keys"), WRONG, ids=lambda x: str(x)[:20])
def test_a_wrong_key_has_a_reason(field: str, keys: dict[str, Any]) -> None:
    """Its own name where that is a key; a name that a client made up is none."""
    gate = Gate(ServerConfig(steering_vector="v.safetensors"), Readiness((), enabled=False))
    with pytest.raises(SettingError) as caught:
        gate.check(collect_keys(keys)[1])
    refusal, name = caught.value, field.partition(".")[0]
    for written in (refusal.field, f"metadata.{refusal.field}"):
        refusal.field = written
        assert reason_of(refusal) == (name if name in KEYS else "unknown_key")


def test_other_refusals_have_reasons() -> None:
    unready = Unavailable("kv_budget", 64, Readiness(("page size 16",), enabled=False))
    assert reason_of(unready) == "unavailable"
    for name in ("input_ids", "stop_token_ids"):
        assert reason_of(SettingError(name, "x", 1, "y")) == "token_ids"
    assert reason_of(SettingError("custom_params", "x", 1, "y")) == "custom_params"
    assert {"memory", "error"} < {*REFUSALS}


def test_counters_without_a_policy_begin_at_zero(exported: Any) -> None:
    """A counter that appears with its first event shows no increase."""
    _, value = exported
    assert all(value("refusals_total", reason=reason) == 0 for reason in REFUSALS)
    assert value("returned_requests_total", how="recompute") == 0
    assert value("reused_tokens_total") == value("compaction_seconds_count") == 0
    assert value("compactions_total", policy="rkv") is None


def test_a_label_that_is_not_listed_is_an_error_of_ours(exported: Any) -> None:
    own, _ = exported
    with pytest.raises(AssertionError):
        own.refused("what a client wrote")


def test_compactions_have_seconds(exported: Any) -> None:
    own, value = exported
    with own.compacting():
        pass
    assert value("compaction_seconds_count") == 1 and value("compaction_seconds_sum") > 0


@pytest.mark.usefixtures("plugin_loaded")
def test_what_a_scheduler_refuses_and_ends(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory, for an error when a request opens and when it compacts."""
    own, value = exported
    world = World()
    world.skipkv = world.req_to_token_pool.skipkv = replace(world.skipkv, metrics=own)
    world.runtime.metrics = world.runtime.compactor._metrics = own

    def refused(reason: str) -> float:
        world.arrive([5, 6, 9], 40, **KEYS_8)
        return value("refusals_total", reason=reason)

    for error, reason in ((MemoryError("none"), "memory"), (RuntimeError("planted"), "error")):
        with monkeypatch.context() as patch:
            patch.setattr(world.runtime, "open", raising(error))
            assert refused(reason) == 1
    assert sum(value("refusals_total", reason=one) for one in REFUSALS) == 2

    req = world.arrive([5, 6, 9], 40, **KEYS_8)
    with monkeypatch.context() as patch:
        patch.setattr(world.runtime.compactor.planner, "plan", raising(RuntimeError("planted")))
        while world.owners() or world.waiting_queue:
            world.step()
    assert "error of the plugin" in req.finished_reason.message
    assert value("requests_total", policy="rkv", outcome="error") == 1
    assert value("requests_total", policy="rkv", outcome="abort") == 0
    assert value("compactions_total", policy="rkv") == 0
    assert value("running_requests", policy="rkv") == value("kv_tokens", policy="rkv") == 0
    world.arrive([5, 6, 9], 40, **KEYS_8)
    world.run_dry()
    assert value("requests_total", policy="rkv", outcome="length") == 1
    assert value("compactions_total", policy="rkv") == value("compaction_seconds_count") - 1 > 0


def raising(error: Exception) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raises


def test_nothing_is_exported_or_imported_where_metrics_are_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # cannot be imported
    own, state = Metrics(), cast(RequestState, None)  # nothing of the request is looked at
    own.decided("ready")
    own.opened(state)
    with own.compacting():
        own.compacted(state, 1)
    own.running({})
    assert not own.gauges_due()
    own.returned("restore")
    own.ended(state, "stop")
    for one in (own, Refusals()):
        one.refused("error")
        assert not one.on and vars(one).keys() <= {"on", "_policies", "_gauges_due_s"}


def named(text: str) -> set[str]:
    """Metrics that an expression names."""
    found = re.findall(r"sglang:(?:skipkv_)?\w+", text)
    return {re.sub("_(bucket|sum|count)$", "", name) for name in found}


def test_the_dashboard_shows_every_metric() -> None:
    """And names none of ours that does not exist: a panel would stay empty without a word."""
    dashboard = json.loads((MONITORING / "grafana" / "skipkv.json").read_text())
    panels = dashboard["panels"]
    ids, titles = ([panel[key] for panel in panels] for key in ("id", "title"))
    assert len({*ids}) == len(ids) and len({*titles}) == len(titles)
    shown = named(" ".join(target["expr"] for p in panels for target in p.get("targets", ())))
    ours = {metric.full_name for metric in METRICS}
    assert {name for name in shown if name.startswith(METRIC_PREFIX)} == ours
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


def test_alerts_and_provisioning_name_what_exists() -> None:
    prometheus = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (alerts,) = prometheus["rule_files"]
    text = (MONITORING / alerts).read_text()
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert named(" ".join(rule["expr"] for rule in rules)) <= {one.full_name for one in METRICS}
    fired = yaml.safe_load((ROOT / "tests" / "load" / "alerts_test.yml").read_text())["tests"]
    tried = {test["alertname"] for one in fired for test in one["alert_rule_test"]}
    assert tried == {rule["alert"] for rule in rules}
    for action in (rule["annotations"]["action"] for rule in rules):
        for word in re.findall(r"docs/\S+\.md", action):
            assert (ROOT / word).exists()
    provisioning = MONITORING / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]

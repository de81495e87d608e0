"""What the replicas of ``--dp-size`` report to the main process, and where they write."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins import load_plugins
from sglang.test.test_utils import published_topology

from sgl_skipkv.patches.startup.replicas import report_all, trace_path


def reported(*infos: dict[str, Any]) -> dict[str, Any]:
    lock = threading.Lock()
    controller = SimpleNamespace(_scheduler_init_info_lock=lock, _scheduler_init_infos=infos)
    result: dict[str, Any] = {"theirs": 1}
    report_all(result, controller)
    assert not lock.locked() and result.pop("theirs") == 1
    return result


def test_all_replicas_must_be_ready() -> None:
    ready, refused = {"skipkv": {"reasons": []}}, {"skipkv": {"reasons": ["pool", "layers"]}}
    other = {"skipkv": {"reasons": ["layers", "graphs"]}}
    assert reported(ready, ready) == ready
    assert reported(ready, refused) == refused
    assert reported(refused, other) == {"skipkv": {"reasons": ["pool", "layers", "graphs"]}}


@pytest.mark.parametrize("infos", [[], [{}], [{"skipkv": {"reasons": []}}, {}]])
def test_without_one_report_there_is_none(infos: list[dict[str, Any]]) -> None:
    assert reported(*infos) == {}  # the main process then refuses every key


@pytest.mark.parametrize(
    ("replica", "name", "expected"),
    [
        (None, "a/trace.jsonl", "a/trace.jsonl"),
        (0, "a/trace.jsonl", "a/trace.dp0.jsonl"),
        (1, "/a.b/trace.x.jsonl", "/a.b/trace.x.dp1.jsonl"),
        (12, "trace", "trace.dp12"),
    ],
)
def test_a_replica_has_a_trace_file_of_its_own(
    replica: int | None, name: str, expected: str
) -> None:
    load_plugins()  # the platform that ``device="cpu"`` needs
    topology = {"device": "cpu", "attention_backend": "torch_native"}
    with published_topology(role="scheduler", ranks={"dp_rank": replica}, **topology):
        assert trace_path(name) == expected

"""A compaction never makes the CPU wait: counts come from the CPU, choices stay on the device.

Without a GPU there is nothing to wait for, so two things are looked at: every tensor operation of a
compaction as it runs, and the source of everything that runs there. With one it refuses to wait.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ops import NoHostRead
from kernels_on_cpu import as_one_each, on_triton
from synthetic import SyntheticServer, served
from triton_tools import DEVICES

from sgl_skipkv import policy
from sgl_skipkv.kernels import on_device

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("eviction", "offload", "policy", "recording", "request", "steering")
ENGINE = ("backup", "batch", "forward", "kv_cache", "steering")
DEVICE_PATH = sorted(
    [
        *(ROOT / "kernels").glob("*.py"),
        *(path for room in ROOMS for path in (ROOT / "sgl_skipkv" / room).glob("*.py")),
        *(ROOT / "patches" / "engine" / f"{name}.py" for name in ENGINE),
    ]
)
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "synchronize"}
#: function -> why it may
ALLOWED = {
    ("last_compaction.py", "read"): "of a copy that was started many steps ago",
    ("steerer.py", "nonexecution_sentences"): "for tests; says so",
    ("page_table.py", "check_ledger"): "a debug check; says so",
}


#: the formulas in plain torch, the launches of a GPU server with kernels interpreted, a GPU
WAYS = {"torch": "cpu", "kernels": "cpu", **({"cuda": "cuda"} if "cuda" in DEVICES else {})}


@contextmanager
def nothing_waits(way: str, launched: Counter[str]) -> Iterator[None]:
    """On a GPU the driver says so itself, of kernels and copies as well."""
    with ExitStack() as stack:
        if way == "kernels":
            stack.enter_context(on_triton())
            stack.enter_context(as_one_each(lambda name, again: launched.update([name])))
        if way == "cuda":
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            torch.cuda.set_sync_debug_mode("error")
        stack.enter_context(NoHostRead())
        yield


@pytest.mark.parametrize("name", [name for name in policy.names() if name != "full"])
@pytest.mark.parametrize("way", WAYS)
def test_no_operation_of_a_compaction_reads_the_device(name: str, way: str) -> None:
    device = torch.device(WAYS[way])
    server = SyntheticServer(check_ledger=False, device=device)
    calls = [served(server, seed=seed, kv_policy=name, kv_budget=24) for seed in range(2)]
    compactions, launched = 0, Counter[str]()
    steps, wanted = (52, 4) if way == "kernels" else (102, 8)
    for _ in range(steps):
        server.decode(*calls)
        due = [call for call in calls if server.runtime.due(call.state, len(call.slots))]
        for call in due:
            # What the last compaction kept arrived with its event; here it never left the host.
            server.runtime._read_back(call.state)
            with nothing_waits(way, launched):
                [done] = server.runtime.compact([server.due(call)], server.req_to_token)
            [plan], [freed] = done.plans, done.freed
            kept, evicted = plan.selection.kept.tolist(), plan.selection.evicted.tolist()
            assert freed.tolist() == [call.slots[i] for i in evicted]
            call.slots = [call.slots[i] for i in kept]
            call.positions = [call.positions[i] for i in kept]
            server.free_slots += freed.tolist()
            compactions += 1
    assert compactions >= wanted
    if way == "kernels":
        assert launched["_compact_rows_kernel"] == compactions
        found_by = {"importance": "_importance_kernel", "attention": "_mean_attention_kernel"}
        for score in policy.policy_class(name).kernel_scores & {*found_by}:
            assert launched[found_by[score]] == compactions


def waiting_calls(path: Path) -> list[tuple[str, int]]:
    """(function, line) of every call in the file that waits for a device."""
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if called and node.func.attr in WAITS:  # type: ignore[attr-defined]
            found.append((function, node.lineno))  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), "")
    return found


@pytest.mark.parametrize("path", DEVICE_PATH, ids=lambda path: path.name)
def test_no_source_of_the_device_path_waits(path: Path) -> None:
    waits = [at for at in waiting_calls(path) if (path.name, at[0]) not in ALLOWED]
    assert not waits, f"{path.name}: {waits}"


def copies_without_waiting(path: Path) -> list[int]:
    """Lines of the file that ask a copy not to wait: it does, unless the CPU's side is pinned."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = [(call.lineno, keyword.arg) for call in calls for keyword in call.keywords]
    return [line for line, name in names if name == "non_blocking"]


@pytest.mark.parametrize("path", DEVICE_PATH, ids=lambda path: path.name)
def test_only_who_pins_memory_copies_without_waiting(path: Path) -> None:
    pins = path.name in ("on_device.py", "host_memory.py", "compaction.py")
    assert pins == bool(copies_without_waiting(path)), path.name


def test_what_goes_to_a_device_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    draw = torch.rand(3)
    assert on_device.to_device(draw, torch.device("cpu")) is draw and not pinned
    assert on_device.to_device(draw, torch.device("meta")).device.type == "meta"
    assert on_device.device_tensor([1, 2], torch.device("meta")).dtype is torch.int64
    assert pinned[0] is draw and pinned[1].tolist() == [1, 2]


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    source = tmp_path / "bad.py"
    source.write_text("def f(t):\n    return t.sum().item()\n")
    assert waiting_calls(source) == [("f", 2)]
    source.write_text("def f(t):\n    return t.to('cuda', non_blocking=True)\n")
    assert copies_without_waiting(source) == [2]
    reads: list[Any] = [
        lambda t: bool(t.any()),
        lambda t: t[t > 0],
        lambda t: int(t[0]),
        lambda t: t.repeat_interleave(t.long()),
        torch.unique,
    ]
    for read in reads:
        with pytest.raises(AssertionError, match="waits for the device"), NoHostRead():
            read(torch.ones(3))

"""A compaction never makes the CPU wait: counts come from the CPU, choices stay on the device.

Without a GPU there is nothing to wait for, so two things are looked at: every tensor operation of a
compaction as it runs, and the source of everything that runs there. With one it refuses to wait.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_ops import NoHostRead, NoNumberCopy
from synthetic import SyntheticServer, served
from triton_tools import DEVICES

from sgl_skipkv import policy
from sgl_skipkv.eviction.compactor import StepWork
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.kernels import on_device
from sgl_skipkv.request.parts import Held
from sgl_skipkv.request.trace import TraceWriter
from sgl_skipkv.steering.steerer import Steerer

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("eviction", "offload", "policy", "policy/inputs", "recording", "request", "steering")
ENGINE = ("backup", "batch", "forward", "kv_cache", "linear_states", "speculation", "steering")
ENGINE += ("window_pool",)
DEVICE_PATH = sorted(
    [
        *(ROOT / "kernels").glob("*.py"),
        ROOT / "sgl_skipkv" / "ranks.py",
        *(path for room in ROOMS for path in (ROOT / "sgl_skipkv" / room).glob("*.py")),
        *(ROOT / "patches" / "engine" / f"{name}.py" for name in ENGINE),
    ]
)
WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "synchronize"}
#: function -> why it may
ALLOWED = {
    ("last_compaction.py", "read"): "of a copy that was started many steps ago",
    ("parts.py", "read_similar"): "of a copy that was started with that of what was kept",
    ("demand.py", "measured_row_tokens"): "of a copy that was started four tokens ago",
    ("steerer.py", "nonexecution_sentences"): "for tests; says so",
    ("ledger.py", "check_ledger"): "a debug check; says so",
    ("ledger.py", "check_pages"): "a debug check; says so",
}


@contextmanager
def nothing_waits(device: str) -> Iterator[None]:
    """On a GPU the driver says so itself, of kernels and copies as well."""
    with ExitStack() as stack:
        if device == "cuda":
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            torch.cuda.set_sync_debug_mode("error")
        stack.enter_context(NoHostRead())
        yield


@pytest.mark.parametrize(
    ("name", "traced"),
    [*((name, False) for name in policy.names() if name != "full"), ("skipkv", True)],
)
@pytest.mark.parametrize("device", DEVICES)
def test_no_operation_of_a_compaction_reads_the_device(
    name: str, traced: bool, device: str
) -> None:
    """In plain torch, and on a GPU; launches.py looks the same way at interpreted kernels."""
    trace = TraceWriter(os.devnull) if traced else None
    server = SyntheticServer(check_ledger=False, device=torch.device(device), trace=trace)
    keys = {"kv_policy": name, "kv_budget": 24}
    calls = [
        served(server, seed=seed, **keys, kv_params=params)
        for seed, params in enumerate(({}, {"coverage": 0.9}))
    ]
    compactions = 0
    for _ in range(102):
        for call in calls:
            if call.decoded and call.state.must_measure(len(call.slots)):
                measure = server.before_step(StepWork([], [], [call.state]), [call])
                with nothing_waits(device):
                    measure()
        server.decode(*calls)
        for call in filter(server.is_due, calls):
            # What the last compaction kept arrived with its event; here it never left the host.
            server.read_back([call])
            compact = server.compaction_of([call])
            with nothing_waits(device):
                done = compact()
            compactions += len(server.book(done, [call]))
    assert compactions >= 8


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_comes_and_goes_without_waiting(device: str) -> None:
    """While another one's step runs, whose results would come later."""
    server = SyntheticServer(device=torch.device(device))
    recorder = server.recorder
    recorder.reserve()
    recorder.use_rows(2)
    steerer = Steerer.__new__(Steerer)  # its classes are not asked, and of its vector the device
    steerer._vector = torch.zeros(1, device=device)
    steerer.use_rows(2)
    steerer.steered_requests = 1
    schedule = SimpleNamespace(
        alpha_0=0.5, nonexecution_sentences=3, keyword_seen=True, thinks=True
    )
    with nothing_waits(device), NoNumberCopy():
        recorder.start(1, 1, 4)
        recorder.sentences.open_next(1, 2)
        steerer.start(1, schedule)  # type: ignore[arg-type]
        steerer.stop(0)
        leaving = SimpleNamespace(held=Held(row=0, track_id=1), schedule=schedule)
        runtime = SimpleNamespace(recorder=recorder, steerer=steerer, open_requests=2)
        Runtime._release(runtime, leaving)  # type: ignore[arg-type]
    assert recorder.track_of_row.tolist() == [0, 1]
    assert recorder.sentences.preset[1] == 4 and recorder.sentences.index[1] == 2
    told = {name: table[1].item() for name, table in steerer._tables.items()}
    assert told == {
        "steered": True,
        "alpha_0": 0.5,
        "nonexecution": 3,
        "keyword_seen": True,
        "thinking": True,
    }


def waiting_calls(path: Path) -> list[tuple[str, int]]:
    """(function, line) of every call in the file that waits for a device."""
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if called and node.func.attr in WAITS:
            found.append((function, node.lineno))
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
    with pytest.raises(AssertionError, match="a number becomes a tensor"), NoNumberCopy():
        torch.ones(3)[1] = 2

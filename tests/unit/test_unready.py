"""Requests that are right, to a server that cannot evict yet, or has no memory for it: 503."""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
import torch
from kernels_on_cpu import on_triton
from pool_calls import asks
from pool_machine import PARAMETERS
from pool_world import World
from triton.runtime.interpreter import InterpretedFunction
from triton_tools import triton_type

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.patches.engine.kernel_compilation import with_index
from sgl_skipkv.patches.startup import bind

KEYS = {"kv_budget": 8, "kv_policy": "rkv", "kv_params": PARAMETERS}
SECONDS = 60  # far more than anything here takes


pytestmark = pytest.mark.usefixtures("plugin_loaded")


class HeldCompilation:
    """Compiles nothing, and not before it is released."""

    def __init__(self, error: Exception | None = None) -> None:
        self._released = threading.Event()
        self._error = error

    def __call__(self) -> None:
        assert self._released.wait(SECONDS)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._released.set()
        for thread in compiling():
            thread.join(SECONDS)
        assert not compiling()


def compiling() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "skipkv-compile"]


def assert_refused(req: Any, *reasons: str) -> None:
    end = req.to_finish
    assert (end.status_code, end.err_type) == (
        HTTPStatus.SERVICE_UNAVAILABLE,
        "ServiceUnavailableError",
    )
    assert end.message.startswith("kv_budget: ") and all(text in end.message for text in reasons)
    assert not hasattr(req, "skipkv")


def assert_served(world: World, *requests: Any) -> None:
    world.run_dry()
    for req in requests:
        assert req in world.finished and len(req.output_ids) == 40, "to its end"


def test_who_evicts_is_refused_while_a_thread_compiles(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    with closing(HeldCompilation()) as held:
        world.skipkv.compilation.start(held)
        plain, full = world.arrive([5, 6, 7], 40), world.arrive([5, 6, 8], 40, kv_policy="full")
        refused = world.arrive([5, 6, 9], 40, **KEYS)
        assert_refused(refused, "compiling kernels", "not enabled at start", "retry in a moment")
        wrong = world.arrive([5, 6, 9], 40, kv_budget=-1)
        assert wrong.to_finish.status_code == HTTPStatus.BAD_REQUEST, "what is wrong stays wrong"
        assert_served(world, plain, full)
        assert compiling() and hasattr(full, "skipkv") and not hasattr(wrong, "skipkv")
    budgeted = world.arrive([5, 6, 9], 40, **KEYS)
    assert_served(world, budgeted)
    assert budgeted.skipkv.report.summary["compactions"] > 2
    world.drain()
    own = [record.message for record in caplog.records if "skipkv" in record.name]
    first, last = (message for message in own if "compil" in message)
    assert "kv_budget requests get 503" in first and "kernels compiled in" in last


def test_kernels_that_do_not_compile(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the traceback, every request that evicts the reason, nobody else notices."""
    world, held = World(), HeldCompilation(TypeError("planted"))
    world.skipkv.compilation.start(held)
    held.close()
    plain = world.arrive([5, 6, 7], 40)
    for _ in range(2):
        refused = world.arrive([5, 6, 9], 40, **KEYS)
        assert_refused(refused, "this server's kernels were not compiled", "TypeError", "log")
        assert "retry" not in refused.to_finish.message
    assert_served(world, plain)
    (record,) = (record for record in caplog.records if record.exc_info is not None)
    assert "planted" in caplog.text and "compiling kernels" in record.message


def test_a_fault_of_the_device_while_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the thread as it came, and no request with a budget begins on that device."""
    faults: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    world, held = World(), HeldCompilation(torch.AcceleratorError("CUDA error: planted"))
    world.skipkv.compilation.start(held)
    held.close()
    assert [fault.exc_type for fault in faults] == [torch.AcceleratorError]
    assert_refused(world.arrive([5, 6, 9], 40, **KEYS), "a device error")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("head_dim", [16, 4])
def test_when_a_server_with_kernels_compiles(
    enabled: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is ready where it was configured, else in a thread, in scratch memory. No kernel
    reads heads of 4: their scores are plain torch, and all else is compiled the same."""
    launched: list[tuple[Any, bool]] = []
    warm_up = bind.warm_up

    def spied(recorder: Any, cache: Any, windows: Any, steerer: Any, **sizes: Any) -> None:
        assert (cache is None) == (head_dim == 4)
        beside = threading.current_thread().name == "skipkv-compile"
        if beside:
            held()
        warm_up(recorder, cache, {4}, steerer, **sizes)
        launched.append((recorder, beside))

    monkeypatch.setattr(bind, "warm_up", spied)
    monkeypatch.setattr(bind, "uses_triton", lambda device: True)
    with on_triton(), closing(HeldCompilation()) as held:
        world = World(head_dim=head_dim, check_ledger=False)
        config = world.runtime.config if enabled else ServerConfig()
        assert config.enabled == enabled
        world.skipkv = world.req_to_token_pool.skipkv = replace(world.skipkv, config=config)
        bind._warm_up(world.skipkv, world.runtime)
        if enabled:
            assert launched == [(world.recorder, False)] and not compiling()
        else:
            assert not launched and len(compiling()) == 1
            assert_refused(world.arrive([5, 6, 9], 40, **KEYS), "compiling kernels")
        held.close()
        ((recorder, beside),) = launched
        assert (recorder is world.recorder, beside) == (enabled, not enabled)
        assert ("queries" in vars(world.recorder)) == enabled
        assert world.skipkv.compilation.refusal is None


def test_kernels_are_compiled_on_the_gpu_of_their_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a replica that is not the first: a new thread's device would be GPU 0."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert with_index(torch.device("cuda")) == torch.device("cuda:1")
    assert with_index(torch.device("cpu")) == torch.device("cpu")


def test_a_server_in_pages_compiles_the_move_before_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, launched = InterpretedFunction.run, set[Any]()

    def spied(self: Any, *arguments: Any, **options: Any) -> Any:
        name = self.fn.__name__
        if name in ("_move_kv_kernel", "_compact_rows_kernel"):
            kept = {one: value for one, value in options.items() if one != "grid"}
            launched.add((name, *map(triton_type, arguments), *map(str, kept.items())))
        return run(self, *arguments, **options)

    with on_triton():
        monkeypatch.setattr(InterpretedFunction, "run", spied)
        world = World(head_dim=16, check_ledger=False, page_tokens=4)
        monkeypatch.setattr(bind, "uses_triton", lambda device: True)
        bind._warm_up(world.skipkv, world.runtime)
        warm = set(launched)
        call = world.arrive([5, 6, 7], 40, **KEYS)
        while not call.finished():
            world.step()
        assert call.skipkv.report.compactions
    assert {name for name, *_ in warm} == {"_move_kv_kernel", "_compact_rows_kernel"}
    assert launched == warm


def test_a_server_without_kernels_compiles_nothing() -> None:
    world = World()
    world.skipkv = world.req_to_token_pool.skipkv = replace(world.skipkv, config=ServerConfig())
    bind._warm_up(world.skipkv, world.runtime)
    assert not compiling()
    assert world.skipkv.compilation.refusal is None


def test_no_host_memory_for_copies() -> None:
    """Of a size that no host has. Requests that do not evict never take it."""
    world = World(backup_bytes=1 << 60)
    plain, full = world.arrive([5, 6, 7], 40), world.arrive([5, 6, 8], 40, kv_policy="full")
    for _ in range(2):
        refused = world.arrive([5, 6, 9], 40, **KEYS)
        assert_refused(refused, "lower retraction_backup_bytes", f"{1 << 60} bytes of host memory")
    assert_served(world, plain, full)
    world.drain()


def test_no_host_memory_for_recordings_of_histories() -> None:
    """Refused at once: at its end an error would be of the scheduler."""
    world = World(reuse_bytes=1 << 60)
    plain = world.arrive([5, 6, 7], 40, **KEYS)
    untracked = world.arrive([5, 6, 8], 40, **{**asks(8, "streaming"), "kv_reuse": "budget"})
    refused = world.arrive([5, 6, 9], 40, **KEYS, kv_reuse="budget")
    assert_refused(refused, "kv_reuse_bytes", f"{1 << 60} bytes of host memory")
    world.run_dry()
    assert [len(call.output_ids) for call in (plain, untracked)] == [40, 40]

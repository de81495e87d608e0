"""What a server needs before it can evict: compiled kernels, and host memory (without it: 503)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest
from kernels_on_cpu import on_triton
from pool_calls import asks
from pool_machine import PARAMETERS
from pool_windows import WindowWorld, window_flags
from pool_world import World
from triton.runtime.interpreter import InterpretedFunction
from triton_tools import variant

from sgl_skipkv.kernels.kv_move import _move_kv_kernel
from sgl_skipkv.kernels.row_compaction import _compact_rows_kernel
from sgl_skipkv.patches.startup import bind

IN_PAGES = {one.fn.__name__: one for one in (_move_kv_kernel, _compact_rows_kernel)}
KEYS = {"kv_budget": 8, "kv_policy": "rkv", "kv_params": PARAMETERS}

pytestmark = pytest.mark.usefixtures("plugin_loaded")


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


@pytest.mark.parametrize("head_dim", [16, 4])
def test_a_server_with_kernels_compiles_them_before_it_is_ready(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel reads heads of 4: their scores are plain torch, and all else is compiled the
    same."""
    launched: list[Any] = []
    warm_up = bind.warm_up

    def spied(recorder: Any, cache: Any, windows: Any, steerer: Any, **sizes: Any) -> None:
        assert (cache is None) == (head_dim == 4)
        warm_up(recorder, cache, {4}, steerer, **sizes)
        launched.append(recorder)

    monkeypatch.setattr(bind, "warm_up", spied)
    with on_triton():
        world = World(head_dim=head_dim, check_ledger=False)
        bind._warm_up(world.skipkv, world.runtime)
        assert not launched, "no kernels on this device"
        monkeypatch.setattr(bind, "uses_triton", lambda device: True)
        bind._warm_up(world.skipkv, world.runtime)
    assert launched == [world.recorder]


@pytest.mark.parametrize("window_tokens", [None, 5, 8])
def test_a_server_in_pages_compiles_the_move_before_it_is_ready(
    window_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of windows in a pool of their own, whose table has another width."""
    run, launched = InterpretedFunction.run, set[Any]()

    def spied(self: Any, *arguments: Any, **options: Any) -> Any:
        if (function := IN_PAGES.get(self.fn.__name__)) is not None:
            launched.add(variant(function, arguments, options))
        return run(self, *arguments, **options)

    sizes: dict[str, Any] = {"head_dim": 16, "check_ledger": False, "page_tokens": 4}
    with on_triton(), window_flags():
        monkeypatch.setattr(InterpretedFunction, "run", spied)
        if window_tokens is None:
            world = World(**sizes)
        else:
            world = WindowWorld(**sizes, window_tokens=window_tokens)
        monkeypatch.setattr(bind, "uses_triton", lambda device: True)
        bind._warm_up(world.skipkv, world.runtime)
        warm = set(launched)
        call = world.arrive([5, 6, 7], 40, **{**KEYS, "kv_budget": 8 + (window_tokens or 0)})
        while not call.finished():
            world.step()
        assert call.skipkv.report.compactions
    assert {name for name, *_ in warm} == {*IN_PAGES}
    assert launched == warm


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

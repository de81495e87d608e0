"""Lives of a decode server written out (PD disaggregation); ``fuzz.py --decode``: random ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from planted_bugs import plant
from pool_calls import asks, same_draws, turn
from pool_content import POOL
from pool_decode import DecodeWorld, decode_flags

from sgl_skipkv.patches.engine import pd_admission

pytestmark = pytest.mark.usefixtures("plugin_loaded", "decode_server")
fixtures = (same_draws,)  # for every test


@pytest.fixture(params=[True, False], ids=["radix", "no radix"])
def radix(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def decode_server(radix: bool) -> Iterator[None]:
    with decode_flags(radix=radix):
        yield


def running(world: DecodeWorld, *asked: dict[str, Any], tokens: int = 20) -> list[Any]:
    """Requests that have all generated so much."""
    calls = [world.arrive([5, 6, 7, 20 + i], 200, **keys) for i, keys in enumerate(asked)]
    while min(len(call.output_ids) for call in calls) < tokens:
        turn(world, 1)
    return calls


def retract(world: DecodeWorld) -> Any:
    """One request, as in SGLang's own test mode."""
    world.retract_now = True
    turn(world, 1)
    (waiting,) = world.disagg_decode_prealloc_queue.retracted_queue
    return waiting


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("policy", ["rkv", "h2o", "streaming"])
def test_a_row_comes_back(radix: bool, page_tokens: int, policy: str) -> None:
    """Every few steps: the tokens are those of a request that nobody retracts."""
    outputs = []
    for retractions in (0, 8):
        page = page_tokens if retractions else 1
        world = DecodeWorld(radix=radix, late=True, backup_bytes=1 << 20, page_tokens=page)
        running(world, asks(8, "streaming"))  # SGLang retracts the shorter output
        call = world.arrive([5, 6, 7, 30], 100, **asks(8, policy))
        while not call.finished():
            again = call in world.running_batch.reqs and call.retraction_count < retractions
            world.retract_now = again and len(call.output_ids) % 5 == 0
            turn(world, 1)
        assert call.retraction_count == world.count["restored"] == retractions
        outputs.append([*call.output_ids])
        world.drain()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_nothing_is_overbooked(radix: bool, page_tokens: int) -> None:
    """Texts of twice the pool: nobody is retracted, some run together, all finish."""
    world = DecodeWorld(radix=radix, network=1, page_tokens=page_tokens)
    for i in range(7):
        world.arrive([5, 6, 7, 20 + i], 2 * POOL, **asks(8 + i, "streaming"))
    together = 0
    while not world.is_idle():
        turn(world, 1)
        together = max(together, len(world.running_batch.reqs))
    assert together > 1 and not world.count["retractions"]
    assert {len(call.output_ids) for call in world.finished} == {2 * POOL}
    world.drain()


def test_too_little_is_reserved_for_rows_that_arrive(
    radix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proof that the test above looks at something."""
    plant(monkeypatch, pd_admission.reserve_growth, "growth_tokens(state, req)", "0")
    plant(monkeypatch, pd_admission.needed_by_arrival, "future_tokens(state, req)", "0")
    with pytest.raises(AssertionError, match="what rows may grow is reserved"):
        test_nothing_is_overbooked(radix, 1)


def test_requests_wait_for_a_track(radix: bool) -> None:
    """Two are lent; who needs none passes."""
    world = DecodeWorld(radix=radix, running=4)
    first = running(world, asks(8, "rkv"), asks(8, "rkv"), tokens=5)
    third = world.arrive([5, 6, 8], 20, **asks(8, "rkv"))
    fourth = world.arrive([5, 6, 9], 20, **asks(8, "streaming"))
    turn(world, 6)
    assert world.waiting_queue == [third] and third.kv.holds_kv and len(fourth.output_ids) > 1
    world.abort(first[0])
    world.run_dry()
    assert len(third.output_ids) == 20
    world.drain()


@pytest.mark.parametrize("backup_bytes", [0, 1 << 20])
def test_who_cannot_be_restored_ends(radix: bool, backup_bytes: int) -> None:
    """With a reason, and with a summary."""
    world = DecodeWorld(radix=radix, backup_bytes=backup_bytes)
    calls = running(world, asks(8, "streaming"), asks(8, "rkv"))
    world.retract_now = True
    turn(world, 1)
    ended = [call for call in calls if world.ends[call.rid]]
    assert len(ended) == (backup_bytes == 0)
    world.drain()


@pytest.mark.parametrize("keys", [asks(8, "streaming"), {"steering": 1.5}, {}])
def test_a_pause_ends_who_cannot_be_computed_again(radix: bool, keys: dict[str, Any]) -> None:
    """Wherever it is: it runs, it waits for its first step, or it has been retracted."""
    world = DecodeWorld(radix=radix, backup_bytes=1 << 20, running=2)
    calls = running(world, keys, keys)
    calls.append(world.arrive([5, 6, 8], 20, **keys))
    turn(world, 4)
    assert world.waiting_queue == [calls[2]] and calls[2].kv.holds_kv
    world.retract_now = True
    turn(world, 1)
    world.pause()
    world.check()
    assert [world.ends[call.rid] for call in calls if "kv_budget" in keys] in ([], [1, 1, 1])
    world.resume()
    world.run_dry()
    if not keys:
        assert len(world.finished) == 3
    world.drain()


@pytest.mark.parametrize("keys", [asks(8, "rkv"), {}])
def test_who_waits_is_aborted(radix: bool, keys: dict[str, Any]) -> None:
    """In each of SGLang's queues. All rows, tracks and host memory come back (``drain``)."""
    world = DecodeWorld(radix=radix, backup_bytes=1 << 20, running=2)
    running(world, keys, keys)
    queues = {
        "transfer": lambda: [one.req for one in world.disagg_decode_transfer_queue.queue],
        "waiting": lambda: world.waiting_queue,
        "prealloc": lambda: [one.req for one in world.disagg_decode_prealloc_queue.queue],
    }
    for name, queue in queues.items():
        call = world.arrive([5, 6, 8], 20, **keys)
        for _ in range({"prealloc": 0, "transfer": 1, "waiting": 3}[name]):
            turn(world, 1)
        assert call in queue(), name
        world.abort(call)
        turn(world, 2)
        assert world.ends[call.rid] == 1
    waiting = retract(world)
    world.abort(waiting)
    world.check()
    assert world.ends[waiting.rid] == 1 and not world.runtime.host_memory.used_bytes
    world.drain()


def test_the_first_token_is_the_prefill_servers(radix: bool) -> None:
    """And may be the only one."""
    world = DecodeWorld(radix=radix)
    call = world.arrive([5, 6, 7], 1, **asks(8, "rkv"))
    world.run_dry()
    assert len(call.output_ids) == 1 and not world.count["decode steps"]
    assert call.skipkv.report.summary["full_kv_tokens"] == 0
    world.drain()


def test_what_a_decode_server_refuses(radix: bool) -> None:
    """It is told so at once, and never waits."""
    world = DecodeWorld(radix=radix)
    asked = asks(8, "rkv")
    asked["kv_params"] = {**asked["kv_params"], "protect_prompt": False}
    for keys in (asked, {**asks(8, "rkv"), "kv_reuse": "keep"}):
        call = world.arrive([5, 6, 7], 10, **keys)
        assert world.ends[call.rid] == 1 and not world.waiting()
    world.drain()


def test_a_network_that_fails(radix: bool) -> None:
    world = DecodeWorld(radix=radix)
    calls = [world.arrive([5, 6, 7 + i], 10, **asks(8, "rkv")) for i in range(3)]
    queue = world.disagg_decode_prealloc_queue.queue
    for one, failing in zip(queue, ["handshake", "transfer", ""], strict=True):
        one.kv_receiver.failing = failing
    world.run_dry()
    assert [len(call.output_ids) for call in calls] == [0, 0, 10]
    world.drain()


def test_who_was_retracted_is_aborted_where_sglang_keeps_nothing(radix: bool) -> None:
    """``--disaggregation-decode-retraction-backup none``: only our requests wait there."""
    with decode_flags(radix=radix, sglang_backup="none"):
        world = DecodeWorld(radix=radix, backup_bytes=1 << 20)
        running(world, asks(8, "streaming"), asks(8, "streaming"))
        waiting = retract(world)
        world.abort(waiting)
        assert world.ends[waiting.rid] == 1 and not world.runtime.host_memory.used_bytes
        world.drain()


# -- found by random lives


def test_a_token_is_recorded_once(radix: bool) -> None:
    """A step is in flight when a request is retracted: it has recorded the newest token, whose
    result is dropped. The first decode step after the restore records it again."""
    world = DecodeWorld(radix=radix, backup_bytes=1 << 20, overlap=True)
    running(world, asks(30, "skipkv"), asks(30, "skipkv"))
    waiting = retract(world)
    assert retract(world) is waiting  # again, before its first step
    turn(world, 3)
    assert waiting in world.running_batch.reqs and waiting.retraction_count == 2
    turn(world, 2)


def test_who_ends_before_its_row_is_closed(radix: bool) -> None:
    world = DecodeWorld(radix=radix)
    call = world.arrive([5, 6, 7], 10, **asks(8, "rkv"))
    world.abort(call)
    turn(world, 2)
    assert world.ends[call.rid] == 1
    assert world.closes[call.rid] == 1


def test_who_ends_while_its_prompt_arrives_gets_a_summary(radix: bool) -> None:
    world = DecodeWorld(radix=radix)
    call = world.arrive([5, 6, 7], 10, **asks(8, "rkv"))
    turn(world, 1)
    world.abort(call)
    turn(world, 2)
    assert world.ends[call.rid] == world.closes[call.rid] == 1

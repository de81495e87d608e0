"""Requests that cannot be served, errors of the plugin, and waits, on SGLang's pools and tree."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool_calls import asks, long_calls, same_draws, turn
from pool_content import POOL
from pool_machine import PARAMETERS
from pool_world import World
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sgl_skipkv import error_boundary
from sgl_skipkv.eviction.ledger import LedgerError
from sgl_skipkv.offload.host_memory import HostCopies
from sgl_skipkv.patches.engine import scheduler
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.policy.rkv import RKV

pytestmark = pytest.mark.usefixtures("plugin_loaded")
fixtures = (same_draws,)  # for every test


def test_a_refusal_is_not_replaced_by_another() -> None:
    """SGLang goes on to check what else a refused request asks for, against a prompt of one."""
    world = World()
    refused = world.arrive([5, 6, 7, 20], 10, kv_budget=0)
    assert refused.to_finish.message.startswith("kv_budget: ")
    assert world.received.logprob_start_len == -1
    served = world.arrive([5, 6, 7, 20], 10, kv_budget=64)
    assert served.to_finish is None and world.received.logprob_start_len == 5
    params = SimpleNamespace(json_schema=None, regex="a", ebnf=None, structural_tag=None)
    received = SimpleNamespace(sampling_params=params, mm_inputs=[3], return_routed_experts=True)
    asked = SimpleNamespace(return_sampling_mask=True)
    scheduler._skip_what_follows(asked, received)
    assert not any((received.return_logprob, received.mm_inputs, received.return_routed_experts))
    assert not asked.return_sampling_mask and params.regex is None


def test_the_defaults_are_not_for_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rid = World(), f"{HEALTH_CHECK_RID_PREFIX}_1"
    defaults = world.skipkv.config.model_copy(update={"kv_budget": 64, "kv_policy": "streaming"})
    monkeypatch.setattr(world, "skipkv", replace(world.skipkv, config=defaults))
    assert not hasattr(world.arrive([5], 1, rid=rid), "skipkv")
    for others in ({"rid": "another"}, {"rid": rid, **asks(64, "streaming")}):
        assert world.arrive([5], 1, **others).skipkv.settings.kv_budget == 64


@pytest.mark.parametrize("overlap", [True, False])
def test_who_cannot_come_back_ends_with_an_answer(overlap: bool) -> None:
    """Both traces are longer than the pool: one has to go, and must not wait for ever."""
    world = World(overlap=overlap)
    calls = long_calls(world, POOL + 20, POOL + 10)
    world.retract_now = True
    turn(world, 3)
    (refused,) = world.aborted
    assert refused in calls and not world.waiting_queue
    assert refused.skipkv.report.summary["compactions"] > 0 and world.runtime.open_requests == 1
    world.drain()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_call_that_cannot_be_served_ends_alone(overlap: bool) -> None:
    """With 500 and the reason; its track and KV come back, its neighbour never notices."""
    world = World(overlap=overlap)
    failing, sound = (
        world.arrive([5, 6, 7, 20 + i], 60, ignore_eos=True, **asks(8, "rkv")) for i in range(2)
    )
    while len(failing.output_ids) < 20:
        world.step()
    failing.skipkv.failure = "a score was not finite"
    before = len(failing.output_ids)
    while world.owners():
        world.step()
    assert len(sound.output_ids) == 60 and sound.finished_reason.to_json()["type"] == "length"
    ended = failing.finished_reason.to_json()
    assert (ended["type"], ended["status_code"]) == ("abort", HTTPStatus.INTERNAL_SERVER_ERROR)
    assert ended["message"].startswith(f"kv_budget request {failing.rid}: a score was not finite")
    assert before <= len(failing.output_ids) <= before + 3
    done = [one.skipkv.report.summary["compactions"] for one in (failing, sound)]
    assert done[0] == 1 and done[1] > 4


def test_an_error_of_ours_ends_the_call_that_it_concerns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests are due in the same step and planned together; one of them cannot be scored."""
    right, outputs = RKV.scores, []

    def wrong(policy: RKV, inputs: ScoreInput) -> Any:
        return right(policy, inputs) if inputs.prompt_tokens == 4 else [][inputs.prompt_tokens]

    for scores in (right, wrong):
        monkeypatch.setattr(RKV, "scores", scores)
        world = World()
        failing, sound = (world.arrive([5, 6, 7, 20, 21][:n], 60, **asks(8, "rkv")) for n in (5, 4))
        while world.owners() or world.waiting_queue:
            world.step()
        outputs.append(list(sound.output_ids))
    ended = failing.finished_reason.to_json()
    assert (ended["type"], ended["status_code"]) == ("abort", HTTPStatus.INTERNAL_SERVER_ERROR)
    assert "an error of the plugin, IndexError" in ended["message"]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 60
    done = [one.skipkv.report.summary["compactions"] for one in (failing, sound)]
    assert done[0] == 0 and done[1] > 4
    world.drain()


@pytest.mark.parametrize("tokens", [20, 60])
def test_scores_that_are_not_finite_end_the_call(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """With 500, a few tokens later, or at its end if that comes first."""
    right = RKV.scores
    monkeypatch.setattr(RKV, "scores", lambda *of: right(*of) * float("nan"))
    world = World()
    req = world.arrive([5, 6, 7, 20], tokens, **asks(8, "rkv"))
    while world.owners() or world.waiting_queue:
        world.step()
    ended = req.finished_reason.to_json()
    assert (ended["type"], ended["status_code"]) == ("abort", HTTPStatus.INTERNAL_SERVER_ERROR)
    assert "a score was not finite" in ended["message"]
    assert req.skipkv.report.summary["compactions"] == 1 and len(req.output_ids) <= 24
    world.drain()


@pytest.mark.parametrize("size", [44, 3])
def test_a_prompt_that_sglang_changes(size: int) -> None:
    """It expands images, and may cut prompts, after a request was opened."""
    world = World()
    prompt = [5, 6, 7, 20]
    changed = [5, *([9] * (size - 3)), 7, 20]
    req = world.arrive(prompt, 40, becomes=changed, **asks(8, "rkv"))
    while world.owners() or world.waiting_queue:
        world.step()
        if req.skipkv.kv.last is not None:
            assert req.skipkv.kv.last.read()[0][:size] == list(range(size))
    summary = req.skipkv.report.summary
    assert len(req.output_ids) == 40 and summary["compactions"] > 1
    assert summary["peak_kv_tokens"] <= 8 + PARAMETERS["interval"] + 1
    world.drain()


def test_a_prompt_that_no_longer_fits_its_budget() -> None:
    world = World()
    counted = {**PARAMETERS, "count_prompt": True}
    keys = {**asks(20, "rkv"), "kv_params": counted}
    req = world.arrive([5, 6, 7, 20], 40, becomes=[5] * 44, **keys)
    assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
    assert "count_prompt counts 44 prompt tokens" in req.to_finish.message


def test_a_call_that_cannot_be_opened_ends_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(type(world.runtime), "open", lambda *_: {}["planted"])
    req = world.arrive([5, 6, 7], 10, kv_budget=80, kv_policy="streaming")
    assert req.to_finish.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert "an error of the plugin, KeyError" in req.to_finish.message


def test_proof_of_corruption_stops_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that a row names twice: nothing that this process serves can be trusted."""
    world = World()
    req = world.arrive([5, 6, 7], 60, kv_budget=8, kv_policy="streaming", kv_params=PARAMETERS)
    while len(req.output_ids) < 12:
        world.step()
    row = world.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    row[5] = row[6]
    with pytest.raises(LedgerError, match="the same slot twice"):
        for _ in range(20):
            world.step()


def test_a_step_that_waits_for_memory_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang finds too little, and lets a request that is about to finish end first. Found by
    fuzzing (seed 102501)."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    world = World(overlap=True)
    call = world.arrive([5, 6, 7, 20], 60, ignore_eos=True, **asks(8, "rkv"))
    ending = world.arrive([5, 6, 7, 21], 25, ignore_eos=True)
    look = ScheduleBatch.check_decode_mem

    def scarce(batch: Any, selected_indices: Any = None) -> bool:
        enough = look(batch, selected_indices)
        last = ending not in batch.reqs and ending.next_output_finishes_by_length()
        return enough and not (last and selected_indices is None)

    monkeypatch.setattr(ScheduleBatch, "check_decode_mem", scarce)
    world.run_dry()
    assert world.count["decode steps that waited for memory"] == 1
    assert len(call.output_ids) == 60 and call.skipkv.report.summary["compactions"] > 4
    assert call.skipkv.report.observed_steps == 59, "each step counts once in mean_kv_tokens"


def test_who_waits_for_weights_to_be_measured_is_refused_once() -> None:
    """Also a request whose grammar is being compiled: SGLang ends it when its turn comes."""
    from sgl_skipkv.patches.engine.waiting import refuse_waiting, wants_to_evict

    world = World()
    compiling = world.arrive([5, 6, 7], 20, **asks(8, "rkv"))
    world.waiting_queue.remove(compiling)
    world.grammar_manager = SimpleNamespace(grammar_queue=[compiling])
    waiting, plain = world.arrive([5, 6, 8], 20, **asks(8, "rkv")), world.arrive([5, 6, 9], 20)
    refuse_waiting(world, "not measured")
    assert world.aborted == [waiting] and world.waiting_queue == [plain]
    assert not any(map(wants_to_evict, world.grammar_manager.grammar_queue))
    world.waiting_queue.append(compiling)
    world.run_dry()
    ended = compiling.finished_reason.to_json()
    assert (ended["type"], ended["status_code"]) == ("abort", 503)
    assert ended["message"] == "not measured"


def test_a_flush_forgets_the_backups_of_who_waits() -> None:
    """While it is paused in place, SGLang flushes beside requests that wait, and then changes
    weights."""
    from sgl_skipkv.patches.engine.backup import forget_flushed

    world = World(overlap=True, backup_bytes=1 << 20)
    calls = [world.arrive([5, 6, 7, 21, first], 60, **asks(6, "streaming")) for first in (23, 24)]
    waiting = None
    while waiting is None or waiting.skipkv.offloaded.backup is None:
        world.retract_now = not world.waiting_queue and min(len(c.output_ids) for c in calls) > 20
        world.step()
        waiting = next(iter(world.waiting_queue), None)
    forget_flushed(True, world)
    assert waiting.skipkv.offloaded.backup is None and not world.runtime.host_memory.used_bytes
    world.backed_up.clear()
    world.run_dry()
    assert [len(call.output_ids) for call in calls] == [60, 60]


def test_a_flush_ends_who_waits_and_is_longer_than_the_pool() -> None:
    from sgl_skipkv.patches.engine.backup import forget_flushed

    world = World(overlap=True, backup_bytes=1 << 20)
    calls = [
        world.arrive([5, 6, 7, 21, 22, first], 300, **asks(6, "streaming")) for first in (23, 24)
    ]
    waiting = None
    while waiting is None or waiting.skipkv.offloaded.backup is None:
        longest = min(len(call.output_ids) for call in calls) > POOL
        world.retract_now = longest and not world.waiting_queue
        world.step()
        waiting = next(iter(world.waiting_queue), None)
    forget_flushed(True, world)
    assert world.aborted == [waiting] and not world.waiting_queue
    assert "flush_cache dropped its KV" in waiting.skipkv.failure
    world.backed_up.clear()
    world.drain()


def test_a_long_trace_of_a_budget_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a radix cache SGLang adds up the full traces of all that run beside a request that
    ignores the end of sequence."""
    world = World(overlap=True)
    long = world.arrive([5, 6, 7, 21], POOL + 60, **asks(6, "streaming"))
    while len(long.output_ids) < 20:
        world.step()
    monkeypatch.setattr(world.tree_cache, "disable", True)
    plain = world.arrive([9, 9, 8], 4, ignore_eos=True)
    turn(world, 8)
    assert len(plain.output_ids) == 4 and plain.sampling_params.ignore_eos
    monkeypatch.undo()
    world.run_dry()
    assert len(long.output_ids) == POOL + 60


def test_a_pause_leaves_nobody_waiting_for_ever() -> None:
    """One request waits with a backup, and its trace is longer than the pool: a pause that takes
    the backup ends it, or it and everybody behind it would never be admitted."""
    world = World(overlap=True, backup_bytes=1 << 20)
    calls = [
        world.arrive([5, 6, 7, 21, 22, first], 300, **asks(6, "streaming")) for first in (23, 24)
    ]
    while min(len(call.output_ids) for call in calls) < POOL + 10:
        world.step()
    world.retract_now = True
    world.step()
    (waiting,) = world.waiting_queue
    assert waiting.skipkv.offloaded.backup is not None
    world.pause()
    assert {id(call) for call in calls} == {id(call) for call in world.aborted}
    late = world.arrive([9, 9, 8], 4)
    turn(world, 20)
    assert len(late.output_ids) == 4 and not world.waiting_queue
    world.drain()


def test_memory_that_runs_out_during_a_backup_ends_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(overlap=True, backup_bytes=1 << 20)
    calls = [world.arrive([5, 6, 7, 21, first], 60, **asks(6, "streaming")) for first in (23, 24)]
    while min(len(call.output_ids) for call in calls) < 20:
        world.step()
    saved = HostCopies.add

    def running_out(copies: HostCopies, tensor: torch.Tensor) -> Any:
        if len(copies._chunks) == 1:
            raise torch.OutOfMemoryError("planted")
        return saved(copies, tensor)

    monkeypatch.setattr(HostCopies, "add", running_out)
    # A record keeps the traceback, and that what was copied.
    monkeypatch.setattr(error_boundary.logger, "exception", lambda what: None)
    world.retract_now = True
    world.step()
    monkeypatch.undo()
    (ended,) = (call for call in calls if call.skipkv.failure)
    assert "OutOfMemoryError" in ended.skipkv.failure
    while world.owners() or world.waiting_queue:
        world.step()
    assert ended.finished_reason.to_json()["status_code"] == 500
    assert not world.runtime.host_memory.used_bytes
    assert [len(call.output_ids) for call in calls if call is not ended] == [60]

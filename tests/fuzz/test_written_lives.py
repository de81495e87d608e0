"""Lives written out, on SGLang's pools and tree: what random ones seldom come to, or cannot see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool_calls import asks, long_calls, same_draws
from pool_content import POOL
from pool_world import World

pytestmark = pytest.mark.usefixtures("plugin_loaded")
fixtures = (same_draws,)  # for every test


def test_a_flush_that_sglang_refuses_forgets_nothing() -> None:
    """It flushes only an idle server; the tree still has every history."""
    from sgl_skipkv.patches.engine.backup import forget_flushed

    world = World()
    world.arrive([5, 6, 7, 20], 10, **{**asks(20, "streaming"), "kv_reuse": "keep"})
    world.run_dry()
    for result, known in ((False, 1), (True, 0)):
        forget_flushed(result, world)
        assert len(world.runtime.histories) == known


def test_a_compaction_makes_room_for_who_waits() -> None:
    """SGLang looks at its queue again only if the batch is not said to be full."""
    world = World()
    (call,) = long_calls(world, 14)
    done = call.skipkv.report.compactions
    world.running_batch.batch_is_full = True
    while call.skipkv.report.compactions == done:
        assert world.running_batch.batch_is_full
        world.step()
    assert not world.running_batch.batch_is_full


def test_a_call_that_was_aborted_ends_as_such() -> None:
    """Whatever went wrong beside it: its client has left, and is told so."""
    world = World()
    (call,) = long_calls(world, 20)
    world.abort(call)
    call.skipkv.failure = "a score was not finite"
    while world.owners():
        world.step()
    ended = call.finished_reason.to_json()
    assert (ended["type"], ended["message"]) == ("abort", "Aborted")


def test_admission_counts_more_than_sglang_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request SGLang reserves at most so many tokens, and hopes that others end before."""
    monkeypatch.setattr("sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS", 4)
    world = World()
    calls = [world.arrive([5, 6, 7, 20 + i], 2 * POOL, **asks(24, "streaming")) for i in range(5)]
    together = 0
    while world.owners() or world.waiting_queue:
        world.step()
        together = max(together, len(world.owners()))
    assert world.count["retractions"] == 0 and not world.aborted and together > 1
    assert [len(call.output_ids) for call in calls] == [2 * POOL] * 5


def test_a_history_that_the_pool_cannot_hold_twice_is_not_continued() -> None:
    """Once for other branches, once as the request's own; it would wait for ever."""
    world = World()
    keys = {**asks(44, "streaming"), "kv_reuse": "budget"}
    first = world.arrive([5, 6, 7, 20], 46, **keys)
    world.run_dry()
    call = world.arrive([*first.origin_input_ids, *first.output_ids, 9], 30, **keys)
    world.run_dry()
    assert call.skipkv.reuse.miss == "evicted" and len(call.output_ids) == 30
    world.drain()


@pytest.mark.parametrize("pauses", [0, 2])
def test_a_request_says_how_often_it_was_recomputed(pauses: int) -> None:
    world = World(backup_bytes=1 << 20)
    call = world.arrive([5, 6, 7, 20], 60, **asks(20, "streaming"))
    for _ in range(pauses):
        for _ in range(12):
            world.step()
        world.pause()
    world.run_dry()
    assert call.skipkv.report.summary.get("recomputations", 0) == pauses
    assert ("recomputations" in call.skipkv.report.summary) == (pauses > 0)


def test_a_prompt_that_is_cut_on_its_way_to_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --allow-auto-truncate, behind the bound of its output."""
    from sglang.srt.managers.scheduler import Scheduler

    bound = Scheduler.init_req_max_new_tokens

    def cut(scheduler: Any, req: Any) -> None:
        bound(scheduler, req)
        req.origin_input_ids = req.origin_input_ids[:12]

    monkeypatch.setattr(Scheduler, "init_req_max_new_tokens", cut)
    world = World()
    call = world.arrive([5, 6, 7, 20] * 10, 40, **asks(8, "rkv"))
    assert call.skipkv.prompt.sent_tokens == call.skipkv.kv.followed_tokens == 12
    world.run_dry()
    assert call.skipkv.report.summary["compactions"] > 2
    world.drain()


def test_no_prefill_records_two_queries_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would write them in any order. Its next turn may ask for those of its prompt's end,
    and a recomputed prompt is followed by more than a ring of generated tokens."""
    from sgl_skipkv.recording.recorder import Recorder

    record, most = Recorder.record_queries, [0]

    def checked(recorder: Any, recording: Any, layer: int, q: Any) -> None:
        places = (recording.positions % recorder.query_window).tolist()
        held = [one for one in zip(recording.tracks.tolist(), places, strict=True) if one[0]]
        assert len(held) == len({*held})
        most[0] = max(most[0], len(held))
        record(recorder, recording, layer, q)

    monkeypatch.setattr(Recorder, "record_queries", checked)
    world = World()
    call = world.arrive([5, 6, 7, 20], 40, **{**asks(16, "rkv"), "kv_reuse": "budget"})
    while len(call.output_ids) < 20:
        world.step()
    world.pause()
    world.run_dry()
    assert most[0] == world.runtime.config.query_window and call.retraction_count == 1


def test_a_row_that_fills_the_context_leaves_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last page would go on behind the end of the page table's row."""
    monkeypatch.setattr("pool_world.CONTEXT", 30)
    world = World(page_tokens=16)
    call = world.arrive([5, 6, 7, 20], 200, **{**asks(40, "streaming"), "kv_reuse": "keep"})
    world.run_dry()
    assert len(call.output_ids) == 24 and not len(world.runtime.histories)
    world.drain()


def test_a_next_turn_may_leave_out_the_token_that_ended_the_output() -> None:
    """Its template does. A step was launched that has seen it, unlike the policy's statistics."""
    keys = {**asks(20, "h2o"), "kv_reuse": "budget"}
    outputs: list[int] = []
    for ends in (False, True):
        world = World(overlap=True)
        first = world.arrive([5, 6, 7, 20], 30, ignore_eos=not ends, **keys)
        if ends:
            first.eos_token_ids = {next(one for one in outputs[8:] if outputs.count(one) == 1)}
        world.run_dry()
        outputs = [*first.output_ids]
    assert 8 < len(outputs) < 30
    text = [*first.origin_input_ids, *outputs]
    call = world.arrive([*text[:-1], 9], 10, **keys)
    world.run_dry()
    assert call.skipkv.reuse.continued is not None
    assert call.skipkv.reuse.continued.cut == len(text) - 1
    world.drain()


def test_what_a_kept_history_evicted_is_not_counted_again() -> None:
    world = World()
    keys = {**asks(8, "streaming"), "kv_reuse": "keep"}
    first = world.arrive([5, 6, 7, 20], 30, **keys)
    world.run_dry()
    call = world.arrive([*first.origin_input_ids, *first.output_ids, 9], 30, **keys)
    world.run_dry()
    assert call.skipkv.prompt_evicted_tokens > 0
    summary = call.skipkv.report.summary
    assert summary["evicted_tokens"] > 0
    assert summary["kv_tokens"] == summary["full_kv_tokens"] - summary["evicted_tokens"]


def test_who_is_aborted_while_it_waits_says_what_it_continued() -> None:
    """If it had run: otherwise it has continued nothing."""
    keys = {**asks(12, "streaming"), "kv_reuse": "keep"}
    for ran in (True, False):
        world = World(backup_bytes=1 << 20)
        world.arrive([4, 20, 3, 9], 200, **asks(8, "streaming"))  # SGLang retracts a shorter one
        first = world.arrive([5, 6, 7, 20], 30, **keys)
        while not first.finished():
            world.step()
        call = world.arrive([*first.origin_input_ids, *first.output_ids, 9], 30, **keys)
        while ran and len(call.output_ids) < 6:
            world.step()
        world.retract_now = ran
        if ran:
            world.step()
        assert call in world.waiting_queue
        world.abort(call)
        summary = call.skipkv.report.summary
        told = [summary[name] > 0 for name in ("reused_tokens", "reused_kv_tokens")]
        assert told == [ran, ran] and call.skipkv.offloaded.backup is None
        world.run_dry()
        world.drain()


def test_of_a_running_call_the_pages_that_it_lacks_are_reserved() -> None:
    """43 tokens at most, in three pages of 16."""
    world = World(page_tokens=16)
    call = world.arrive([5, 6, 7, 20], 200, **asks(30, "streaming"))
    for tokens, lacking in ((8, 32), (20, 16), (36, 0)):
        while len(call.output_ids) < tokens:
            world.step()
        assert world.adder()._get_running_request_total_token_offset(call) == lacking


def overriding(call: Any) -> Any:
    """As a request that brings embeddings for every token of its prompt."""
    places = [*range(len(call.origin_input_ids))]
    call.positional_embed_overrides = SimpleNamespace(
        positions=places, embeds=torch.zeros(len(places), 8)
    )
    call.skip_radix_cache_insert = True  # as SGLang's constructor has it then
    return call


@pytest.mark.parametrize("protect_prompt", [True, False])
def test_no_generated_token_gets_an_embedding_of_the_prompt(
    protect_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang places them by row entries, of which a restored row may have fewer than its prompt."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    prepare, placed = ScheduleBatch.prepare_for_extend, list[tuple[int, int]]()

    def watched(batch: Any) -> None:
        prepare(batch)
        replaced = 0 if batch.replace_positions is None else len(batch.replace_positions)
        placed.extend((req.extend_len, replaced) for req in batch.reqs if req is call)

    monkeypatch.setattr(ScheduleBatch, "prepare_for_extend", watched)
    world, keys = World(backup_bytes=1 << 20), asks(12, "streaming")
    own = {"protect_prompt": protect_prompt, "count_prompt": not protect_prompt}
    keys["kv_params"] = {**keys["kv_params"], **own}
    call = overriding(world.arrive([5, 6, 7, 20, 21] * 5, 60, **keys))
    other = world.arrive([5, 6, 7, 20], 60, **asks(12, "streaming"))
    for tokens in (20, 40):
        while len(call.output_ids) < tokens:
            world.step()
        while call in world.running_batch.reqs:
            world.retract_now = True
            world.step()
    world.run_dry()
    assert len(call.output_ids) == len(other.output_ids) == 60 and len(placed) >= 3
    restored = [replaced for extend_tokens, replaced in placed if extend_tokens == 1]
    assert not any(restored) and bool(restored) == protect_prompt
    assert all(replaced == 25 for extend_tokens, replaced in placed if extend_tokens > 1)


def test_a_row_that_sglang_does_not_file_leaves_no_history() -> None:
    world = World()
    keys = {**asks(20, "streaming"), "kv_reuse": "keep"}
    overriding(world.arrive([5, 6, 7, 20], 30, **keys))
    world.run_dry()
    assert not len(world.runtime.histories)
    world.arrive([5, 6, 7, 20], 30, **keys)
    world.run_dry()
    assert len(world.runtime.histories) == 1


@pytest.mark.parametrize("room", [1, 2])
def test_of_who_cannot_be_recomputed_no_more_go_than_can_be_backed_up(room: int) -> None:
    """A request of higher priority takes the place of several at once."""
    from sgl_skipkv.patches.engine.future_kv import backup_bytes, must_stay
    from sgl_skipkv.patches.engine.retraction import order_victims

    world = World(backup_bytes=1 << 20)
    calls = long_calls(world, POOL + 20, POOL + 20)
    first, second = (backup_bytes(call, call.skipkv) for call in calls)
    assert first and second and not must_stay(calls)
    memory = world.runtime.host_memory
    spare = (first + (room - 1) * second) // memory.chunk_bytes
    taken = [memory.free_chunks.pop() for _ in range(len(memory.free_chunks) - spare)]
    assert must_stay(calls) == ([calls[1]] if room == 1 else [])
    # Who would go first keeps that place.
    orders = [order_victims(order, calls) for order in ([0, 1], [1, 0])]
    assert orders == ([[0, 1], [1, 0]] if room == 1 else [None, None])
    short = world.arrive([5, 6, 8, 20], 40, **asks(8, "streaming"))
    while short not in world.running_batch.reqs:
        world.step()
    # One that can be recomputed takes host memory, too, but needs none.
    assert must_stay([short, *calls])[-1:] == [calls[1]] and short not in must_stay([short, *calls])
    for call in calls:
        call.priority = 0
    short.priority, urgent = 100, world.arrive([5, 6, 9, 20], POOL // 2, **asks(40, "streaming"))
    urgent.priority = 100
    urgent.init_next_round_input(world.tree_cache)
    adder = world.adder()
    adder.priority_scheduling_preemption_threshold = 50
    assert adder._victims(urgent) == calls and not adder._victims(calls[0])
    adder.preempt_to_schedule(urgent)
    memory.free_chunks += taken
    world.run_dry()
    assert not world.aborted and [len(call.output_ids) for call in calls] == [3 * POOL] * 2


def test_a_prompt_in_chunks_counts_more_than_sglang_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its last chunk there is room for another prompt, which takes what it will need."""
    monkeypatch.setattr("sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS", 4)
    world = World(chunk=16)
    long = world.arrive([5 + i % 40 for i in range(52)], 60, **asks(16, "streaming"))
    world.step()
    assert long is world.chunked_req
    short = world.arrive([60, 61, 62, 63], 60, **asks(16, "streaming"))
    while not long.finished():
        assert world.waiting_queue == [short]
        world.step()
        world.check()
    world.run_dry()
    assert len(short.output_ids) == 60 and not world.count["retractions"]

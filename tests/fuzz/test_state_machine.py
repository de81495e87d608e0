"""Lives of requests on SGLang's real pools and tree; test_fuzz.py has the random ones."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_on_cpu import as_one_each, on_triton
from planted_bugs import plant
from pool_calls import asks, long_calls, same_draws, turn
from pool_content import POOL, TRACKED
from pool_machine import MACHINE, PARAMETERS, PROMPT
from pool_world import World

from sgl_skipkv import policy
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.patches.engine import backup, future_kv, reuse
from sgl_skipkv.request.state import RequestState

pytestmark = pytest.mark.usefixtures("plugin_loaded")
fixtures = (same_draws,)  # for every test


@pytest.mark.slow
@settings(MACHINE, max_examples=7)
@given(
    st.lists(
        st.tuples(PROMPT, st.integers(4, 24), st.sampled_from(["skipkv", "streaming"])),
        min_size=4,
        max_size=10,
    ),
    st.booleans(),
    st.sampled_from([None, 5]),
    st.sampled_from([1, 4, 16]),
)
def test_admission_of_budgeted_calls_never_overbooks(
    calls: list[tuple[list[int], int, str]], overlap: bool, chunk: int | None, page_tokens: int
) -> None:
    """Traces of twice the pool, all at once: nobody is retracted, nobody is refused, all finish."""
    world = World(overlap=overlap, chunk=chunk, page_tokens=page_tokens)
    for prompt, budget, name in calls:
        world.arrive(prompt, 2 * POOL, kv_budget=budget, kv_policy=name, kv_params=PARAMETERS)
    together = 0
    for _ in range(5000):
        world.step()
        together = max(together, len(world.owners()))
        if world.is_idle():
            break
    world.check()
    assert world.count["retractions"] == 0 and not world.aborted
    assert len(world.finished) == len(calls)
    for req in world.finished:
        assert len(req.output_ids) == 2 * POOL
        peak = req.skipkv.report.summary["peak_kv_tokens"]
        assert peak <= req.skipkv.settings.peak_budgeted_tokens()
    assert together > 1


@pytest.mark.parametrize("overlap", [True, False])
def test_who_cannot_come_back_stays_while_another_can_go(overlap: bool) -> None:
    """SGLang retracts the shortest output first; here the longest could not be recomputed."""
    world = World(overlap=overlap)
    long, short = long_calls(world, POOL + 20, 20)
    world.retract_now = True
    world.step()
    assert short.is_retracted and not long.is_retracted and not world.aborted
    world.check()
    world.drain()


@pytest.mark.parametrize("counts", [True, False])
def test_a_row_whose_pages_do_not_fit_is_cut_as_sglang_cuts_it(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """85 tokens at most, in a pool of 96: in pages of 16 SGLang's admission wants one more."""
    if not counts:
        plant(monkeypatch, Runtime.most_tokens.fget, "self.page_tokens", "1")
    world = World(page_tokens=16)
    call = world.arrive([5] * 60, 200, **asks(16, "streaming"))
    if counts:
        world.run_dry()
        assert len(call.output_ids) == POOL - 64 - 16 - 1
        world.drain()
    else:
        with pytest.raises(AssertionError, match="everybody waits"):
            world.run_dry()


SELF_SET = [
    *(("rkv", {"coverage": 0.7}), ("h2o", {"coverage": 0.7}), ("streaming", {"coverage": 0.7})),
    *(("skipkv", {"fraction": 0.2}), ("rpc", {"fraction": 0.2, "coverage": 0.8})),
    *(("keydiff", {"quotas": True}), ("rkv", {"quotas": True})),
]
ASKED = [(name, {}) for name in policy.names() if name != "full"] + SELF_SET
APART = [
    (3, 4),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in [(2, 1), (7, 1), (16, 16)]),
]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("name", "parameters"), ASKED, ids=str)
@pytest.mark.parametrize(("apart", "page_tokens"), APART)
def test_a_restored_call_goes_on_as_if_nothing_had_happened(
    overlap: bool, name: str, parameters: dict[str, Any], apart: int, page_tokens: int
) -> None:
    """Retracted every few tokens, at every place of its interval and of its pages: the tokens are
    those of a call that nobody retracts, in pages of one.

    A token of this world depends on everything in the row before it, so one other kept set would
    show.
    """
    outputs = []
    for retractions in (0, 12):
        page = page_tokens if retractions else 1
        world = World(overlap=overlap, late=overlap, backup_bytes=1 << 20, page_tokens=page)
        # SGLang retracts the shorter output and always keeps one request.
        long_calls(world, 20)
        asked = asks(12, name)
        asked["kv_params"] = {**PARAMETERS, **parameters}
        call = world.arrive([5, 6, 7, 21, 22], 120, **asked)
        for step in range(400):
            if call in world.running_batch.reqs and world.count["retractions"] < retractions:
                world.retract_now = step % apart == 0
            world.step()
            world.check()
        assert call.finished() and call.retraction_count >= min(retractions, 5)
        assert world.count["restored"] == world.count["retractions"]
        summary = {**call.skipkv.report.summary, "mean_kv_tokens": None}  # over steps that were run
        outputs.append((list(call.output_ids), summary))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("name", "page_tokens"), [("skipkv+", 1), ("rkv", 4), ("snapkv", 1), ("streaming", 16)]
)
def test_kernels_keep_what_plain_torch_keeps(name: str, page_tokens: int) -> None:
    """From SGLang's batches to its page table, a retraction on the way: the same tokens, each of
    which depends on everything in the row before it."""
    keys = {"kv_budget": 14, "kv_policy": name, "kv_params": {**PARAMETERS, "window": 4}}
    outputs = []
    for way in (nullcontext(), on_triton()):
        how = {"late": True, "backup_bytes": 1 << 20, "page_tokens": page_tokens}
        world = World(head_dim=16, check_ledger=False, **how)
        launched = Counter[str]()
        with way, as_one_each(lambda kernel, again, seen=launched: seen.update([kernel])):
            calls = [world.arrive([5, 6, 7, 20 + i], 60, **keys) for i in range(2)]
            while not all(call.finished() for call in calls):
                world.retract_now = world.count["decode steps"] == 40
                world.step()
                world.check()
        assert world.count["restored"] == 1 and world.count["compactions"] >= 8
        outputs.append([list(call.output_ids) for call in calls])
    assert outputs[0] == outputs[1]
    records = name != "streaming"
    assert launched["_compact_rows_kernel"] >= 4
    assert launched["_move_kv_kernel"] == (page_tokens > 1) * launched["_compact_rows_kernel"]
    assert launched["_importance_kernel"] >= 4 * records
    assert launched["_sentence_step_kernel"] >= 60 * records


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["skipkv", "streaming"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_call_that_is_backed_up_before_it_compacts_again(
    overlap: bool, name: str, steps: int
) -> None:
    """It was recomputed, all of its tokens at once, so its compaction is overdue; and it goes again
    just then. When it comes back it compacts when it would have: its queries are recorded for that.

    Found by fuzzing: it compacted a step too early, on another request's query.
    """
    world = World(overlap=overlap, backup_bytes=1 << 20)
    calls = [world.arrive([5, 6, 7, 21, 22, first], 120, **asks(6, name)) for first in (23, 24)]
    while min(len(call.output_ids) for call in calls) < 34:
        world.step()
    world.pause()  # nobody is backed up
    while world.waiting_queue:
        world.step()
    for _ in range(steps):
        world.step()
    world.retract_now = True
    turn(world, 40)
    # With the overlap scheduler it may have compacted right then: there is nothing to go on from.
    recomputed = world.count["recomputed because just compacted"]
    assert world.count["restored"] + recomputed == 1 and recomputed <= (overlap and steps == 1)
    world.drain()


@pytest.mark.parametrize("waits", [True, False])
def test_a_row_comes_back_behind_the_step_that_runs(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends while a step still writes its next token, and its slots go to one that comes
    back from host memory: the copy must not be written before that token, or it is overwritten."""
    if not waits:
        monkeypatch.setattr(backup, "wait_for_forward", lambda pool: None)
    world = World(late=True, newest_first=True, token_ratio=0.02, backup_bytes=1 << 20)
    ends, returns = long_calls(world, 26, 26)
    assert ends.skipkv.kv.evicted_tokens  # or the tree would have its slots
    world.abort(ends)
    world.retract_now = True
    world.step()
    assert ends.finished() and returns.skipkv.offloaded.backup is not None
    if waits:
        world.step()
        assert world.count["restored"] == 1
        world.drain()
    else:
        with pytest.raises(AssertionError):
            world.step()


@pytest.mark.parametrize("waits", [True, False])
def test_a_history_is_copied_behind_the_step_that_runs(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends while a step still writes its next token, and its slots go to the copy of a
    history: the copy must not be written before that token, or it is overwritten."""
    world = World(late=True, newest_first=True)
    keys = {**asks(8, "streaming"), "kv_reuse": "budget"}
    first = world.arrive([5, 6, 7, 20], 30, **keys)
    world.run_dry()
    (ends,) = long_calls(world, 26)
    assert ends.skipkv.kv.evicted_tokens  # or the tree would have its slots
    if not waits:
        monkeypatch.setattr(reuse, "wait_for_forward", lambda pool: None)
    world.abort(ends)
    world.step()
    assert ends.finished()
    world.arrive([*first.origin_input_ids, *first.output_ids, 9], 30, **keys)
    if waits:
        turn(world, 2)
        assert world.count["copied"] == 1
        world.drain()
    else:
        with pytest.raises(AssertionError):
            turn(world, 2)


@pytest.mark.parametrize("waits", [True, False])
def test_queries_of_tokens_that_were_left_out_are_not_read(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring has the last queries of a history, and a next turn leaves its last tokens out. It is
    due at once, and compacts when queries of its own have taken their places."""
    keys = {**asks(16, "rkv"), "kv_params": {**PARAMETERS, "window": 4}, "kv_reuse": "budget"}
    world = World()
    first = world.arrive([5, 6, 7, 20], 18, **keys)
    world.run_dry()
    text = [*first.origin_input_ids, *first.output_ids]
    if not waits:
        piece = "max(prefill_tokens + 1, recorded_tokens)"
        plant(monkeypatch, Runtime.admit, piece, "prefill_tokens + 1")
    second = world.arrive([*text[:-6], 9, 9], 30, **{**keys, "kv_budget": 6})
    if waits:
        world.run_dry()
        assert second.skipkv.report.compactions and world.count["continued, not to its end"]
        world.drain()
    else:
        with pytest.raises(AssertionError, match="somebody else's queries"):
            world.run_dry()


@pytest.mark.parametrize("records", [True, False])
def test_the_next_turn_has_the_queries_of_a_prompt_s_end(
    records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second turn is far from its budget and ends with its first token; the third, with a
    smaller budget, compacts at once, on queries of the second one's prompt."""
    keys = {**asks(30, "rkv"), "kv_params": {**PARAMETERS, "window": 4}, "kv_reuse": "budget"}
    world = World()
    if not records:
        getter = RequestState.records_from.fget
        assert getter is not None
        plant(monkeypatch, getter, 'kv_reuse == "budget"', 'kv_reuse == "never"')

    def take_turn(earlier: Any, more: list[int], max_new_tokens: int, kv_budget: int) -> Any:
        text = [] if earlier is None else [*earlier.origin_input_ids, *earlier.output_ids]
        call = world.arrive([*text, *more], max_new_tokens, **{**keys, "kv_budget": kv_budget})
        world.run_dry()
        return call

    first = take_turn(None, [5, 6, 7, 20], 6, 30)
    second = take_turn(first, [9] * 10, 1, 30)
    if records:
        third = take_turn(second, [9], 12, 6)
        assert third.skipkv.report.compactions and world.count["continued"] == 2
        world.drain()
    else:
        with pytest.raises(AssertionError, match="somebody else's queries"):
            take_turn(second, [9], 12, 6)


@pytest.mark.parametrize("quotas", [False, True])
def test_a_lost_conversation_counts_from_its_first_prompt(quotas: bool) -> None:
    """Its longest history says where that ends and who wrote what behind it, though the tree has
    lost those of all turns; and says it to the next request, too."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    parameters = {**PARAMETERS, "window": 4, "quotas": quotas}
    keys = {**asks(12, "rkv"), "kv_params": parameters, "kv_reuse": "budget"}
    world = World()

    def take_turn(text: list[int]) -> Any:
        call = world.arrive(text, 30, **keys)
        world.run_dry()
        return call

    first = take_turn([5, 6, 7, 20])
    second = take_turn([*first.origin_input_ids, *first.output_ids, 9, 9])
    world.tree_cache.evict(EvictParams(num_tokens=POOL))
    prompt = [*second.origin_input_ids, *second.output_ids, 9]
    for third in (take_turn(prompt), take_turn(prompt)):
        state = third.skipkv
        assert (state.reuse.continued, state.reuse.miss) == (None, "evicted")
        assert state.prompt.uncounted_tokens == len(first.origin_input_ids)
        assert state.prompt.earlier_compactions == second.skipkv.compactions > 2
        *earlier, own = state.reuse.input_spans
        assert earlier == [*second.skipkv.reuse.input_spans] and own[1] == len(prompt)
        assert state.report.compactions > 2
    assert world.count["lost, counted"] == 2
    world.drain()


@pytest.mark.parametrize("pays", [True, False])
def test_a_next_turn_waits_until_its_copy_fits(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has room for a history and what is computed behind it, and not for its copy."""
    world = World()
    keys = {**asks(20, "streaming"), "kv_reuse": "budget"}
    first = world.arrive([5, 6, 7, 20], 28, **keys)  # it ends just before a compaction
    world.run_dry()
    plain = world.arrive(range(100, 144), 12)
    world.step()
    if not pays:
        piece = "return continued.row_tokens - continued.shared_tokens"
        plant(monkeypatch, future_kv.copied_tokens, piece, "return 0")
    call = world.arrive([*first.origin_input_ids, *first.output_ids, 9], 30, **keys)
    if pays:
        world.step()
        assert call in world.waiting_queue
        world.run_dry()
        assert plain.finished() and world.count["copied"] == 1
        world.drain()
    else:
        with pytest.raises(RuntimeError, match="Out of memory"):
            turn(world, 2)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_backup_that_is_forgotten_leaves_nothing_behind(overlap: bool) -> None:
    """The scheduler had looked at the waiting call, and found no room, before the pause.

    Found by fuzzing: it was recomputed with another token in the middle, since SGLang appends to
    the input that it finds.
    """
    world = World(overlap=overlap, backup_bytes=1 << 20)
    calls = long_calls(world, 20, 20)
    world.retract_now = True
    world.step()
    (call,) = world.waiting_queue
    assert call in calls and call.skipkv.offloaded.backup is not None
    call.init_next_round_input(world.tree_cache)
    world.pause()
    turn(world, 60)
    assert len(call.output_ids) > 60 and not world.count["restored"]
    world.drain()


def test_prompts_of_embeddings_are_not_backed_up() -> None:
    """SGLang throws away what was generated from embeddings and begins again, so a row that holds
    it must not come back: there are no tokens left that it could stand for."""
    world = World(backup_bytes=1 << 20)
    (call, _) = long_calls(world, 20, 20)
    for embeddings in ([[0.0]], None):
        call.input_embeds = embeddings
        backup.back_up(call.skipkv, call, world.tree_cache)
        assert (call.skipkv.offloaded.backup is None) == (embeddings is not None)
    call.skipkv.offloaded.backup = None
    world.drain()


def test_who_needs_no_track_waits_for_none() -> None:
    world = World()
    slotted = [world.arrive([5, 6, 7, 20 + i], 90, **asks(8, "skipkv")) for i in range(TRACKED + 1)]
    while len([call for call in slotted if call in world.owners()]) < TRACKED:
        world.step()
    plain = world.arrive([5, 6, 8, 20], 10)
    world.step()
    assert plain in world.owners() and world.waiting_queue == [slotted[-1]]
    world.drain()


@pytest.mark.parametrize("low", ["plain", "plain and a holder"])
def test_who_waits_for_a_track_preempts_only_who_holds_one(low: str) -> None:
    """Of another it would get the row and no track, so that one would come and go in every step.
    Either way SGLang goes on with the queue: requests that need no track pass."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    world = World()
    holders = [world.arrive([5, 6, 7, 20 + i], 90, **asks(8, "skipkv")) for i in range(TRACKED)]
    while len(world.owners()) < TRACKED:
        world.step()
    plain = world.arrive([5, 6, 8, 20], 40)
    while plain not in world.running_batch.reqs:
        world.step()
    urgent = [world.arrive([5, 6, 9, 20 + i], 10, **asks(8, "skipkv")) for i in range(2)]
    free = world.arrive([5, 6, 10, 20], 10)
    for req in holders:
        req.priority = 50
    for req in (*urgent, free):
        req.priority = 100
        req.init_next_round_input(world.tree_cache)
    for req in (plain, *holders[:1]) if low == "plain and a holder" else (plain,):
        req.priority = 0
    adder = world.adder()
    adder.priority_scheduling_preemption_threshold = 75
    assert adder.preempt_to_schedule(urgent[0])
    running = world.running_batch.reqs
    assert plain in running and (holders[0] in running) == (low == "plain")
    added = [adder.add_one_req(req, False, None) for req in urgent]
    assert added == [AddReqResult.CONTINUE] * 2
    assert adder.can_run_list == ([] if low == "plain" else urgent[:1])
    # Another one that waits for a track, behind the one that has to wait first.
    assert adder.preempt_to_schedule(urgent[1]) and plain in world.running_batch.reqs
    assert adder.preempt_to_schedule(free) and plain not in world.running_batch.reqs

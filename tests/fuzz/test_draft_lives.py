"""Lives with speculative decoding; ``fuzz.py --drafts``: random ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from planted_bugs import plant
from pool_calls import asks, same_draws, turn
from pool_content import POOL
from pool_draft_machine import DraftPoolMachine
from pool_drafts import DraftWorld, draft_flags
from pool_machine import PARAMETERS, run_machine
from pool_turns import separated

from sgl_skipkv.eviction.compaction import Plan
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.patches.engine import (
    backup,
    batch,
    future_kv,
    kv_cache,
    retraction,
    reuse,
    scheduler,
    speculation,
)
from sgl_skipkv.request.parts import KVState
from sgl_skipkv.reuse import continuation

pytestmark = pytest.mark.usefixtures("plugin_loaded")
fixtures = (same_draws,)  # for every test

CHAIN, BUDGET, INTERVAL = 4, 9, PARAMETERS["interval"]
PROMPT = [5, 6, 7, 30]
BUDGETED = asks(BUDGET, "streaming")
Life = Callable[[], DraftWorld]


@contextmanager
def world_of(
    page_tokens: int = 1, algorithm: str = "STANDALONE", **how: Any
) -> Iterator[DraftWorld]:
    with draft_flags(CHAIN, page_tokens, algorithm):
        how |= {"chain_tokens": CHAIN, "page_tokens": page_tokens, "algorithm": algorithm}
        world = DraftWorld(**how)
        yield world
        world.run_dry()
        world.drain()


def test_random_lives() -> None:
    """A few of those that ``make fuzz`` has thousands of."""
    seen = run_machine(16, steps=25, seed=4, kind=DraftPoolMachine)
    wanted = ("compactions beside a step", "right drafts", "wrong drafts", "stopped within a step")
    assert min(seen[name] for name in (*wanted, "retractions", "finished")) > 0


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("reads_lengths", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("right_of_ten", [0, 10])
@pytest.mark.parametrize("overlap", [True, False])
def test_compactions_evict_behind_the_running_step(
    overlap: bool, right_of_ten: int, late: bool, reads_lengths: bool, page_tokens: int
) -> None:
    """Each comes with a tail. With overlap the step that runs then may have accepted one token, or
    its whole chain; without, none runs."""
    how = {"overlap": overlap, "late": late, "right_of_ten": right_of_ten}
    with world_of(page_tokens, **how, reads_lengths=reads_lengths) as world:
        call, running = world.arrive(PROMPT, 100, **BUDGETED), set[int]()
        while not call.finished():
            turn(world, 1)
            if call.skipkv.report.compactions:
                running.add(call.skipkv.kv.last.running_tokens)
    seen = world.count
    assert running == ({CHAIN if right_of_ten else 1} if overlap else {0})
    assert seen["compactions"] == seen["compactions with a tail"] >= 10
    assert seen["compactions in pages"] == (seen["compactions"] if page_tokens > 1 else 0)
    assert len(call.output_ids) in range(100, 100 + CHAIN)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_bound(overlap: bool) -> None:
    """A step adds a chain before its row is compared with the budget. With overlap two do, if a
    prefill comes between."""
    longest = 0
    for others_from in range(2, 10):
        with world_of(overlap=overlap, right_of_ten=10) as world:
            call = world.arrive(PROMPT, 60, **BUDGETED)
            for step in range(30):
                if step >= others_from:
                    world.arrive([20 + step], 1)
                turn(world, 1)
                if not call.finished():
                    longest = max(longest, call.kv.kv_committed_len - len(PROMPT))
    assert longest == BUDGET + INTERVAL - 1 + CHAIN * (1 + overlap)


def crowded() -> DraftWorld:
    """Those that were admitted together have room for their drafts, too."""
    with world_of(right_of_ten=10) as world:
        calls = [world.arrive([20 + i] * 10, 200, **BUDGETED) for i in range(4)]
        turn(world, 60)
        assert 1 < len(world.owners()) < len(calls)
    return world


def long_prompts() -> DraftWorld:
    """Of any length that SGLang takes: they end, and nobody runs out of slots."""
    for prompt_tokens in range(POOL - 40, POOL - 2):
        with world_of() as world:
            call = world.arrive([5 + i % 9 for i in range(prompt_tokens)], 60, **BUDGETED)
            world.run_dry()
            assert call.finished() and call.output_ids and not world.aborted
            # SGLang keeps two slots free, and room for a page
            most_tokens = POOL - 3 * CHAIN - 3
            fits = prompt_tokens + BUDGET + INTERVAL + 1 <= most_tokens
            expected = 60 if fits else max(most_tokens - prompt_tokens, 1)
            assert len(call.output_ids_through_stop) == expected
    return world


def stops_within_a_step() -> DraftWorld:
    """What stands behind the stop is nobody's, and the tree does not get it."""
    with world_of(right_of_ten=10) as world:
        for i in range(CHAIN):
            call = world.arrive([20 + i, 5, 6], 30 + i)
            world.run_dry()
            assert len(call.output_ids) == 30 + i + -(29 + i) % CHAIN  # one is of the prefill
            text = [*call.origin_input_ids, *call.output_ids]
            assert world.probe(text, separated(call)) == min(3 + 30 + i, len(text) - 1)
        assert world.count["stopped within a step"] == CHAIN - 1
    return world


def in_pages() -> DraftWorld:
    """KV moves in both models' pools, and the pages behind the tail are free."""
    with world_of(4, right_of_ten=5) as world:
        for i in range(3):
            world.arrive([20 + i] * 5, 60, **asks(6, "keydiff"))
        turn(world, 50)
    return world


def retracted() -> DraftWorld:
    """Whoever is retracted beside a running step is computed again, of what is known then."""
    with world_of(right_of_ten=10, late=True) as world:
        world.arrive([20, 21, 22, 23], 200, **BUDGETED)  # SGLang retracts the shorter one
        turn(world, 6)
        call = world.arrive(PROMPT, 60, **BUDGETED)
        while not call.finished():
            world.retract_now = call in world.running_batch.reqs and call.retraction_count < 3
            turn(world, 4)
        assert call.retraction_count == 3 and call.skipkv.report.compactions > 3
    return world


def restored() -> DraftWorld:
    """Whoever is retracted goes on with what was kept, and without what the running step adds; at
    any moment, so also just behind a compaction."""
    for overlap, steps in itertools.product((True, False), range(4, 24)):
        with world_of(overlap=overlap, backup_bytes=1 << 20) as world:
            world.arrive([20, 21, 22, 23], 200, **BUDGETED)
            turn(world, 10)
            call = world.arrive(PROMPT, 90, **asks(BUDGET, "skipkv"))
            turn(world, steps)
            world.retract_now = True
            turn(world, 1)
            assert call.retraction_count == world.count["backups"] == 1
            while not call.finished():
                world.arrive([30], 1)
                turn(world, 2)
            world.run_dry()
            assert world.count["restored"] == 1 and not call.skipkv.report.recomputations
    return world


def goes_on(algorithm: str = "STANDALONE", page_tokens: int = 1) -> DraftWorld:
    """The next turn of a conversation, and others that have not all of the answer. The first answer
    ends within a step, or with its last token."""
    continued = within_a_step = 0
    for overlap, mode, tokens in itertools.product((True, False), ("keep", "budget"), (40, 41)):
        asked = asks(BUDGET, "skipkv") | {"kv_reuse": mode}
        with world_of(page_tokens, algorithm, overlap=overlap, right_of_ten=7) as world:
            first = world.arrive(PROMPT, tokens, **asked)
            world.run_dry()
            text = world.next_text(first)
            for kept in range(1, BUDGET + INTERVAL):  # what is kept has private keys
                world.probe([*PROMPT, *text[-kept:]], separated(first))
            for left_out in range(3):
                world.arrive([*text[: len(text) - left_out], 30, 31], 30, **asked)
                world.run_dry()
            continued += world.count["continued, evicted from"]
            within_a_step += world.count["stopped within a step"]
    # Not all of an answer may end in front of what its key names.
    assert continued >= 22 and within_a_step
    return world


def goes_on_in_pages() -> DraftWorld:
    return goes_on(page_tokens=4)


def goes_on_with_eagle() -> DraftWorld:
    return goes_on("EAGLE")


def drops_thoughts() -> DraftWorld:
    """A row that has lost its thoughts goes on, with a tail behind it."""
    asked = asks(30, "skipkv") | {"kv_reuse": "budget"}
    dropped = 0
    for tokens, algorithm in itertools.product(range(24, 36), ("STANDALONE", "EAGLE")):
        with world_of(1, algorithm, overlap=False, right_of_ten=10, drops=True) as world:
            first = world.arrive(PROMPT, tokens, **asked)
            world.run_dry()
            world.arrive([*world.next_text(first), 30, 31], 60, **asked)
            world.run_dry()
            dropped += world.count["thoughts dropped"] > 0
    assert dropped >= 8
    return world


def prefills_between() -> DraftWorld:
    with world_of(late=True) as world:
        world.arrive(PROMPT, 90, **BUDGETED)
        for i in range(40):
            if i % 3 == 0:
                world.arrive([30 + i], 9, **BUDGETED)
            turn(world, 1)
    return world


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE"])
def test_a_history_stays_known_when_a_later_one_is_lost(algorithm: str) -> None:
    """The tree has as many entries as the earlier one needs."""
    asked = asks(BUDGET, "streaming") | {"kv_reuse": "keep"}
    with world_of(1, algorithm) as world:
        first = world.arrive(PROMPT, 30, **asked)
        world.run_dry()
        second = world.arrive([*world.next_text(first), 30, 31], 12, **asked)
        world.run_dry()
        of_first, of_second = world.runtime.histories._by_use
        for _ in range(2):
            world.evict_tree(1)  # the last leaf
        third = world.arrive([*world.next_text(second), 32], 1, **asked)
        world.run_dry()
        assert of_second not in world.runtime.histories._by_use
        assert of_first in world.runtime.histories._by_use
        summary = third.skipkv.report.summary
        assert summary["kv_reuse_miss"] == "evicted"
        assert summary["reused_tokens"] >= len(of_first.tokens) - 1


LIVES: list[Life] = [
    *(crowded, long_prompts, stops_within_a_step, in_pages, retracted, restored, prefills_between),
    *(goes_on, goes_on_in_pages, goes_on_with_eagle, drops_thoughts),
]


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_drafts_have_slots_of_their_own(life: Life) -> None:
    world = life()
    assert world.count["finished"] and not world.owners()


@pytest.mark.parametrize(
    ("life", "function", "piece", "instead"),
    [
        (crowded, future_kv.future_tokens_of, "+ behind", "+ 0 * behind"),
        (long_prompts, scheduler.bound_new_tokens, "if state.runtime.reserved_tokens:", "if 0:"),
        (long_prompts, future_kv.future_tokens, "if tokens_left(req) <= 1:", "if False:"),
        (prefills_between, Plan.entries.fget, "if not self.tail_slots:", "if True:"),
        (retracted, speculation.shorten_published, "published.record()", "pass"),
        (in_pages, batch.compact_due_requests, "(binding.scheduler)", "(binding.scheduler)[:2]"),
        (
            in_pages,
            kv_cache.release_evicted,
            "plan.row_tokens + plan.tail_slots",
            "plan.row_tokens",
        ),
        (goes_on, reuse.copy_history, "buffer[copy] = buffer[history]", "break"),
        (
            goes_on,
            reuse._history_of,
            "min(kv.kv_committed_len + state.kv.evicted_tokens, len(text))",
            "kv.kv_committed_len + state.kv.evicted_tokens",
        ),
        (goes_on_in_pages, reuse.whole_row_length, "if reuse.row_key is None else", "if True else"),
        (
            goes_on_in_pages,
            kv_cache.fill_last_page,
            "max(kv.kv_allocated_len, row_tokens + slots)",
            "row_tokens + slots",
        ),
        (
            goes_on_with_eagle,
            continuation._private_key,
            "if by_id >= row_tokens - shared:",
            "by_id = row_tokens - shared\n        if False:",
        ),
        (
            goes_on_with_eagle,
            retraction.limit_prefix_match,
            "continued.row_tokens + state.runtime.boundary_tokens",
            "continued.row_tokens",
        ),
        (goes_on_with_eagle, reuse._lock_shared, "+ state.runtime.boundary_tokens", ""),
        (restored, Runtime._save, "self.recorder.add_accepted(*ends)", "pass"),
        (
            restored,
            KVState.forget_running_step,
            "self.running_steps = self.step_tokens = 0",
            "pass",
        ),
        (restored, KVState.forget_running_step, "== logical_tokens", "== -1"),
        (
            restored,
            backup.restore_row,
            "places = [(buffer, slots)",
            "places = [(buffer.clone(), slots)",
        ),
        (retracted, speculation.place_draft, "forward_batch.positions + shift", "shift"),
    ],
)
def test_the_lives_above_look_at_something(
    life: Life, function: Any, piece: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, function, piece, instead)
    with pytest.raises(AssertionError):
        life()

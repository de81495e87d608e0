"""Lives of a model some of whose layers have a state; ``fuzz.py --states``: random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from planted_bugs import plant
from pool_calls import asks, same_draws, turn
from pool_content import POOL, TRACKED
from pool_machine import run_machine
from pool_state_machine import STRATEGIES, StatePoolMachine
from pool_states import StateWorld, state_flags

from sgl_skipkv.patches.engine import linear_states, release
from sgl_skipkv.patches.startup import measurements

pytestmark = pytest.mark.usefixtures("plugin_loaded")
fixtures = (same_draws,)  # for every test

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
Life = Callable[[StateWorld], None]


@contextmanager
def world_of(copies: bool, overlap: bool, page_tokens: int = 1) -> Iterator[StateWorld]:
    with state_flags(copies=copies, page_tokens=page_tokens):
        world = StateWorld(copies=copies, overlap=overlap, page_tokens=page_tokens)
        yield world
        world.run_dry()
        world.drain()


def test_random_lives() -> None:
    """A few of those that ``make fuzz`` has thousands of."""
    seen = run_machine(16, steps=25, seed=4, kind=StatePoolMachine)
    wanted = ("compactions", "states kept", "states copied", "states continued", "finished")
    assert min(seen[name] for name in wanted) > 0


def retracted(world: StateWorld, generated: int, prompt: list[int] = PROMPT) -> Any:
    """A request that is recomputed as soon as it has generated so many tokens, when the tree has
    lost the states of its prompt."""
    world.arrive([20, 21, 22, 23], 60, **asks(12, "streaming"))  # SGLang retracts the shorter one
    turn(world, 4)
    call = world.arrive(prompt, 40, **asks(12, "streaming"))
    while len(call.output_ids) < generated:
        turn(world, 1)
    while not call.retraction_count:
        world.retract_now = True
        turn(world, 1)
    world.evict_tree(POOL)
    kept = world.count["states kept"]
    turn(world, 3)
    assert call in world.owners() and world.count["states kept"] == kept
    return call


def recomputed(world: StateWorld) -> None:
    """The tree has no state of the prompt, and is not given one of more tokens in its place."""
    call = retracted(world, 1 if not world.copies_states else 14)
    assert world.probe([*PROMPT, *call.output_ids]) == 0


def recomputed_in_pages(world: StateWorld) -> None:
    """The same, of a prompt that is longer than a page."""
    retracted(world, 20, [*range(20, 40)])


def follows_a_compaction(world: StateWorld) -> None:
    """Whose row has lost tokens leaves its prompt, and nothing that it has generated."""
    call = world.arrive(PROMPT, 40, **asks(12, "streaming"))
    world.run_dry()
    assert call.skipkv.kv.evicted_tokens
    text = [*PROMPT, *call.output_ids]
    assert 0 < world.probe(text) <= len(PROMPT)
    after = world.arrive([*text, 3], 20)
    world.run_dry()
    assert after.finished() and world.count["states continued"] == 1


def waits_for_a_track(world: StateWorld) -> None:
    """It has matched a prefix; when it is admitted the tree has lost the state of that."""
    world.arrive(PROMPT, 1)
    world.run_dry()
    holders = [world.arrive([30 + i] * 5, 30, **asks(8, "rkv")) for i in range(TRACKED)]
    turn(world, 3)
    call = world.arrive([*PROMPT, 3], 9, **asks(8, "rkv"))
    large = world.arrive([40] * (POOL - 16), 1)  # needs no track, and has no room
    turn(world, 2)
    assert world.waiting_queue == [call, large]
    world.evict_tree(0, 40)
    world.abort(holders[0])
    while call in world.waiting_queue:
        turn(world, 1)
    assert world.count["states continued"] == 0


def measured(world: StateWorld) -> None:
    world.arrive(PROMPT, 9, **asks(8, "rkv"))
    world.run_dry()
    world.measure(30)
    world.check()


@pytest.mark.parametrize("repaired", [True, False])
@pytest.mark.parametrize("beside", [3, 4])
def test_a_prefill_beside_a_step_that_copies(
    beside: int, repaired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own requests, of which one is aborted while a step copies its state: without what
    the world repairs, the tree gets that state under the length of the copy before it."""
    if not repaired:
        monkeypatch.setattr(StateWorld, "set_next_copies", lambda world, batch: None)
    with state_flags(copies=True):
        world = StateWorld(copies=True)
        call = world.arrive(PROMPT[:5], 60)
        turn(world, beside)
        world.arrive([30, 31], 1)
        while len(call.output_ids) < 10:
            turn(world, 1)
        world.abort(call)
        if repaired:
            turn(world, 3)
            world.drain()
        else:
            with pytest.raises(AssertionError, match="the state of other tokens"):
                turn(world, 3)


LIVES: list[Life] = [recomputed, follows_a_compaction, waits_for_a_track, measured]


@pytest.mark.parametrize("strategy", [*dict.fromkeys(STRATEGIES)], ids=str)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_states_stand_for_their_tokens(life: Life, strategy: tuple[bool, bool]) -> None:
    with world_of(*strategy) as world:
        life(world)
    assert not world.owners()


@pytest.mark.parametrize("life", [recomputed_in_pages, measured], ids=lambda life: life.__name__)
def test_states_stand_for_their_tokens_in_pages(life: Life) -> None:
    with world_of(True, True, page_tokens=16) as world:
        life(world)
    assert not world.owners()


NOT_GIVEN_BACK = "tree.free_kv_row(req.kv, [(0, len(ids))]); tree.unlock(req.lock); pages.free(req)"
LIMIT = "(stand_for or 0) > limit"


@pytest.mark.parametrize(
    ("life", "how", "function", "piece", "instead"),
    [
        (recomputed, STRATEGIES[0], release.keep_states, LIMIT, f"{LIMIT} + 1"),
        (recomputed, STRATEGIES[1], release.keep_states, f"is_finished or {LIMIT}", "is_finished"),
        (recomputed_in_pages, (True, True, 16), release.keep_states, LIMIT, f"{LIMIT} + 16"),
        (
            *(waits_for_a_track, STRATEGIES[0], linear_states.forget_match),
            *("req.kv.mamba_pool_idx = req.kv.mamba_cow_src_index", "req.kv.mamba_pool_idx"),
        ),
        (
            *(measured, STRATEGIES[1], measurements._prefill),
            *("release_kv_cache(req, tree, checkpoint=False)", NOT_GIVEN_BACK),
        ),
    ],
)
def test_the_lives_above_look_at_something(
    life: Life,
    how: tuple[Any, ...],
    function: Any,
    piece: str,
    instead: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, function, piece, instead)
    with pytest.raises(AssertionError), world_of(*how) as world:
        life(world)

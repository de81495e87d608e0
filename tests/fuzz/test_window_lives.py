"""Lives with window layers in a pool of their own; ``fuzz.py --windows``: random ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from planted_bugs import plant
from pool_calls import asks, same_draws, turn
from pool_content import POOL
from pool_machine import PARAMETERS, run_machine
from pool_window_machine import WindowPoolMachine
from pool_windows import WindowWorld, window_flags

from sgl_skipkv.patches.engine import release, reuse, window_pool

pytestmark = pytest.mark.usefixtures("plugin_loaded")
fixtures = (same_draws,)  # for every test

CHUNK = 8
PRIVATE = {**asks(12, "streaming"), "kv_params": {**PARAMETERS, "protect_prompt": False}}


@pytest.fixture(params=[True, False], ids=["radix", "no radix"])
def radix(request: pytest.FixtureRequest) -> Iterator[bool]:
    with window_flags(radix=request.param, chunk=CHUNK):
        yield request.param


def world_of(radix: bool, **how: Any) -> WindowWorld:
    return WindowWorld(radix=radix, chunk=CHUNK, backup_bytes=1 << 20, **how)


def long_call(world: WindowWorld) -> Any:
    """A request that is never retracted: SGLang retracts the shorter output."""
    call = world.arrive([20, 21, 22, 23], 3 * POOL, **asks(12, "streaming"))
    turn(world, 30)
    return call


def test_random_lives() -> None:
    """A few of those that ``make fuzz`` has thousands of."""
    seen = run_machine(16, steps=25, seed=4, kind=WindowPoolMachine)
    assert min(seen["compactions"], seen["windows read"], seen["finished"]) > 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["rkv", "h2o", "streaming"])
@pytest.mark.parametrize("page", [1, 4])
def test_a_row_comes_back_with_its_windows(
    radix: bool, overlap: bool, policy: str, page: int
) -> None:
    """Every few steps: the tokens are those of a request that nobody retracts."""
    outputs = []
    for retractions in (0, 8):
        world = world_of(radix, overlap=overlap, late=overlap, window_pool=60, page_tokens=page)
        long_call(world)
        call = world.arrive([5, 6, 7, 30], 100, **asks(12, policy))
        for step in range(240):
            if call in world.running_batch.reqs and call.retraction_count < retractions:
                world.retract_now = step % 3 == 0
            turn(world, 1)
        assert (
            call.finished()
            and world.count["restored"] == world.count["retractions"] == call.retraction_count
        )
        outputs.append(list(call.output_ids))
        world.drain()
    assert outputs[0] == outputs[1] and call.retraction_count > 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("keys", [PRIVATE, asks(12, "streaming"), {"steering": 1.5}], ids=str)
def test_what_is_computed_again_leaves_the_windows(
    radix: bool, overlap: bool, keys: dict[str, Any]
) -> None:
    """In chunks, of more tokens than the window pool has, also if the tree gets none of them."""
    world = WindowWorld(radix=radix, chunk=CHUNK, overlap=overlap, late=overlap, window_pool=40)
    long_call(world)
    prompt = [5 + i % 7 for i in range(48 if keys is PRIVATE else 5)]
    call = world.arrive(prompt, 60, **keys)
    while not call.finished():
        ready = len(call.output_ids) == 55 and call in world.running_batch.reqs
        world.retract_now = ready and not call.retraction_count
        turn(world, 1)
    assert len(call.output_ids) == 60 and call.retraction_count == (keys is not PRIVATE)
    world.drain()


def retracted(world: WindowWorld) -> Any:
    """A request with a backup, whose prompt the windows have left."""
    long_call(world)
    call = world.arrive([5, 6, 7, 8, 9], 60, **asks(12, "streaming"))
    turn(world, 20)
    while not call.retraction_count:
        world.retract_now = True
        turn(world, 1)
    assert world.waiting_queue == [call] and world.count["backups"]
    return call


def test_a_prompt_that_the_windows_have_left_stays_private(radix: bool) -> None:
    """Its windows have not been restored, so the tree cannot have it."""
    world = world_of(radix)
    call = retracted(world)
    world.evict_tree(POOL)
    turn(world, 3)
    assert world.count["restored"] == 1 and call.kv.cache_protected_len == 0
    world.drain()


def test_a_restored_row_makes_room(radix: bool) -> None:
    """The tree has taken what its windows had."""
    world = world_of(radix, window_tokens=8, window_pool=40)
    call = retracted(world)
    world.waiting_queue.remove(call)
    for i in range(8):
        world.arrive([30 + i] * 12, 1)
        turn(world, 3)
    free = world.token_to_kv_pool_allocator.swa_available_size()
    assert (free < world.window_tokens - 1) == radix
    world.waiting_queue.append(call)
    turn(world, 3)
    assert world.count["restored"] == 1
    world.drain()


def in_pages(**how: Any) -> WindowWorld:
    """Pages that are larger than a window."""
    return WindowWorld(page_tokens=16, window_tokens=4, backup_bytes=1 << 20, **how)


def lose_prompt(world: WindowWorld, call: Any) -> None:
    """The request is retracted, and the tree loses its prompt before it is restored."""
    world.retract_now = True
    turn(world, 1)
    assert world.waiting_queue == [call] and world.count["backups"] == 1
    world.evict_tree(POOL)
    turn(world, 1)
    assert world.count["restored"] == 1


def test_a_prompt_whose_windows_were_gone_stays_private() -> None:
    """They had left the tree when the row was backed up, with its last window in the same pages."""
    with window_flags(unlocks=True):
        world = in_pages()
        long_call(world)
        prompt = [5 + i % 7 for i in range(17)]
        call = world.arrive(prompt, 16, **asks(12, "streaming"))
        turn(world, 8)
        world.evict_tree(0, POOL)
        lose_prompt(world, call)
        assert call.kv.cache_protected_len == 0 and not call.skipkv.kv.evicted_tokens
        world.arrive([*prompt, 30], 1)  # as long as it runs, and behind its end
        while not call.finished():
            turn(world, 1)
        world.arrive([*prompt, 31], 1)
        turn(world, 3)
        world.drain()


def test_a_history_gives_no_window_away_that_has_not_moved() -> None:
    """Its prompt is the key of others, and lies in the same pages as its last window."""
    with window_flags(every=POOL):
        world = in_pages()
        long_call(world)
        prompt = [5 + i % 7 for i in range(20)]
        call = world.arrive(prompt, 24, **asks(12, "streaming"), kv_reuse="keep")
        turn(world, 3)
        lose_prompt(world, call)
        while not call.finished():
            turn(world, 1)
        assert call.skipkv.report.compactions and world.count["histories"] == 1
        world.arrive([*prompt, 30], 1)
        turn(world, 3)
        world.drain()


def test_a_history_whose_last_window_is_there_in_part_is_not_continued() -> None:
    """It begins in front of the row's last page, whose end has a whole window of its own."""
    with window_flags():
        world = in_pages()
        keys = {**asks(20, "streaming"), "kv_reuse": "keep"}
        call = world.arrive([5 + i % 7 for i in range(17)], 17, **keys)
        while not call.finished():
            turn(world, 1)
        world.evict_tree(0, 17)  # all but the last page
        follower = world.arrive([*world.next_text(call), 30], 4, **keys)
        turn(world, 8)
        assert follower.finished() and world.count["no history, evicted"] == 1
        world.drain()


def test_the_lives_above_look_at_something(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, release.insertable_tokens, "is_out_of_windows(req.kv, state)", "False")
    evicting = window_pool.alloc_windowed_slots
    plant(monkeypatch, evicting, "max(windowed_whole - allocator.swa_available_size(), 0)", "0")
    with window_flags(chunk=CHUNK):
        with pytest.raises(AssertionError):
            test_a_prompt_that_the_windows_have_left_stays_private(radix=True)
        with pytest.raises(RuntimeError, match="no room to restore"):
            test_a_restored_row_makes_room(radix=True)
        moving = "evict_sliding_windows(req, chunk_from - _lag_tokens(tree_cache))"
        plant(monkeypatch, window_pool.free_behind_chunk, moving, "evict_sliding_windows")
        with pytest.raises(AssertionError, match="nobody runs who could make room"):
            test_what_is_computed_again_leaves_the_windows(radix=True, overlap=True, keys=PRIVATE)


@pytest.mark.parametrize(
    ("function", "piece", "instead", "life"),
    [
        (
            *(window_pool.is_out_of_windows, "max(_cursor(kv), state.kv.windows_from)"),
            *("_cursor(kv)", test_a_prompt_whose_windows_were_gone_stays_private),
        ),
        (
            *(release.close_request, "free_unmoved(tree_cache, req, state)"),
            *("pass", test_a_history_gives_no_window_away_that_has_not_moved),
        ),
        (
            *(
                reuse._has_whole_row,
                "req.prefix_len < page_floor(row_tokens, tree_cache.page_size)",
            ),
            *("False", test_a_history_whose_last_window_is_there_in_part_is_not_continued),
        ),
    ],
)
def test_the_lives_in_pages_look_at_something(
    function: Any, piece: str, instead: str, life: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, function, piece, instead)
    with pytest.raises(AssertionError):
        life()

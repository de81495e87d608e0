"""Lives with HiCache written out, on SGLang's pools, tree and second level."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pool_calls import asks, same_draws
from pool_content import POOL
from pool_world import World

pytestmark = pytest.mark.usefixtures("plugin_loaded")
fixtures = (same_draws,)  # for every test

REUSING = {**asks(20, "streaming"), "kv_reuse": "budget"}


def with_a_history_in_host_memory(**how: Any) -> tuple[World, list[int]]:
    """A world, and the next prompt of a conversation that the device has evicted."""
    world = World(host_ratio=8.0, **how)
    first = world.arrive([5, 6, 7, 20], 40, **REUSING)
    world.run_dry()
    world.check()
    world.evict_tree(POOL)
    return world, [*first.origin_input_ids, *first.output_ids, 9, 8, 7]


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_what_the_device_has_evicted_is_loaded(page_tokens: int, write_policy: str) -> None:
    world, prompt = with_a_history_in_host_memory(
        page_tokens=page_tokens, write_policy=write_policy, late=True
    )
    second = world.arrive(prompt, 40, **REUSING)
    world.run_dry()
    assert second.host_loaded_length > 0 and world.count["loaded"] == 1
    # The last token of an output has no KV.
    assert second.skipkv.report.summary["reused_tokens"] == len(prompt) - 4
    world.drain()


def test_few_tokens_are_loaded_as_well() -> None:
    """SGLang computes fewer than ten instead. Tokens of a history cannot be computed."""
    world = World(host_ratio=8.0)
    first = world.arrive([5, 6], 3, **REUSING)
    world.run_dry()
    world.check()
    world.evict_tree(POOL)
    second = world.arrive([*first.origin_input_ids, *first.output_ids, 9], 4, **REUSING)
    world.run_dry()
    assert 0 < second.host_loaded_length < world.tree_cache.load_back_threshold
    assert second.skipkv.report.summary["kv_reuse_miss"] == "none"
    world.drain()


def test_a_history_that_cannot_be_loaded_waits_and_is_then_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While others run, the load may work later; where nobody runs, it will not."""
    world, prompt = with_a_history_in_host_memory()
    monkeypatch.setattr(world.tree_cache, "load_back", lambda *args, **kwargs: False)
    running = world.arrive([30, 31, 32], 12)
    while not running.output_ids:
        world.step()
    second = world.arrive(prompt, 20, **REUSING)
    while not running.finished():
        assert world.waiting_queue == [second]
        world.step()
        world.check()
    with pytest.raises(AssertionError, match="everybody waits"):
        world.step()  # this pass learns it, and the next one does without
    while not second.finished():
        world.step()  # without checks: to the books the history is still there
    assert second.skipkv.report.summary["kv_reuse_miss"] == "evicted"


def test_no_storage_is_attached_where_requests_leave_rows() -> None:
    from sgl_skipkv.patches.engine.hicache import refuse_storage
    from sgl_skipkv.patches.limits import ServerLimits

    def attach(scheduler: Any, recv_req: Any) -> str:
        return "attached"

    refused = refuse_storage(attach, World(), None)
    assert not refused.success and "--hicache-storage-backend" in refused.message
    refused_reuse = SimpleNamespace(limits=ServerLimits(without_reuse=("a storage",)), runtime=1)
    for allowed in (SimpleNamespace(), SimpleNamespace(skipkv=refused_reuse)):
        assert refuse_storage(attach, allowed, None) == "attached"

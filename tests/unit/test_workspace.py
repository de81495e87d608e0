"""What compactions take at once, however many requests are due, and the room that is kept for
it."""

from __future__ import annotations

import weakref
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import kernel_bytes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool_machine import PARAMETERS
from pool_world import World
from synthetic import SyntheticServer, served

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction import compactor
from sgl_skipkv.eviction.in_parts import in_parts
from sgl_skipkv.eviction.workspace import split_to_fit
from sgl_skipkv.patches.startup import bind

QWEN_HEADS = 28 * 4
WORK_BYTES = ServerConfig().compaction_work_bytes


pytestmark = pytest.mark.usefixtures("plugin_loaded")


@given(st.lists(st.integers(1, 60_000), max_size=80), st.sampled_from([0, 8, QWEN_HEADS, 512]))
def test_every_call_is_in_one_part_that_fits(row_tokens: list[int], heads: int) -> None:
    parts = split_to_fit(row_tokens, WORK_BYTES, heads=heads)
    assert sorted(i for part in parts for i in part) == list(range(len(row_tokens)))
    for part in parts:
        tokens = sum(row_tokens[i] for i in part)
        assert len(part) == 1 or tokens * (16 * heads + 128) <= WORK_BYTES
    for part, after in pairwise(parts):  # and none could have been larger
        tokens = sum(row_tokens[i] for i in (*part, after[0]))
        assert tokens * (16 * heads + 128) > WORK_BYTES


def test_calls_of_a_7b_model_that_share_a_part() -> None:
    """64 requests of a budget of 1,024 take two parts."""
    parts = split_to_fit([1024 + 128] * 64, WORK_BYTES, heads=QWEN_HEADS)
    assert [len(part) for part in parts] == [45, 19]
    assert len(split_to_fit([1024 + 128] * 512, WORK_BYTES, heads=QWEN_HEADS)) == 12


@pytest.mark.parametrize(("policy", "counted"), [("distinct", 512), ("keydiff", 0)])
def test_a_compaction_without_kernels_counts_its_policys_products(
    policy: str, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def spied(*arguments: Any, **sizes: Any) -> Any:
        if "key_numbers" in sizes:  # not a replay of steps
            given.append(sizes.get("block_tokens", 0))
        return in_parts(*arguments, **sizes)

    monkeypatch.setattr(compactor, "in_parts", spied)
    server = SyntheticServer()
    server.run(served(server, kv_policy=policy), 60)
    assert given and {*given} == {counted}


def test_products_of_values_count_where_no_kernel_scores() -> None:
    """Of one rank, and of two."""
    for ranks, most in ((1, 8), (2, 7)):
        parts = split_to_fit([1024 + 128] * 64, WORK_BYTES, ranks=ranks, block_tokens=512)
        assert len(parts[0]) == most


@pytest.mark.parametrize("row_tokens", [[1024 + 128] * 31, [4096 + 128] * 8, [30_000]])
def test_kernels_take_what_a_part_allows(row_tokens: list[int]) -> None:
    """Redundancy; importance on an H100."""
    assert len(split_to_fit(row_tokens, WORK_BYTES, heads=QWEN_HEADS)) == 1
    shape = {"layers": 28, "kv_heads": 4}
    taken = kernel_bytes.key_redundancy(row_tokens, **shape, head_dim=128)
    allowed = (16 * QWEN_HEADS + 128) * sum(row_tokens)
    assert 0.9 < taken / allowed < 1.0
    scratches = {"window": 8, "programs": 2 * 132}
    assert kernel_bytes.window_attention(row_tokens, **scratches, **shape) < WORK_BYTES


@pytest.mark.parametrize("after_capture", [False, True])
def test_the_workspace_is_reserved_until_the_pool_is_sized(
    monkeypatch: pytest.MonkeyPatch, after_capture: bool
) -> None:
    """While SGLang sizes its pool, and not a moment longer. On a device with kernels."""
    runner = SimpleNamespace(device="cpu")
    runner.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(5, 1))
    runner.token_to_kv_pool = SimpleNamespace(post_capture_active=after_capture)
    worker = SimpleNamespace(model_runner=runner)
    scheduler = SimpleNamespace(server_args=None, tp_worker=worker)
    rows: list[int] = []
    side = SimpleNamespace(use_rows=rows.append)
    config = ServerConfig(kv_budget=64, compaction_work_bytes=1000)
    held: list[weakref.ref[torch.Tensor]] = []
    reserve = bind._reserved_workspace

    def spied(*args: Any) -> torch.Tensor | None:
        workspace = reserve(*args)
        if workspace is not None:
            held.append(weakref.ref(workspace))
        return workspace

    def sizes_its_pool(scheduler: Any) -> None:
        (workspace,) = (one() for one in held)
        assert workspace is not None and workspace.nbytes == 1000

    monkeypatch.setattr(bind, "_reserved_workspace", spied)
    monkeypatch.setattr(bind, "config_of", lambda _: config)
    monkeypatch.setattr(bind, "_records", lambda _: True)
    monkeypatch.setattr(bind, "build_model_side", lambda *_: side)
    assert reserve(config, scheduler) is None, "plain torch"
    monkeypatch.setattr(bind, "uses_triton", lambda _: True)
    bind.reserve(sizes_its_pool, scheduler)
    assert [one() is not None for one in held] == [after_capture] and rows == [5]
    assert scheduler.skipkv_reasons == []


@pytest.mark.parametrize("overlap", [True, False])
def test_parts_change_nothing_but_the_memory(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are due in the same step of the real scheduler's batch, together and by
    ones."""
    found = []
    for work_bytes in (WORK_BYTES, 0):
        world = World(overlap=overlap, work_bytes=work_bytes)
        together: list[int] = []
        plan = world.runtime.compactor.planner.plan

        def spied(calls: Any, plan: Any = plan, together: list[int] = together) -> Any:
            together.append(len(calls))
            return plan(calls)

        monkeypatch.setattr(world.runtime.compactor.planner, "plan", spied)
        calls = [
            world.arrive([5, 6, 7, 20 + i], 50, kv_budget=8, kv_policy=name, kv_params=PARAMETERS)
            for i, name in enumerate(("streaming", "random", "rkv"))
        ]
        world.run_dry()
        assert min(call.skipkv.report.summary["compactions"] for call in calls) > 4
        assert (max(together) > 1) == (work_bytes == WORK_BYTES)
        found.append([(list(call.output_ids), call.skipkv.report.summary) for call in calls])
        world.drain()
    assert found[0] == found[1]


def test_a_replay_of_many_steps_is_split() -> None:
    """48 bytes per cached token and step; the default ring of 8 hardly counts."""
    row_tokens = [1024 + 128] * 64
    assert len(split_to_fit(row_tokens, WORK_BYTES, steps=8)) == 1
    parts = split_to_fit(row_tokens, WORK_BYTES, steps=1024)
    assert all(len(part) == 1 for part in parts) and len(parts) == 64


def test_gathered_keys_are_counted() -> None:
    """24 bytes per number of a layer's keys: the default holds six requests of a 7B model."""
    row_tokens = [1024 + 128] * 16
    parts = split_to_fit(row_tokens, WORK_BYTES, heads=QWEN_HEADS, key_numbers=4 * 128)
    assert [len(part) for part in parts] == [6, 6, 4]

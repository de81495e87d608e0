"""The runtime where a GPU's rules about memory hold: the same kept sets, and it waits for nothing.

A backup and everything else of an engine is in ``fuzz/test_lives_on_gpu.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernels_on_cpu import on_triton
from rank_world import on_ranks
from score_inputs import some_reach
from stand_in_gpu import gpu, stand_in_gpu
from synthetic import SyntheticServer, unlike
from test_ranks import SCORED, lives
from test_runtime_on_triton import ASKED

from sgl_skipkv.kernels.on_device import device_tensors, started_copy
from sgl_skipkv.ranks import ONE_RANK, Ranks
from sgl_skipkv.request.demand import Demand

#: more than each of these requests evicts at, and a second time
STEPS = 62
#: what is copied while a server starts, or at its first budgeted request
FIRST_FILES = (
    "sgl_skipkv/policy/inputs/query_centres.py",
    "sgl_skipkv/recording/sentence_table.py",
)


def kept_positions(device: torch.device) -> list[list[list[int]]]:
    """Of every compaction of every request."""
    server = SyntheticServer(check_ledger=False, rows=len(ASKED), tracks=len(ASKED), device=device)
    calls = unlike(server, ASKED, kv_budget=24)
    for _ in range(STEPS):
        server.decode(*calls)
    return [call.compactions for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "triton"])
def test_every_policy_keeps_the_same_on_a_gpu(kernels: bool) -> None:
    expected = kept_positions(torch.device("cpu"))
    with on_triton() if kernels else nullcontext(), stand_in_gpu() as stand_in:
        found = kept_positions(gpu())
    assert found == expected and all(len(kept) >= 3 for kept in found)
    waits = [at for _, at in stand_in.waits if not at.startswith(FIRST_FILES)]
    assert not waits, "a running server waits for its GPU"


def _on_gpus(ranks: Ranks, policies: list[str], kernels: bool) -> tuple[Any, list[str]]:
    """What was kept, and what was waited for."""
    with on_triton() if kernels else nullcontext(), stand_in_gpu() as stand_in:
        found = lives(ranks, policies, device=gpu(), steps=70)
    return found, [at for _, at in stand_in.waits if not at.startswith(FIRST_FILES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policies", "kernels"), [(SCORED, False), (["skipkv", "vase", "raas", "distinct"], True)]
)
def test_ranks_with_gpus_keep_what_one_process_keeps(policies: list[str], kernels: bool) -> None:
    """No machine with two GPUs has run them."""
    first, second = on_ranks(2, _on_gpus, policies, kernels)
    assert first == second
    assert first == (lives(ONE_RANK, policies, steps=70), [])


def test_operands_of_two_devices_are_an_error() -> None:
    with stand_in_gpu():
        table, number = torch.zeros(3, 2, device=gpu()), torch.tensor(2.0)
        table[1] = 3.0
        assert (table * number + table.sum()).tolist() == [[6, 6], [12, 12], [6, 6]]
        assert table[torch.tensor([1, 1])].device == gpu()
        for mix in (
            lambda: table + torch.ones(2),
            lambda: torch.cat([table, torch.ones(1, 2)]),
            lambda: table.index_select(0, torch.tensor([1])),
            lambda: table.index_put_((torch.tensor([1]),), torch.ones(1, 2)),
            lambda: torch.ones(3)[torch.zeros(1, dtype=torch.int64, device=gpu())],
        ):
            with pytest.raises(AssertionError, match="operands on the CPU"):
                mix()
    with pytest.raises(AssertionError, match="outside of stand_in_gpu"):
        table.sum()


def test_a_copy_arrives_with_its_event() -> None:
    """Read too early it is not there, nor by an earlier event; its own stream finds it."""
    with stand_in_gpu() as stand_in:
        given = torch.tensor([5, 7]).pin_memory().to(gpu(), non_blocking=True)
        earlier = torch.Event(gpu())
        earlier.record()
        counts, copied = started_copy(given)
        earlier.synchronize()
        back = torch.empty(2, dtype=torch.int64, device=gpu())
        back.copy_(counts, non_blocking=True)
        assert back.tolist() == [5, 7] and counts.tolist() == [-1, -1]
        copied.synchronize()
        assert counts.tolist() == [5, 7]
        counts, copied = started_copy(back.sum())
        assert (int(counts), copied.query(), int(counts)) == (-1, False, -1)
        assert Demand(20, counts, copied).measured_row_tokens == 12
        assert copied.query()
        assert [one.tolist() for one in device_tensors([[1], [2, 3]], gpu())] == [[1], [2, 3]]
        assert not stand_in.waits


def test_pinned_memory_is_taken_at_start() -> None:
    """Running requests would wait while it is pinned."""
    config = {"retraction_backup_bytes": 1 << 16, "kv_reuse_bytes": 1 << 15}
    with stand_in_gpu() as stand_in:
        runtime = SyntheticServer(device=gpu(), check_ledger=False, **config).runtime
        for memory in (runtime.host_memory, runtime.histories.memory):
            assert memory.free_chunks and all(map(stand_in.is_pinned, memory.free_chunks))
        with pytest.raises(MemoryError, match="bytes of host memory"):
            SyntheticServer(device=gpu(), **{**config, "retraction_backup_bytes": 1 << 60})
    lazy = SyntheticServer(check_ledger=False, **config).runtime
    assert not lazy.host_memory.free_chunks and not lazy.histories.memory.free_chunks


def test_what_waits_is_listed() -> None:
    with stand_in_gpu() as stand_in:
        some_reach(1, 2, gpu())  # of a test
        SyntheticServer(device=gpu(), check_ledger=False).recorder.reserve()
    files = {at.partition(":")[0] for _, at in stand_in.waits}
    assert files == set(FIRST_FILES)

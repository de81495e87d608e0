"""``torch.OutOfMemoryError`` at every allocation of a compaction: no request is silently wrong.

Whatever fails, fails before the first row changes. So a request either compacts exactly as it would
have, now or when it is planned alone, or it keeps its row and ends with its ``failure`` set.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import pytest
import torch
from kernels_on_cpu import as_one_each, on_triton
from scarce import Scarce
from synthetic import Call, SyntheticServer, decode_until_due, unlike

from sgl_skipkv.eviction.compaction import Compaction
from sgl_skipkv.policy import names
from sgl_skipkv.recording.sentence_table import TableMoves
from sgl_skipkv.reuse.continuation import FinishedRow

#: skipkv, rkv and snapkv allocate what skipkv+ allocates, or less
SCORED = [name for name in names() if name not in ("full", "skipkv", "rkv", "snapkv")]
#: policy, with kernels, and how many of the lines that allocate are passed over for one that fails
WALKS = [*((name, False, 1) for name in SCORED), ("skipkv+", True, 13), ("h2o", True, 13)]
REQUESTS = 3


def due_together(policy: str, **keys: Any) -> tuple[SyntheticServer, list[Call]]:
    """Requests that have compacted once and are due again, with sentences of every length."""
    # Every world is copied many times; host memory for backups would be copied with it.
    small = {"max_sentences": 12, "retraction_backup_bytes": 0}
    server = SyntheticServer(rows=REQUESTS, tracks=REQUESTS, **small)
    parameters = {"tau": 0.2} if policy.startswith("skipkv") else {}
    calls = unlike(server, [(policy, parameters)] * REQUESTS, **keys)
    decode_until_due(server, calls)
    server.compact(calls)
    decode_until_due(server, calls)
    return server, calls


def compacted(
    server: SyntheticServer, calls: Sequence[Call], scarce: Scarce, *, kernels: bool = False
) -> None:
    """Compact the requests with little memory; those that do not fail compact once more later."""
    rows = {call.rid: server.row_of(call) for call in calls}
    vectors = server.recorder.sentences.vectors.clone()
    with ExitStack() as stack:
        if kernels:
            stack.enter_context(on_triton())
            # What Triton's interpreter does to run a kernel is no allocation of ours.
            stack.enter_context(as_one_each(lambda name, again: None))
        compact = server.compaction_of(calls)
        with scarce:
            done = compact()
    server.book(done, calls)
    failed = [call for call in calls if call.state.failure is not None]
    for call in failed:
        assert "OutOfMemoryError" in str(call.state.failure)
        assert server.row_of(call) == rows[call.rid]
        track_id = call.state.held.track_id
        assert torch.equal(server.recorder.sentences.vectors[track_id], vectors[track_id])
    sound = [call for call in calls if call not in failed]
    if sound:
        decode_until_due(server, sound)
        server.compact(sound)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "kernels", "stride"), WALKS)
def test_one_failed_allocation_changes_nothing(policy: str, kernels: bool, stride: int) -> None:
    """At every line that allocates, at its last allocation. The requests were planned together;
    then each is planned alone, and keeps what it would."""
    world = due_together(policy)
    expected, counted = deepcopy(world), Scarce()
    compacted(*expected, counted, kernels=kernels)
    assert counted.allocations > 20
    for number in [*counted.places.values()][::stride]:
        server, calls = deepcopy(world)
        compacted(server, calls, Scarce(number), kernels=kernels)
        assert [call.state.failure for call in calls] == [None] * REQUESTS, number
        assert [call.compactions for call in calls] == [one.compactions for one in expected[1]]


@pytest.mark.parametrize("policy", SCORED)
def test_no_memory_at_all_ends_the_requests_that_are_due(policy: str) -> None:
    """From some allocation on nothing is left: each request is whole, or fails and is untouched."""
    world = due_together(policy)
    expected, counted = deepcopy(world), Scarce()
    compacted(*expected, counted)
    ended = 0
    for number in range(0, counted.allocations, 12):
        server, calls = deepcopy(world)
        compacted(server, calls, Scarce(number, once=False))
        for call, one in zip(calls, expected[1], strict=True):
            failed = call.state.failure is not None
            ended += failed
            assert failed or call.compactions == one.compactions
    assert ended


def test_dropping_thoughts_with_little_memory_changes_nothing() -> None:
    """At every line that allocates: the request fails, and leaves no history of a changed row."""
    world = due_together("h2o", kv_reuse="budget")  # which has statistics to drop, too

    def dropped(server: SyntheticServer, call: Call, scarce: Scarce) -> Compaction | None:
        generated, due = (call.prompt_tokens, call.positions[-1] - 8), server.due(call)
        with scarce:
            return server.runtime.compactor.drop(due, generated, server.req_to_token)

    counted = Scarce()
    server, (one, *_) = deepcopy(world)
    expected = dropped(server, one, counted)
    assert expected is not None and counted.allocations > 5
    assert len(expected.freed[0]) == len(one.slots) - one.prompt_tokens - 9
    for number in counted.places.values():
        server, (call, *_) = deepcopy(world)
        row, vectors = server.row_of(call), server.recorder.sentences.vectors.clone()
        assert dropped(server, call, Scarce(number)) is None
        assert "OutOfMemoryError" in str(call.state.failure)
        assert server.row_of(call) == row
        assert torch.equal(server.recorder.sentences.vectors, vectors)
        tokens = array("q", [3] * call.prompt_tokens + call.output_ids)
        left = FinishedRow(tokens[: call.prompt_tokens], tokens, tokens[: len(row)])
        assert server.runtime.leave_history(call.state, "namespace", left) is None


def test_writing_a_compaction_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the walk above would pass for want of an allocation that could fail half-way."""
    server, calls = due_together("skipkv+")
    monkeypatch.setattr("sgl_skipkv.recording.sentence_table._MOVED_AT_ONCE", 2)
    entries = [plan.table.kept for plan in server.plans(calls) if plan.table is not None]
    table = server.recorder.sentences
    moves = TableMoves(
        table,
        [call.state.held.track_id for call in calls],
        entries,
        [False] * REQUESTS,
    )
    scarce = Scarce()
    with scarce:
        moves.apply()
    assert sum(map(len, entries)) > 2 and scarce.allocations == 0

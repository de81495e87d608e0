"""One compaction of several requests: planned first, then written without an allocation.

A ``Plan`` holds which tokens of one request are kept. ``Compaction`` allocates all memory that
writing the plans needs, so that everything that can fail has failed before the first row changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.eviction.page_table import RowRewrite
from sgl_skipkv.eviction.replay import kept_statistics
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.recording.sentence_table import TableMoves
from sgl_skipkv.request.last_compaction import LastCompaction
from sgl_skipkv.request.state import RequestState


class Plan(NamedTuple):
    """A request's compaction before it is applied.

    Attributes:
        positions: int64 [row tokens], logical positions before it.
        finite: bool [], whether every score was finite.
        table: sentence index of each entry that is kept in the device's sentence table; None for a
            request without sentences.
        entries: current indices of those entries.
    """

    state: RequestState
    selection: Selection
    positions: Tensor
    finite: Tensor
    row_tokens: int
    logical_tokens: int
    table: Sequence[int] | None = None
    entries: Sequence[int] = ()

    @property
    def evicted_tokens(self) -> int:
        return self.selection.evicted.shape[0]


class Compaction:
    """The plans of requests that are compacted together, and the memory to write them.

    Args:
        req_to_token: int32 [rows, width], SGLang's page table.
        check: verify the ledger (waits for the device).

    Raises:
        torch.OutOfMemoryError: nothing has changed.

    Attributes:
        freed: int64 [evicted] of each plan, slots that are unused once it is applied.
    """

    def __init__(
        self, plans: Sequence[Plan], req_to_token: Tensor, recorder: Recorder, *, check: bool
    ) -> None:
        self.plans = plans
        rows = [plan.state.row for plan in plans]
        selections = [plan.selection for plan in plans]
        positions = [plan.positions for plan in plans]
        self._rows = RowRewrite(req_to_token, rows, selections, positions, check=check)
        self.freed = self._rows.freed
        tabled = [plan for plan in plans if plan.table is not None]
        self._moves: TableMoves | None = None
        if tabled:
            self._moves = TableMoves(
                recorder.sentences,
                [plan.state.held.track_id for plan in tabled],
                [plan.entries for plan in tabled],
                [plan.state.sentences.tracker.after_delimiter for plan in tabled],
            )
        self._statistics = kept_statistics(
            [plan.state.kv.statistics for plan in plans],
            [plan.selection.kept for plan in plans],
            [plan.row_tokens for plan in plans],
        )
        kept, finite = self._rows.kept_positions, torch.stack([plan.finite for plan in plans])
        pairs = [(tensor, _host_buffer(tensor)) for tensor in (kept, finite)]
        self._copies = [(tensor, host) for tensor, host in pairs if tensor is not host]
        (_, self._kept), (_, self._finite) = pairs
        self._copied: Any = torch.Event(kept.device) if self._copies else None

    def apply(self) -> None:
        """Rewrite the rows and update the requests' states. Allocates nothing.

        The caller frees the slots and shortens SGLang's lengths.
        """
        self._rows.write()
        if self._moves is not None:
            self._moves.apply()
        for tensor, host in self._copies:
            host.copy_(tensor, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        counts = [plan.selection.kept.shape[0] for plan in self.plans]
        positions = torch.split(self._rows.kept_positions, counts)
        kept = torch.split(self._kept, counts)
        for i, plan in enumerate(self.plans):
            state, evicted_tokens = plan.state, plan.evicted_tokens
            lengths = plan.row_tokens, plan.logical_tokens
            state.kv.last = LastCompaction(
                *(positions[i], *lengths, kept[i], self._finite[i], self._copied)
            )
            state.kv.last_is_read = False
            state.kv.statistics = self._statistics[i]
            state.kv.evicted_tokens += evicted_tokens
            state.report.evicted_tokens += evicted_tokens
            state.report.compactions += 1
            if plan.table is not None:
                state.sentences.table = [*plan.table]
                state.sentences.table_closed = len(state.sentences.tracker.closed)


def _host_buffer(tensor: Tensor) -> Tensor:
    """Pinned memory for an asynchronous copy of the tensor; a CPU tensor is returned itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

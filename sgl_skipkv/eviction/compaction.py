"""One compaction of several requests: planned first, then written without an allocation.

A ``Plan`` holds which tokens of one request are kept. ``Compaction`` allocates all memory that
writing the plans needs, so that everything that can fail has failed before the first row changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.eviction.kv_move import KVMove
from sgl_skipkv.eviction.page_table import RowRewrite
from sgl_skipkv.eviction.replay import kept_statistics
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.eviction.window_move import WindowMove, WindowPool
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.recording.sentence_table import TableMoves
from sgl_skipkv.request.last_compaction import LastCompaction
from sgl_skipkv.request.pages import page_ceil
from sgl_skipkv.request.state import RequestState


class TableEntries(NamedTuple):
    """A request's entries in the device's sentence table.

    Attributes:
        known: sentence index of each entry in use.
        kept: which entries are kept.
    """

    known: list[int]
    kept: list[int]

    @property
    def sentences(self) -> list[int]:
        """Sentence index of each entry that is kept."""
        return [self.known[entry] for entry in self.kept]


class Plan(NamedTuple):
    """A request's compaction before it is applied.

    Attributes:
        head_tokens: first entries of the row that are kept whatever their score.
        positions: int64 [row tokens], logical positions before it.
        finite: bool [], whether every score was finite.
        table: None for a request without sentences.
        tail_slots, written_tokens: of ``Due``.
    """

    state: RequestState
    selection: Selection
    head_tokens: int
    positions: Tensor
    finite: Tensor
    row_tokens: int
    logical_tokens: int
    table: TableEntries | None
    tail_slots: int = 0
    written_tokens: Tensor | None = None

    @property
    def evicted_tokens(self) -> int:
        return self.selection.evicted.shape[0]

    @property
    def kept_tokens(self) -> int:
        return self.selection.kept.shape[0]

    @property
    def entries(self) -> tuple[Selection, Tensor]:
        """Which entries of the row stay, its tail too, and positions of all before it."""
        if not self.tail_slots:
            return self.selection, self.positions
        tail = torch.arange(self.tail_slots, device=self.positions.device)
        kept = torch.cat([self.selection.kept, tail + self.row_tokens])
        positions = torch.cat([self.positions, tail + self.logical_tokens])
        return self.selection._replace(kept=kept), positions


class Compaction:
    """The plans of requests that are compacted together, and the memory to write them.

    Args:
        req_to_token: int32 [rows, width], SGLang's page table.
        page_tokens: of the KV pool.
        buffers: [slots, ...] each, every layer's keys and values as they are stored, which move
            with pages of several tokens.
        windows: where window layers have a pool of their own in pages of several tokens.
        check: verify the ledger (waits for the device).

    Raises:
        torch.OutOfMemoryError: nothing has changed.

    Attributes:
        vacated: int64 [evicted] of each plan, slots that hold no token once it is applied.
        freed: of each plan, those of ``vacated`` whose page holds no token: all with pages of one.
        window_move: None without ``windows``.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        req_to_token: Tensor,
        recorder: Recorder,
        *,
        page_tokens: int,
        buffers: Sequence[Tensor],
        check: bool,
        windows: WindowPool | None = None,
    ) -> None:
        self.plans = plans
        rows = [plan.state.row for plan in plans]
        selections, positions = map(list, zip(*(plan.entries for plan in plans), strict=True))
        self._move: KVMove | None = None
        if page_tokens > 1:
            heads = [plan.head_tokens for plan in plans]
            self._move = KVMove(buffers, req_to_token, rows, selections, heads)
        self.window_move: WindowMove | None = None
        if windows is not None:
            lengths = [(one.row_tokens, one.row_tokens - one.evicted_tokens) for one in plans]
            states = [plan.state for plan in plans]
            self.window_move = WindowMove(windows, req_to_token, states, lengths, page_tokens)
        self._rows = RowRewrite(
            req_to_token, rows, selections, positions, page_tokens=page_tokens, check=check
        )
        self.vacated = self._rows.vacated
        self._entry_counts = [selection.kept.shape[0] for selection in selections]
        self.freed = [
            slots[page_ceil(count, page_tokens) - count :]
            for slots, count in zip(self.vacated, self._entry_counts, strict=True)
        ]
        tables = [(plan.state, plan.table.kept) for plan in plans if plan.table is not None]
        self._moves: TableMoves | None = None
        if tables:
            self._moves = TableMoves(
                recorder.sentences,
                [state.held.track_id for state, _ in tables],
                [kept for _, kept in tables],
                [state.sentences.tracker.after_delimiter for state, _ in tables],
            )
        self._statistics = kept_statistics(
            [plan.state.kv.statistics for plan in plans],
            [plan.selection.kept for plan in plans],
            [plan.row_tokens for plan in plans],
        )
        self._results = [self._rows.kept_positions, torch.stack([plan.finite for plan in plans])]
        written = [plan.written_tokens for plan in plans if plan.written_tokens is not None]
        if written:  # of all or of none
            self._results.append(torch.stack(written))
        self._on_host = self._results
        self._copied: Any = None
        if req_to_token.device.type != "cpu":
            self._on_host = [
                torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
                for result in self._results
            ]
            self._copied = torch.Event(req_to_token.device)

    def apply(self) -> None:
        """Rewrite the rows and update the requests' states. Allocates nothing.

        The caller frees the slots and shortens SGLang's lengths.
        """
        if self._move is not None:
            self._move.apply()  # it reads the row that is written next
        if self.window_move is not None:
            self.window_move.apply()
        self._rows.write()
        if self._moves is not None:
            self._moves.apply()
        if self._copied is not None:
            for result, host in zip(self._results, self._on_host, strict=True):
                host.copy_(result, non_blocking=True)
            self._copied.record()
        positions = torch.split(self._rows.kept_positions, self._entry_counts)
        host_positions, finite, *written = self._on_host
        kept = torch.split(host_positions, self._entry_counts)
        for i, plan in enumerate(self.plans):
            state, evicted_tokens, count = plan.state, plan.evicted_tokens, plan.kept_tokens
            state.kv.last = LastCompaction(
                *(positions[i][:count], plan.row_tokens, plan.logical_tokens),
                *(kept[i][:count], finite[i], self._copied),
                written_tokens=written[0][i] if written else None,
            )
            state.kv.last_is_read = False
            state.kv.statistics = self._statistics[i]
            state.kv.evicted_tokens += evicted_tokens
            state.report.evicted_tokens += evicted_tokens
            state.report.compactions += 1
            if plan.table is not None:
                state.sentences.table = plan.table.sentences
                state.sentences.table_closed = len(state.sentences.tracker.closed)

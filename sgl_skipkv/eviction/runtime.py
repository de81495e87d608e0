"""The only owner of per-call state, and the life of a request: open, admit, plan, commit, close.

The CPU knows how many, the device knows which. All counts (when a compaction is due, how many
tokens stay, which sentences exist) come from integers the scheduler already has; all choices (which
tokens) stay on the device. The kept positions travel to the CPU behind the decode steps and are
read at the request's next compaction, many steps later, so nothing waits for them.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.compaction import Plan, Undo, take_snapshots
from sgl_skipkv.eviction.page_table import compact_rows
from sgl_skipkv.eviction.planner import Due, Planner
from sgl_skipkv.eviction.replay import kept_statistics
from sgl_skipkv.eviction.ring_loans import RingLoans
from sgl_skipkv.offload.backup import Backup
from sgl_skipkv.offload.host_memory import HostCopies, HostMemory
from sgl_skipkv.policy.token_scores import carry_spared
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.recording.sentences import PRESETS, Delimiters, SentenceTracker
from sgl_skipkv.request.settings import RequestSettings
from sgl_skipkv.request.state import RequestState
from sgl_skipkv.request.summary import summarise
from sgl_skipkv.request.trace import TraceWriter
from sgl_skipkv.steering.steerer import Steerer


class Runtime:
    """Opens, compacts and closes the budgeted requests of one scheduler process.

    Attributes:
        rings: who records its queries when.
        planner: which tokens stay.
        host_memory: for what retracted requests held.
    """

    def __init__(
        self,
        config: ServerConfig,
        delimiters: Delimiters,
        *,
        recorder: Recorder,
        layers: int,
        scale: float,
        pool_tokens: int,
        kv_token_bytes: int,
        steerer: Steerer | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.steerer = steerer
        self.pool_tokens = pool_tokens
        self._delimiters = delimiters
        self._trace = trace
        self.rings = RingLoans(recorder.rings, config.kv_interval)
        self.planner = Planner(recorder, layers=layers, scale=scale)
        pinned = recorder.device.type != "cpu"
        self.host_memory = HostMemory(config.retraction_backup_bytes, pinned=pinned)
        self._kv_token_bytes, self.backs_up = kv_token_bytes, True
        self._open: set[RequestState] = set()
        self.opened_requests = 0
        self.total_compactions = 0
        self.total_evicted_tokens = 0

    @property
    def open_requests(self) -> int:
        """Requests that hold a row of the page table; 0 when the server is idle."""
        return len(self._open)

    def open(self, rid: str, settings: RequestSettings, prompt_ids: Sequence[int]) -> RequestState:
        """A request arrives. It holds nothing yet: no row, no slot.

        Raises:
            torch.OutOfMemoryError: the first such call, and no room for the recording buffers.
        """
        seed = zlib.crc32(array("q", prompt_ids).tobytes())
        tracker = SentenceTracker(self._delimiters, settings.policy.params.delimiters)
        self.opened_requests += 1
        state = RequestState(self, rid, settings, len(prompt_ids), seed, tracker)
        state.tracked_tokens = state.prompt_tokens
        if self.config.stagger:
            # From the prompt alone: what a request keeps must not depend on its neighbours.
            state.phase = seed % settings.policy.params.interval
        if settings.steering is not None:
            assert self.steerer is not None, "resolve_request refuses steering without a vector"
            state.schedule = self.steerer.schedule(settings.steering, prompt_ids)
        if state.needs_slot:
            self.recorder.reserve()
        return state

    def fits_pool(self, tokens: int) -> bool:
        """Whether a request could hold this many tokens, decode one more and be admitted so.

        The two extra tokens are the decode step and the one that SGLang's admission adds for page
        rounding; its comparison is strict.
        """
        return tokens + 2 < self.pool_tokens

    def can_recompute(self, state: RequestState, generated: int) -> bool:
        """Whether the request, had it lost its KV, could be prefilled again from all of its
        tokens."""
        return self.fits_pool(state.prompt_tokens + generated)

    def has_slot(self, state: RequestState, before: Sequence[RequestState] = ()) -> bool:
        """Whether a slot is left, after the requests that are admitted before it in this step."""
        if not state.needs_slot or state.slot:
            return True
        taken = sum(1 for other in before if other.needs_slot and not other.slot)
        return self.recorder.slots.free_slots > taken

    def admit(self, state: RequestState, row: int, tokens: int) -> None:
        """The request got a row of the page table: it starts to hold things.

        Args:
            tokens: of its prefill: the prompt, and what is computed again after a retraction.
        """
        if state.row is not None:
            return
        state.row, state.started = row, False
        state.restored = state.backup is not None
        if state.returns is not None and self._trace is not None:
            event = "restore" if state.restored else "recompute"
            self._trace.write(event, rid=state.rid, generated=state.returns)
        state.returns = None
        if state.needs_slot:
            state.slot = self.recorder.slots.take()
        self.rings.take(state, tokens)
        if state.schedule is not None and self.steerer is not None:
            self.steerer.calls += 1
        self._open.add(state)

    def start_recording(self, state: RequestState) -> None:
        """First forward pass of an admitted call, on that pass's stream."""
        if state.slot and not state.started:
            assert state.row is not None
            bit = PRESETS[state.settings.policy.params.delimiters]
            self.recorder.start(state.row, state.slot, bit, self.rings.loan(state))
            if state.backup is not None and state.backup.recorded is not None:
                self.recorder.restore(state.slot, state.ring, state.backup.recorded)
        state.started, state.backup = True, None

    def observe(self, state: RequestState, row_tokens: int) -> None:
        """Note the length of the request's row, at every decode step."""
        state.undo = None
        budgeted_tokens = state.budgeted_tokens(row_tokens)
        state.peak_budgeted_tokens = max(state.peak_budgeted_tokens, budgeted_tokens)
        state.budgeted_token_steps += budgeted_tokens  # their mean over decode steps is reported
        state.observed_steps += 1
        self.rings.check(state, row_tokens + state.evicted_tokens)

    def due(self, state: RequestState, row_tokens: int) -> bool:
        """Whether the request has grown ``interval`` past its budget."""
        if not state.settings.evicts or state.failure is not None:
            return False
        early = row_tokens + state.evicted_tokens < state.first_due
        return not early and state.budgeted_tokens(row_tokens) >= state.due_tokens

    def plan(self, calls: Sequence[Due]) -> list[Plan]:
        """Choose what stays. Changes nothing that another request or the scheduler can see."""
        for due in calls:
            self._read_back(due.state)
        return self.planner.plan(calls)

    def commit(
        self, plans: Sequence[tuple[RequestState, Plan]], req_to_token: Tensor
    ) -> list[Tensor]:
        """Rewrite the requests' rows; the caller frees the slots returned and shrinks lengths."""
        rows = []
        for state, _ in plans:
            assert state.row is not None
            rows.append(state.row)
        compacted = compact_rows(
            req_to_token,
            rows,
            [plan.selection for _, plan in plans],
            [plan.positions for _, plan in plans],
            check=self.config.check_ledger,
        )
        snapshots = take_snapshots(
            [plan for _, plan in plans], [positions for _, positions in compacted]
        )
        for (state, plan), (freed, _), last in zip(plans, compacted, snapshots, strict=True):
            before = state.last, state.statistics, state.known_spared
            state.undo = Undo(plan.selection, freed, *before)
            state.last, state.known_spared = last, None
            state.evicted_tokens += plan.evicted_tokens
            state.total_evicted_tokens += plan.evicted_tokens
            state.compactions += 1
            self.total_compactions += 1
            self.total_evicted_tokens += plan.evicted_tokens
        remaining = kept_statistics(
            [state.statistics for state, _ in plans],
            [plan.selection.kept for _, plan in plans],
            [plan.row_tokens for _, plan in plans],
        )
        for (state, _), statistics in zip(plans, remaining, strict=True):
            state.statistics = statistics
        found = [(state, plan, plan.spared) for state, plan in plans if plan.spared is not None]
        known = carry_spared(
            [spared for _, _, spared in found], [plan.selection.kept for _, plan, _ in found]
        )
        for (state, _, _), one in zip(found, known, strict=True):
            state.known_spared = one
        return [freed for freed, _ in compacted]

    def can_back_up(self, state: RequestState, row_tokens: int) -> bool:
        """Whether there is room in host memory for what the request holds."""
        if not state.settings.evicts or not self.backs_up:
            return False
        row_tokens += 0 if state.undo is None else state.undo.evicted_tokens
        recorded_bytes = self.recorder.request_bytes() if state.slot else 0
        return self.host_memory.fits(row_tokens * self._kv_token_bytes + recorded_bytes)

    def undo(self, state: RequestState, row: Tensor) -> Tensor:
        """Take this step's compaction back, for a backup of what the running step sees.

        It will come again, and choose the same: nothing that it depends on has changed.

        Args:
            row: int [row tokens], slots of the compacted row.

        Returns:
            int64 [row tokens before], slots of the row before it; nobody owns those that went.
        """
        undo = state.undo
        assert undo is not None
        state.last, state.statistics, state.known_spared = undo[2:]
        state.evicted_tokens -= undo.evicted_tokens
        state.total_evicted_tokens -= undo.evicted_tokens
        state.compactions -= 1
        self.total_compactions -= 1
        self.total_evicted_tokens -= undo.evicted_tokens
        state.undo = None
        return undo.slots(row)

    def back_up(self, state: RequestState, kv: Iterable[Tensor], recorded_tokens: int) -> None:
        """The request is about to lose its row; ``retract`` follows.

        Args:
            kv: float [row tokens, Hkv, d] each, its keys and values on the device. Each is copied
                before the next is asked for, so that only one need exist at a time.
            recorded_tokens: logical tokens that a forward pass has recorded.

        Raises:
            MemoryError: no room in host memory; ``can_back_up`` would have said so.
        """
        copies = HostCopies(self.host_memory)
        # The pool is full: a loop variable would hold one tensor while the next is made.
        saved_kv, recorded = list(map(copies.add, kv)), None
        if state.slot:
            ring = state.ring if state.was_recording(recorded_tokens) else 0
            recorded = self.recorder.save(state.slot, ring, copies)
        state.backup, state.recorded_tokens = Backup(saved_kv, recorded), recorded_tokens

    def forget_backup(self, state: RequestState) -> None:
        """The request must be recomputed after all."""
        if state.backup is not None:
            state.backup = None
            self._start_anew(state)

    @contextmanager
    def without_backups(self) -> Iterator[None]:
        """Nobody is backed up meanwhile."""
        self.backs_up = False
        try:
            yield
        finally:
            self.backs_up = True

    def retract(self, state: RequestState, generated: int) -> None:
        """The request lost its row. Without a backup it will be recomputed from its tokens."""
        self._read_back(state)
        self._release(state)
        state.returns = generated
        if state.backup is None:
            self._start_anew(state)

    def close(
        self, state: RequestState, row_tokens: int, output_ids: Sequence[int], reason: str | None
    ) -> None:
        """The request is over: give everything back and write down how it went."""
        state.peak_budgeted_tokens = max(
            state.peak_budgeted_tokens, state.budgeted_tokens(row_tokens)
        )
        self._read_back(state)
        self._release(state)
        generated = max(len(output_ids) - 1, 0)  # the last token was sampled and never fed
        state.tracker.feed(output_ids[state.tracker.seen_tokens :])
        state.summary = summarise(state, generated, output_ids)
        if self._trace is not None:
            self._trace.write(
                "finish",
                rid=state.rid,
                prompt_tokens=state.prompt_tokens,
                output_ids=list(output_ids),
                finish_reason=reason,
                **state.summary,
            )

    def _start_anew(self, state: RequestState) -> None:
        """Its prefill computes every token again, so eviction begins from nothing."""
        state.evicted_tokens, state.last, state.recorded_tokens = 0, None, 0
        state.tracker = SentenceTracker(self._delimiters, state.settings.policy.params.delimiters)
        state.live, state.live_closed = [], 0
        state.table, state.table_closed = [], 0
        assert state.returns is not None
        state.statistics, state.tracked_tokens = {}, state.prompt_tokens + state.returns
        state.known_spared = None

    def _read_back(self, state: RequestState) -> None:
        """Read what the last compaction kept: sentences that went whole, the trace line."""
        snapshot = state.last
        if snapshot is None or snapshot.read_back:
            return
        snapshot.read_back = True
        kept, finite = snapshot.read()
        if not finite:
            state.failure = "a score was not finite, so the kept set means nothing"
        evicted = [span for i in state.live if not _survives(span := state.span(i), kept)]
        state.live = [i for i in state.live if _survives(state.span(i), kept)]
        state.evicted_sentences += len(evicted)
        if self._trace is not None:
            self._trace.write(
                "compact",
                rid=state.rid,
                policy=state.settings.policy.name,
                prompt_tokens=state.prompt_tokens,
                generated=snapshot.logical_tokens - state.prompt_tokens,
                before=snapshot.before,
                after=len(kept),
                kept=kept,
                evicted_sentences=evicted,
            )

    def _release(self, state: RequestState) -> None:
        if state.slot:
            assert state.row is not None
            # Whoever gets the row next must not write into a slot that somebody else may hold.
            self.recorder.slots.of_row[state.row] = 0
            self.recorder.slots.give_back(state.slot)
            state.slot = 0
        self.rings.give_back(state)
        if state.schedule is not None and state.row is not None and self.steerer is not None:
            self.steerer.stop(state.row)
            self.steerer.calls -= 1
        state.row = None
        self._open.discard(state)


def _survives(span: tuple[int, int], kept: Sequence[int]) -> bool:
    """Whether an ascending list of kept positions has one in the span."""
    at = bisect_left(kept, span[0])
    return at < len(kept) and kept[at] < span[1]

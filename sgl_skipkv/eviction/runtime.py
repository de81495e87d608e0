"""The owner of per-request state: opens, admits, backs up and closes requests.

All counts follow from integers that the scheduler has, and the kept positions are read back a few
steps after a compaction, so nothing waits for the device (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from torch import Tensor

from sgl_skipkv.config import ServerConfig, name_of
from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.eviction.compactor import Compactor
from sgl_skipkv.eviction.read_back import read_back
from sgl_skipkv.kernels.on_device import device_tensors
from sgl_skipkv.metrics import Metrics
from sgl_skipkv.offload.backup import Backup
from sgl_skipkv.offload.host_memory import HostCopies, HostCopy, HostMemory
from sgl_skipkv.policy.inputs.query_centres import QueryCentres
from sgl_skipkv.ranks import ONE_RANK, Ranks
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.recording.sentences import PRESETS, SentenceTracker
from sgl_skipkv.request.parts import Held, KVState, Prompt, SentenceState
from sgl_skipkv.request.settings import RequestSettings
from sgl_skipkv.request.state import RequestState
from sgl_skipkv.request.summary import summarise, trace_fields
from sgl_skipkv.request.trace import TraceWriter
from sgl_skipkv.reuse.continuation import (
    FinishedRow,
    continue_history,
    count_conversation,
    history_of,
)
from sgl_skipkv.reuse.histories import Histories, HistoryMatch
from sgl_skipkv.reuse.history import History
from sgl_skipkv.reuse.thoughts import ThoughtTokens
from sgl_skipkv.steering.steerer import Steerer


class Runtime:
    """Opens and closes the budgeted requests of one scheduler process, and keeps what they leave.

    Attributes:
        compactor: evicts while they run.
        host_memory: for backups of retracted requests.
        histories: rows that finished requests left (``kv_reuse``).
        thoughts: the tokens around thoughts; None: ``</think>`` is not one token.
        backs_up: whether requests are backed up at all in this moment.
        has_opened: whether a request has been opened so far.
        open_requests: that hold a row of the page table; 0 when the server is idle.
        ranks: that share its requests; this is the runtime of one of them.
        recomputes: whether the server can prefill; a decode server cannot (PD disaggregation).
        metrics: that this process exports.
        page_tokens: of the KV pool.
        reserved_tokens: slots that a request may hold beyond a token per step (speculative
            decoding).
        boundary_tokens: that a key of the radix tree names behind its entry's own (EAGLE).
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        recorder: Recorder,
        scale: float,
        pool_tokens: int,
        page_tokens: int = 1,
        reserved_tokens: int = 0,
        boundary_tokens: int = 0,
        kv_token_bytes: int,
        windows_bytes: int = 0,
        reach: Tensor,
        steerer: Steerer | None = None,
        trace: TraceWriter | None = None,
        thoughts: ThoughtTokens | None = None,
        centres: QueryCentres | None,
        ranks: Ranks = ONE_RANK,
        metrics: Metrics | None = None,
        recomputes: bool = True,
    ) -> None:
        self.config, self.ranks, self.recomputes = config, ranks, recomputes
        self.metrics = Metrics() if metrics is None else metrics
        self.recorder = recorder
        self.steerer = steerer
        self.thoughts = thoughts
        self.pool_tokens, self.page_tokens = pool_tokens, page_tokens
        self.reserved_tokens, self.boundary_tokens = reserved_tokens, boundary_tokens
        self._trace = trace
        self.compactor = Compactor(
            config,
            recorder=recorder,
            scale=scale,
            page_tokens=page_tokens,
            trace=trace,
            centres=centres,
            reach=reach,
            ranks=ranks,
            metrics=self.metrics,
        )
        pinned = recorder.device.type != "cpu"
        self.host_memory = HostMemory(config.retraction_backup_bytes, pinned=pinned)
        self.histories = Histories(config.kv_reuse_bytes, pinned=pinned)
        # Of a backup: of each token of the row, and of window layers with a pool of their own.
        self._kv_token_bytes, self._windows_bytes = kv_token_bytes, windows_bytes
        self.backs_up = self.is_measured = True
        self.has_opened, self.open_requests = False, 0
        if ranks.size > 1 or pinned:
            self._reserve()

    def _reserve(self) -> None:
        """Take all memory at start: ranks that find none later would part, and running requests
        would wait while memory is pinned.

        Raises:
            torch.OutOfMemoryError: no device memory for recording.
            MemoryError: no host memory for copies.
        """
        self.recorder.reserve()
        self.host_memory.reserve()
        self.histories.memory.reserve()

    def take_measurements(self, centres: QueryCentres | None, reach: Tensor) -> None:
        """Score by what was measured of new weights from now on."""
        self.compactor.planner.take_measurements(centres, reach)
        self.is_measured = True

    def open(self, rid: str, settings: RequestSettings, prompt_ids: Sequence[int]) -> RequestState:
        """Create the state of a request that arrives: it has no row, no KV slot, no track yet.

        Raises:
            MemoryError: the first request that evicts: no host memory for backups. On a GPU it was
                taken at start.
        """
        state = RequestState(
            self,
            name_of(rid),
            settings,
            Prompt.of(()),
            kv=KVState(followed_tokens=0),
            sentences=self._no_sentences(settings),
        )
        self.has_opened = True
        self.metrics.opened(state)
        self.take_prompt(state, prompt_ids)
        if settings.evicts:
            self.host_memory.reserve()
        if settings.kv_reuse == "budget" and state.needs_track:
            self.histories.memory.reserve()
        if state.needs_track:
            self.recorder.reserve()
        return state

    def take_prompt(self, state: RequestState, prompt_ids: Sequence[int]) -> None:
        """The prompt of a request that has no row yet; again where SGLang changes it."""
        state.prompt = Prompt.of(prompt_ids)
        state.kv.followed_tokens = len(prompt_ids)
        if (steering := state.settings.steering) is not None:
            assert self.steerer is not None, "resolve_request refuses steering without a vector"
            state.schedule = self.steerer.schedule(steering, prompt_ids)

    @property
    def most_tokens(self) -> int:
        """KV tokens with which a request can be admitted and decode one more.

        Beside the token of the decode step SGLang's admission adds a page, for what is not used of
        the first and the last one; its comparison is strict.
        """
        return self.pool_tokens - self.page_tokens - self.reserved_tokens - 2

    def fits_pool(self, tokens: int) -> bool:
        """Whether a request with this many KV tokens can be admitted and decode one more."""
        return tokens <= self.most_tokens

    def can_recompute(self, state: RequestState, generated: int) -> bool:
        """Whether a request without KV can be prefilled again from all of its tokens. Without
        eviction SGLang has a copy of its own wherever it cannot prefill."""
        if state.settings.evicts and not self.recomputes:
            return False
        return self.fits_pool(state.prompt.sent_tokens + generated)

    def has_track(self, state: RequestState, before: Sequence[RequestState]) -> bool:
        """Whether a track is free, after those that are admitted before it in this step."""
        if not state.needs_track or state.held.track_id:
            return True
        taken = sum(1 for other in before if other.needs_track and not other.held.track_id)
        return len(self.recorder.free_tracks) > taken

    def admit(self, state: RequestState, row: int, prefill_tokens: int) -> None:
        """The request has a row of the page table: take a track, write the trace.

        Args:
            prefill_tokens: of the prompt, and those generated before a retraction.
        """
        if state.held.row is not None:
            return
        offloaded = state.offloaded
        state.held = Held(row, self.recorder.free_tracks.pop() if state.needs_track else 0)
        self.open_requests += 1
        if offloaded.backup is None:
            # Until the first decode step the prefill may still be running, and the queries of a
            # history's last tokens, which may be left out, are overwritten by those of others.
            continued = state.reuse.continued
            recorded_tokens = 0 if continued is None else continued.recorded_tokens
            state.kv.not_before = max(prefill_tokens + 1, recorded_tokens)
        if offloaded.waiting_with is not None:
            # Without eviction a decode server restores its own copy.
            recomputed = offloaded.backup is None and self.recomputes
            event = "recompute" if recomputed else "restore"
            state.report.recomputations += recomputed
            self.metrics.returned(event)
            if self._trace is not None:
                self._trace.write(event, rid=state.rid, generated=offloaded.waiting_with)
        offloaded.waiting_with = None
        if state.schedule is not None and self.steerer is not None:
            self.steerer.steered_requests += 1

    def start_recording(self, state: RequestState) -> None:
        """Set up or restore the recording of an admitted request, on the stream of its prefill."""
        held, backup = state.held, state.offloaded.backup
        if held.track_id and not held.started:
            bit = PRESETS[state.settings.policy.params.delimiters]
            self.recorder.start(state.row, held.track_id, bit)
            continued = state.reuse.continued
            if backup is not None and backup.recorded is not None:
                self.recorder.restore(held.track_id, backup.recorded)
            elif continued is not None and continued.recorded is not None:
                self.recorder.restore(held.track_id, continued.recorded)
                entries = len(state.sentences.table)
                self.recorder.sentences.open_next(held.track_id, entries)
                continued.recorded = None
        held.started, state.offloaded.backup = True, None

    def silence(self, state: RequestState, *, silent: bool) -> None:
        """Let decode steps of a row record nothing, or record again; on the stream of the steps."""
        track_id = 0 if silent else state.held.track_id
        self.recorder.track_of_row[state.row].fill_(track_id)  # an assignment would wait
        state.held.is_silent = silent

    def observe(self, state: RequestState, row_tokens: int) -> None:
        """Count the request's budgeted tokens, at every decode step."""
        report, budgeted_tokens = state.report, state.budgeted_tokens(row_tokens)
        report.peak_budgeted_tokens = max(report.peak_budgeted_tokens, budgeted_tokens)
        # SGLang may look at its memory and not run the step.
        logical_tokens = row_tokens + state.kv.evicted_tokens
        if logical_tokens != report.observed_tokens:
            report.observed_tokens = logical_tokens
            report.budgeted_token_steps += budgeted_tokens  # for the mean
            report.observed_steps += 1
        self.compactor.read_back_arrived(state, row_tokens)

    def backup_bytes(self, state: RequestState, row_tokens: int, generated: int) -> int | None:
        """Host memory for a backup of the request's KV and recordings; None: it can have none."""
        if not state.settings.evicts or not self.backs_up:
            return None
        if self.compactor.compacted_ahead(state, generated):
            return None
        recorded_bytes = self.recorder.request_bytes() if state.held.track_id else 0
        kv_bytes = row_tokens * self._kv_token_bytes + self._windows_bytes
        return self.host_memory.in_chunks(kv_bytes + recorded_bytes)

    def back_up(self, state: RequestState, kv: Iterable[Tensor], recorded_tokens: int) -> None:
        """Copy the KV and recordings of a request that is about to lose its row to host memory.

        Args:
            kv: float [row tokens, Hkv, d] each, its keys and values on the device. Each is copied
                before the next is created, so that only one exists at a time.
            recorded_tokens: logical tokens that forward passes have recorded.

        Raises:
            MemoryError: host memory is full; ``backup_bytes`` says what is needed.
        """
        copies, track_id = HostCopies(self.host_memory), state.held.track_id
        # Device memory is short: a loop variable would keep a tensor while the next is created.
        saved_kv = list(map(copies.add, kv))
        recorded = self._save(track_id, copies, recorded_tokens) if track_id else None
        state.offloaded.backup = Backup(saved_kv, recorded)
        state.kv.recorded_tokens = recorded_tokens
        state.kv.forget_running_step(recorded_tokens)

    def _save(
        self, track_id: int, copies: HostCopies, logical_tokens: int
    ) -> Mapping[str, HostCopy]:
        """Copy the recordings of a request of this length."""
        if self.recorder.chain_tokens:  # its last chain is not copied
            ends = device_tensors([[track_id], [logical_tokens]], self.recorder.device)
            self.recorder.add_accepted(*ends)
        return self.recorder.save(track_id, copies)

    def forget_backup(self, state: RequestState) -> None:
        """Drop the request's backup, so that it is recomputed."""
        state.offloaded.backup = None
        self._start_anew(state)

    def retract(self, state: RequestState, generated: int) -> None:
        """Release a request that lost its row. Without a backup it will be recomputed."""
        read_back(state, self._trace)
        self._release(state)
        state.offloaded.waiting_with = generated
        if state.offloaded.backup is None:
            self._start_anew(state)

    def read_back(self, state: RequestState) -> None:
        """Learn what the request's last compaction kept, and whether it failed. Waits for it."""
        read_back(state, self._trace)

    def close(
        self, state: RequestState, row_tokens: int, output_ids: Sequence[int], reason: str | None
    ) -> None:
        """Release a finished request, write its summary and its trace line.

        Args:
            row_tokens: 0 for a request that waits.
        """
        peak_tokens = max(state.report.peak_budgeted_tokens, state.budgeted_tokens(row_tokens))
        state.report.peak_budgeted_tokens = peak_tokens
        read_back(state, self._trace)
        self._release(state)
        earlier_tokens = state.prompt.tokens - state.prompt.uncounted_tokens
        generated = earlier_tokens + max(len(output_ids) - 1, 0)  # the last token has no KV
        tracker = state.sentences.tracker
        # Of an aborted turn the text in front of its output may not have been fed.
        if tracker.seen_tokens >= earlier_tokens:
            tracker.feed(output_ids[tracker.seen_tokens - earlier_tokens :])
        state.report.summary = summarise(state, generated, output_ids)
        if not row_tokens:
            never_ran = () if output_ids else ("full_kv_tokens",)
            state.report.summary |= dict.fromkeys(("kv_tokens", *never_ran), 0)
        self.metrics.ended(state, reason)
        if self._trace is not None:
            self._trace.write(
                "finish",
                rid=state.rid,
                prompt_tokens=state.prompt.tokens,
                output_ids=list(output_ids),
                finish_reason=reason,
                **trace_fields(state),
                **state.report.summary,
            )

    def continue_history(
        self, state: RequestState, found: HistoryMatch | None, max_new_tokens: int
    ) -> None:
        """A request without a row and without a backup continues this history, or none."""
        self._start_anew(state)
        if found is None:
            count_conversation(state)
        else:
            continue_history(state, found, state.sentences.tracker, max_new_tokens)

    def leave_history(
        self, state: RequestState, namespace: Hashable, finished: FinishedRow
    ) -> History | None:
        """What a request leaves that has finished and has not been closed yet; None: nothing."""
        read_back(state, self._trace)
        last, tokens = state.kv.last, finished.tokens
        if self.ranks.any(state.kv.lost):
            return None
        if state.failure is not None or (last is not None and len(tokens) < last.logical_tokens):
            return None
        state.sentences.feed(tokens[state.prompt.uncounted_tokens :])
        records = bool(state.held.track_id) and state.settings.kv_reuse == "budget"
        if records and not self.histories.make_room(self.recorder.request_bytes()):
            return None

        def left() -> History:
            recorded = None
            if records:
                copies = HostCopies(self.histories.memory)
                recorded = self._save(state.held.track_id, copies, len(tokens))
            capacity = self.recorder.max_sentences
            return history_of(state, namespace, finished, recorded, table_capacity=capacity)

        history, error = attempt(f"history of kv_budget request {state.rid}", left)
        if self.ranks.any(error is not None) or history is None:
            return None
        return history if history.first_cut <= len(tokens) else None

    def _no_sentences(self, settings: RequestSettings) -> SentenceState:
        return SentenceState(
            SentenceTracker(self.recorder.delimiters, settings.policy.params.delimiters)
        )

    def _start_anew(self, state: RequestState) -> None:
        """Reset what eviction knows: the next prefill recomputes every token."""
        generated = state.offloaded.waiting_with or 0
        state.prompt.tokens = state.prompt.sent_tokens
        state.kv = KVState(followed_tokens=state.prompt.tokens + generated)
        state.sentences = self._no_sentences(state.settings)
        state.prompt.uncounted_tokens, state.prompt.earlier_compactions = state.prompt.tokens, 0
        state.reuse.continued, state.reuse.input_spans = None, ()

    def _release(self, state: RequestState) -> None:
        row, track_id = state.held.row, state.held.track_id
        if track_id:
            assert row is not None
            # The row's next request must not write to this track, which another may hold.
            self.recorder.track_of_row[row].zero_()
            self.recorder.free_tracks.append(track_id)
        if state.schedule is not None and row is not None and self.steerer is not None:
            self.steerer.stop(row)
            self.steerer.steered_requests -= 1
        state.held = Held()
        self.open_requests -= row is not None
        if not self.open_requests:
            self.metrics.running({})

"""The only owner of per-call state, and the life of a call: open, admit, plan, commit, close.

The CPU knows how many, the device knows which. All counts (when a compaction is due, how many
tokens stay, which sentences exist) come from integers the scheduler already has; all choices (which
tokens) stay on the device. The kept positions travel to the CPU behind the decode steps and are
read at the call's next compaction, many steps later, so nothing waits for them.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.call import CallSettings
from sgl_skipkv.call_state import CallState
from sgl_skipkv.compaction import Plan, Snapshot
from sgl_skipkv.config import ServerConfig
from sgl_skipkv.kernels.reference import causal_attention
from sgl_skipkv.page_table import compact_rows
from sgl_skipkv.policy.base import Page, PagedCache, Policy, ScoreInput, Sentences
from sgl_skipkv.recorder import Loan, Recorder
from sgl_skipkv.ring_book import RingBook
from sgl_skipkv.select import select
from sgl_skipkv.sentences import PRESETS, Delimiters, SentenceTracker
from sgl_skipkv.steering import Steerer
from sgl_skipkv.token_scores import add_token_scores, carry_spared
from sgl_skipkv.trace import TraceWriter


class Due(NamedTuple):
    """A call whose compaction is due.

    Attributes:
        row_tokens: entries of its row in use.
        output_ids: generated token ids; at least those whose KV is in the row.
        keys: layer -> float [row_tokens, Hkv, d], cached keys in row order.
        cache: where they lie, for kernels that read them in place; None where none run.
    """

    state: CallState
    row_tokens: int
    output_ids: Sequence[int]
    keys: Callable[[int], Tensor]
    cache: PagedCache | None = None


class Runtime:
    """Opens, compacts and closes the budgeted calls of one scheduler process."""

    def __init__(
        self,
        config: ServerConfig,
        delimiters: Delimiters,
        *,
        recorder: Recorder,
        layers: int,
        scale: float,
        pool_tokens: int,
        steerer: Steerer | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.steerer = steerer
        self.pool_tokens = pool_tokens
        self._delimiters = delimiters
        self._layers, self._scale = layers, scale
        self._trace = trace
        self._rings = RingBook(recorder.rings, config.kv_interval)
        self._open: set[CallState] = set()
        self.opened_calls = 0
        self.total_compactions = 0
        self.total_evicted_tokens = 0

    @property
    def open_calls(self) -> int:
        """Calls that hold a row of the page table; 0 when the server is idle."""
        return len(self._open)

    def open(self, rid: str, settings: CallSettings, prompt_ids: Sequence[int]) -> CallState:
        """A call arrives. It holds nothing yet: no row, no slot.

        Raises:
            torch.OutOfMemoryError: the first such call, and no room for the recording buffers.
        """
        seed = zlib.crc32(array("q", prompt_ids).tobytes())
        tracker = SentenceTracker(self._delimiters, settings.policy.params.delimiters)
        self.opened_calls += 1
        state = CallState(self, rid, settings, len(prompt_ids), seed, tracker)
        state.tracked_tokens = state.prompt_tokens
        if self.config.stagger:
            # From the prompt alone: what a call keeps must not depend on its neighbours.
            state.phase = seed % settings.policy.params.interval
        if settings.steering is not None:
            assert self.steerer is not None, "resolve_call refuses steering without a vector"
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

    def can_recompute(self, state: CallState, generated: int) -> bool:
        """Whether the call, had it lost its KV, could be prefilled again from all of its tokens."""
        return self.fits_pool(state.prompt_tokens + generated)

    def has_slot(self, state: CallState, before: Sequence[CallState] = ()) -> bool:
        """Whether a slot is left, after the calls that are admitted before it in this step."""
        if not state.needs_slot or state.slot:
            return True
        taken = sum(1 for other in before if other.needs_slot and not other.slot)
        return self.recorder.slots.free_slots > taken

    def has_ring(
        self, state: CallState, tokens: int, before: Sequence[tuple[CallState, int]] = ()
    ) -> bool:
        """Whether a ring is left for the steps in which the call would record.

        Where not, that changes within an interval of decode steps: the call's steps come later.

        Args:
            tokens: of its prefill.
            before: calls that are admitted before it in this step, with theirs.
        """
        if not state.needs_ring or state.ring or self._rings.free_rings > len(before):
            return True
        earlier = [
            self._ring_steps(other, count)
            for other, count in before
            if other.needs_ring and not other.ring
        ]
        return self._rings.fits(self._ring_steps(state, tokens), earlier)

    def admit(self, state: CallState, row: int, tokens: int) -> None:
        """The call got a row of the page table: it starts to hold things.

        Args:
            tokens: of its prefill: the prompt, and what is computed again after a retraction.
        """
        if state.row is not None:
            return
        state.row, state.started = row, False
        state.length_less_steps = tokens - self._rings.steps
        if state.recomputes is not None and self._trace is not None:
            self._trace.write("recompute", rid=state.rid, generated=state.recomputes)
        state.recomputes = None
        if state.needs_slot:
            state.slot = self.recorder.slots.take()
        if state.needs_ring:
            state.first_due = state.due_length(tokens)
            state.ring_steps = self._ring_steps(state, tokens)
            state.ring = self._rings.take(state.ring_steps)
        if state.schedule is not None and self.steerer is not None:
            self.steerer.calls += 1
        self._open.add(state)

    def start_recording(self, state: CallState) -> None:
        """First forward pass of an admitted call, on that pass's stream."""
        if state.slot and not state.started:
            assert state.row is not None
            bit = PRESETS[state.settings.policy.params.delimiters]
            self.recorder.start(state.row, state.slot, bit, self._loan(state))
        state.started = True

    def observe(self, state: CallState, row_tokens: int) -> None:
        """Note the length of the call's row, at every decode step."""
        own_tokens = state.own_tokens(row_tokens)
        state.peak_own_tokens = max(state.peak_own_tokens, own_tokens)
        state.own_token_steps += own_tokens  # their mean over decode steps is reported
        state.observed_steps += 1
        ahead = row_tokens + state.evicted_tokens - self._rings.steps
        if state.ring and ahead != state.length_less_steps and state.failure is None:
            state.failure = (
                f"it did not advance with every decode step (length less steps {ahead}, at its "
                f"admission {state.length_less_steps}), so its recent queries are not its own"
            )

    def step(self) -> None:
        """A decode step of all running calls is launched."""
        self._rings.steps += 1

    def due(self, state: CallState, row_tokens: int) -> bool:
        """Whether the call has grown ``interval`` past its budget."""
        if not state.settings.evicts or state.failure is not None:
            return False
        return state.own_tokens(row_tokens) >= state.due_tokens

    def must_track(self, state: CallState, row_tokens: int) -> bool:
        """Whether the next decode step would overwrite a query that no statistic has seen."""
        untracked = row_tokens + state.evicted_tokens - state.tracked_tokens
        policy = state.settings.policy
        return policy.needs_attention and untracked >= self.recorder.queries.window

    def track(self, state: CallState, row_tokens: int, keys: Callable[[int], Tensor]) -> None:
        """Bring the policy's statistics up to date: replay the decode steps since the last time.

        The row has only grown since then, so every step's attention can be computed once more from
        its query and the keys it saw.

        Args:
            state, row_tokens, keys: as in ``Due``.
        """
        policy, device = state.settings.policy, self.recorder.device
        logical_tokens = row_tokens + state.evicted_tokens
        known = next((len(values) for values in state.statistics.values()), 0)
        born = logical_tokens - (row_tokens - known)
        statistics = policy.newborn(torch.arange(born, logical_tokens, device=device))
        if known:
            statistics = {
                name: torch.cat([state.statistics[name], new]) for name, new in statistics.items()
            }
        steps = torch.arange(state.tracked_tokens, logical_tokens, device=device)
        queries = self.recorder.queries.read(state.ring, logical_tokens - 1, steps.shape[0])
        attention = torch.zeros(steps.shape[0], row_tokens, device=device)
        for layer in range(self._layers):
            oldest_first = queries[layer].flip(0)
            attention += causal_attention(oldest_first, keys(layer), scale=self._scale)
        state.statistics = policy.track(statistics, attention / self._layers, steps)
        state.tracked_tokens = logical_tokens

    def plan(self, calls: Sequence[Due]) -> list[Plan]:
        """Choose what stays. Changes nothing that another call or the scheduler can see.

        Calls that are due in the same step share one scoring call per policy.
        """
        inputs = [self._prepare(due) for due in calls]
        policies = [due.state.settings.policy for due in calls]
        inputs = add_token_scores(list(zip(policies, inputs, strict=True)))
        scores: dict[int, Tensor] = {}
        by_policy: defaultdict[type[Policy], list[int]] = defaultdict(list)
        for i, policy in enumerate(policies):
            by_policy[type(policy)].append(i)
        for kind, chosen in by_policy.items():
            together = [(policies[i], inputs[i]) for i in chosen]
            scores.update(zip(chosen, kind.scores_together(together), strict=True))
        return [self._select(due, inputs[i], scores[i]) for i, due in enumerate(calls)]

    def _ring_steps(self, state: CallState, tokens: int) -> int:
        """The decode steps in which the call records, if its prefill comes now."""
        policy = state.settings.policy
        if policy.needs_attention:
            return self._rings.always
        last = self._rings.steps + state.due_length(tokens) - tokens
        return self._rings.recording_steps(last, policy.params.interval, policy.params.window)

    def _loan(self, state: CallState) -> Loan:
        policy = state.settings.policy
        if state.ring and not policy.needs_attention:
            params = policy.params
            return Loan(state.ring, state.records_from, params.interval, params.window)
        return Loan(state.ring)

    def _prepare(self, due: Due) -> ScoreInput:
        state, row_tokens = due.state, due.row_tokens
        self._settle(state)
        logical_tokens = row_tokens + state.evicted_tokens
        generated = logical_tokens - state.prompt_tokens
        state.tracker.feed(due.output_ids[state.tracker.seen_tokens : generated])
        state.alive.extend(range(state.alive_closed, len(state.tracker.closed)))
        state.alive_closed = len(state.tracker.closed)
        if state.settings.policy.needs_attention:
            self.track(state, row_tokens, due.keys)
        return self._score_input(due, logical_tokens)

    def _select(self, due: Due, inputs: ScoreInput, scores: Tensor) -> Plan:
        state, row_tokens = due.state, due.row_tokens
        keep_tokens = state.settings.keep_tokens(state.prompt_tokens, state.compactions + 1)
        selection = select(scores, self._protected(state, row_tokens), keep_tokens)
        return Plan(
            selection,
            inputs.positions,
            scores.isfinite().all(),
            row_tokens,
            row_tokens + state.evicted_tokens,
            inputs.spared,
        )

    def commit(self, plans: Sequence[tuple[CallState, Plan]], req_to_token: Tensor) -> list[Tensor]:
        """Rewrite the calls' rows; the caller frees the slots returned and shrinks lengths."""
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
        for (state, plan), (_, positions) in zip(plans, compacted, strict=True):
            state.last, state.known_spared = Snapshot(plan, positions), None
            kept = plan.selection.kept
            state.statistics = {name: values[kept] for name, values in state.statistics.items()}
            state.evicted_tokens += plan.evicted_tokens
            state.total_evicted_tokens += plan.evicted_tokens
            state.compactions += 1
            self.total_compactions += 1
            self.total_evicted_tokens += plan.evicted_tokens
        found = [(state, plan, plan.spared) for state, plan in plans if plan.spared is not None]
        known = carry_spared(
            [spared for _, _, spared in found], [plan.selection.kept for _, plan, _ in found]
        )
        for (state, _, _), one in zip(found, known, strict=True):
            state.known_spared = one
        return [freed for freed, _ in compacted]

    def retract(self, state: CallState, generated: int) -> None:
        """The call lost its row and will be recomputed from its tokens: eviction starts anew."""
        self._settle(state)
        self._release(state)
        state.evicted_tokens, state.last = 0, None
        state.tracker = SentenceTracker(self._delimiters, state.settings.policy.params.delimiters)
        state.alive, state.alive_closed = [], 0
        state.table, state.table_closed = [], 0
        state.statistics, state.tracked_tokens = {}, state.prompt_tokens + generated
        state.known_spared = None
        state.recomputes = generated

    def close(
        self, state: CallState, row_tokens: int, output_ids: Sequence[int], reason: str | None
    ) -> None:
        """The call is over: give everything back and write down how it went."""
        state.peak_own_tokens = max(state.peak_own_tokens, state.own_tokens(row_tokens))
        self._settle(state)
        self._release(state)
        generated = max(len(output_ids) - 1, 0)  # the last token was sampled and never fed
        state.tracker.feed(output_ids[state.tracker.seen_tokens :])
        state.summary = self._summarise(state, generated, output_ids)
        if self._trace is not None:
            self._trace.write(
                "finish",
                rid=state.rid,
                prompt_tokens=state.prompt_tokens,
                output_ids=list(output_ids),
                finish_reason=reason,
                **state.summary,
            )

    # -- the parts of a plan ---------------------------------------------------------------------

    def _score_input(self, due: Due, logical_tokens: int) -> ScoreInput:
        state, policy, queries, page = due.state, due.state.settings.policy, None, None
        first_new = 0 if state.last is None else state.last.logical_tokens
        positions = torch.arange(first_new, logical_tokens, device=self.recorder.device)
        if state.last is not None:
            positions = torch.cat([state.last.positions, positions])
        assert positions.shape[0] == due.row_tokens, "row + evicted = logical length"
        newest = logical_tokens - 1
        if due.cache is not None and policy.kernel_scores:
            assert state.row is not None
            ring = self.recorder.queries.data
            page = Page(due.cache, state.row, ring, state.ring, newest)
        elif policy.needs_queries:
            queries = self.recorder.queries.read(state.ring, newest, policy.params.window)
        seed = zlib.crc32(f"{state.prompt_seed}:{state.compactions}".encode())
        return ScoreInput(
            positions=positions,
            prompt_tokens=state.prompt_tokens,
            layers=self._layers,
            keys=due.keys,
            queries=queries,
            scale=self._scale,
            sentences=self._sentences(state) if policy.needs_sentences else None,
            seed=seed,
            statistics=state.statistics,
            page=page,
            known_spared=state.known_spared,
        )

    def _sentences(self, state: CallState) -> Sentences:
        """Drop the sentences that are gone from the device's table, compare the rest."""
        closed, capacity = state.tracker.closed, self.recorder.sentences.capacity
        entries = state.table + list(range(state.table_closed, len(closed)))
        if len(entries) > capacity:  # a full table kept overwriting its last entry
            entries = [*entries[: capacity - 1], entries[-1]]
        alive = set(state.alive)
        # A quarter of the table stays free for the sentences of the next interval.
        live = [i for i, sentence in enumerate(entries) if sentence in alive]
        live = live[-(capacity - capacity // 4) :]
        self.recorder.sentences.keep_entries(
            state.slot, live, closed_last=state.tracker.after_delimiter
        )
        state.table = [entries[i] for i in live]
        state.table_closed = len(closed)
        offset = state.prompt_tokens
        spans = [(closed[s][0] + offset, closed[s][1] + offset) for s in state.table]
        return self.recorder.sentences.compare(state.slot, spans)

    def _protected(self, state: CallState, row_tokens: int) -> list[tuple[int, int]]:
        """Row ranges that stay whatever their score; counts only, known to the CPU.

        The tail is contiguous in logical position: a compaction never evicts in it, and it only
        grows until the next one.
        """
        policy, params = state.settings.policy, state.settings.policy.params
        prompt = state.prompt_tokens if params.protect_prompt else 0
        head = max(prompt, min(params.sink, row_tokens))
        compactions = state.compactions + 1
        keep = state.settings.keep_tokens(state.prompt_tokens, compactions)
        tail = policy.protected_tail(state.settings.budget_after(compactions))
        if policy.protects_open_sentence:  # up to half of what generated tokens may keep
            tail = max(tail, min(state.tracker.open_tokens, (keep - prompt) // 2))
        tail = max(params.window, min(tail, keep - head - 1))  # never the last token to choose
        return [(0, head), (row_tokens - tail, row_tokens)]

    def _settle(self, state: CallState) -> None:
        """Read what the last compaction kept: sentences that went whole, the trace line."""
        snapshot = state.last
        if snapshot is None or snapshot.settled:
            return
        snapshot.settled = True
        kept, finite = snapshot.read()
        if not finite:
            state.failure = "a score was not finite, so the kept set means nothing"
        evicted = [span for i in state.alive if not _survives(span := self._span(state, i), kept)]
        state.alive = [i for i in state.alive if _survives(self._span(state, i), kept)]
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

    def _span(self, state: CallState, sentence: int) -> tuple[int, int]:
        start, stop = state.tracker.closed[sentence]
        return start + state.prompt_tokens, stop + state.prompt_tokens

    def _release(self, state: CallState) -> None:
        if state.slot:
            assert state.row is not None
            # Whoever gets the row next must not write into a slot that somebody else may hold.
            self.recorder.slots.of_row[state.row] = 0
            self.recorder.slots.give_back(state.slot)
            state.slot = 0
        if state.ring:
            self._rings.give_back(state.ring, state.ring_steps)
            state.ring = 0
        if state.schedule is not None and state.row is not None and self.steerer is not None:
            self.steerer.stop(state.row)
            self.steerer.calls -= 1
        state.row = None
        self._open.discard(state)

    def _summarise(
        self, state: CallState, generated: int, output_ids: Sequence[int]
    ) -> dict[str, Any]:
        count_prompt = state.settings.policy.params.count_prompt
        full = generated + (state.prompt_tokens if count_prompt else 0)
        summary = {
            "policy": state.settings.policy.name,
            "kv_budget": state.settings.kv_budget,
            "compactions": state.compactions,
            "evicted_tokens": state.total_evicted_tokens,
            "kv_tokens": max(full - state.evicted_tokens, 0),
            "peak_kv_tokens": state.peak_own_tokens,
            "mean_kv_tokens": round(state.own_token_steps / max(state.observed_steps, 1), 1),
            "full_kv_tokens": full,
            "sentences": len(state.tracker.closed),
            "evicted_sentences": state.evicted_sentences,
        }
        if state.schedule is not None:
            steered = state.schedule.copy()
            steered.feed(output_ids)
            summary["nonexecution_sentences"] = steered.nonexecution_sentences
            summary["steering_alpha"] = round(steered.alpha, 6)
        return {name: value for name, value in summary.items() if value is not None}


def _survives(span: tuple[int, int], kept: Sequence[int]) -> bool:
    """Whether an ascending list of kept positions has one in the span."""
    at = bisect_left(kept, span[0])
    return at < len(kept) and kept[at] < span[1]

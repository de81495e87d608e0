"""Which tokens of the due requests stay: from what a policy needs to see to a plan.

Changes nothing that another request or the scheduler can see. All counts come from integers that
the CPU has; all choices stay on the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor

from sgl_skipkv.eviction.agreement import Agreement
from sgl_skipkv.eviction.compaction import Plan, TableEntries
from sgl_skipkv.eviction.due import Due
from sgl_skipkv.eviction.scoring import scores_of, scores_of_ranks
from sgl_skipkv.eviction.select import Selection, select_together
from sgl_skipkv.kernels.on_device import device_tensors
from sgl_skipkv.policy.inputs.query_centres import QueryCentres
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.ranks import Ranks
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.request.parts import Redundancy
from sgl_skipkv.request.state import RequestState


class Planner:
    """Makes the plans of one scheduler process.

    Args:
        scale: of the model's attention, usually 1 / sqrt(d).
        centres: of its queries; None: no policy may need them.
        reach: of its heads.
        ranks: that plan together.
        agreement: of their kept sets; None: it is not checked.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        scale: float,
        reach: Tensor,
        centres: QueryCentres | None,
        ranks: Ranks,
        agreement: Agreement | None,
    ) -> None:
        self._recorder, self._scale = recorder, scale
        self._ranks, self._agreement = ranks, agreement
        self.take_measurements(centres, reach)

    def take_measurements(self, centres: QueryCentres | None, reach: Tensor) -> None:
        """What is known of the model's queries and heads, as in the constructor."""
        self._centres, self._reach = centres, reach

    def plan(self, due: Sequence[Due]) -> list[Plan]:
        """Choose what stays, of requests whose last compaction is read back, so that ``live`` is
        true, and whose statistics are up to date. Those with the same policy and parameters share
        one scoring call."""
        for one in due:
            one.state.sentences.feed(one.generated_ids)
        tables, positions = [self._table(one.state) for one in due], self._positions(due)
        score_inputs = partial(self._score_inputs, due, positions, tables)
        if self._ranks.size == 1:
            scores = scores_of(due, score_inputs())
        else:
            scores = scores_of_ranks(due, score_inputs, self._ranks, self._agreement)
        protected = [_protected(one.state, one.row_tokens) for one in due]
        selections, finite = select_together(
            scores,
            protected,
            [one.state.keep_tokens(one.row_tokens) for one in due],
        )
        if self._agreement is not None:
            self._agreement.note(selections)
        heads = [ranges[0][1] for ranges in protected]
        parts = zip(due, selections, heads, positions, finite.unbind(), tables, strict=True)
        return [_plan(*part) for part in parts]

    def plan_without(self, due: Due, first: int, stop: int) -> Plan:
        """Keep all but these row entries, half-open, whatever their scores. The request's last
        compaction is read back."""
        due.state.sentences.feed(due.generated_ids)
        rows = torch.arange(due.row_tokens, device=self._recorder.device)
        selection = Selection(torch.cat([rows[:first], rows[stop:]]), rows[first:stop])
        finite = torch.ones((), dtype=torch.bool, device=rows.device)
        (positions,) = self._positions([due])
        if due.state.held.track_id:
            self._add_accepted([due])
        return _plan(due, selection, first, positions, finite, self._table(due.state))

    def _score_inputs(
        self,
        due: Sequence[Due],
        positions: Sequence[Tensor],
        tables: Sequence[TableEntries | None],
    ) -> list[ScoreInput]:
        found = self._spans(due) | self._compared(due, tables)
        return [
            self._score_input(one, own, found.get(i))
            for i, (one, own) in enumerate(zip(due, positions, strict=True))
        ]

    def _add_accepted(self, due: Sequence[Due]) -> None:
        """Without overlap the last chain of drafts is not in the table of sentences yet."""
        if self._recorder.chain_tokens:
            tracks = [one.state.held.track_id for one in due]
            ends = [one.logical_tokens for one in due]
            self._recorder.add_accepted(*device_tensors([tracks, ends], self._recorder.device))

    def _compared(
        self, due: Sequence[Due], tables: Sequence[TableEntries | None]
    ) -> dict[int, Sentences]:
        """Every closed sentence that is not known to be evicted, of all requests at once: those in
        a table against those that closed later, the others as the last compaction found them."""
        asking = [i for i, table in enumerate(tables) if table is not None]
        if not asking:
            return {}
        states, sentences = [due[i].state for i in asking], self._recorder.sentences
        self._add_accepted([due[i] for i in asking])
        scored = [list(state.sentences.live) for state in states]
        earlier = [state.sentences.redundancy for state in states]
        known = [table.known for table in tables if table is not None]
        entries, places = list[list[int]](), list[list[int]]()
        first, behind = 0, len(asking) * sentences.capacity
        for own, found, in_table in zip(scored, earlier, known, strict=True):
            entry = dict(zip(in_table, count(first)))
            place = {} if found is None else dict(zip(found.sentences, count(behind)))
            first, behind = first + sentences.capacity, behind + len(place)
            entries.append([entry.get(sentence, -1) for sentence in own])
            places.append([place.get(sentence, -1) for sentence in own])
        compared = sentences.compare(
            [state.held.track_id for state in states],
            [len(in_table) for in_table in known],
            [[state.span(s) for s in own] for state, own in zip(states, scored, strict=True)],
            entries,
            places,
            [found.values for found in earlier if found is not None],
        )
        for state, own, now in zip(states, scored, compared, strict=True):
            state.sentences.redundancy = Redundancy(own, now.redundancy)
        return dict(zip(asking, compared, strict=True))

    def _spans(self, due: Sequence[Due]) -> dict[int, Sentences]:
        """Closed sentences that are not known to be evicted, by one copy."""
        asking = [i for i, one in enumerate(due) if one.state.settings.policy.needs_spans]
        if not asking:
            return {}
        spans = [[due[i].state.span(s) for s in due[i].state.sentences.live] for i in asking]
        ends = [[span[end] for span in own] for own in spans for end in (0, 1)]
        placed = device_tensors(ends, self._recorder.device)
        unknown = torch.full((max(map(len, ends)),), -1.0, device=self._recorder.device)
        parts = zip(asking, placed[::2], placed[1::2], strict=True)
        return {i: Sentences(starts, stops, unknown[: len(starts)]) for i, starts, stops in parts}

    def _positions(self, due: Sequence[Due]) -> Sequence[Tensor]:
        """int64 [row tokens] of each request, logical position of every cached token."""
        every = torch.arange(max(one.logical_tokens for one in due), device=self._recorder.device)
        parts = []
        for one in due:
            last = one.state.kv.last
            old = every[:0] if last is None else last.positions
            first_new = 0 if last is None else last.logical_tokens
            new = every[first_new : one.logical_tokens]
            assert len(old) + len(new) == one.row_tokens, "row + evicted = logical length"
            parts += [old, new]
        return torch.split(torch.cat(parts), [one.row_tokens for one in due])

    def _score_input(self, due: Due, positions: Tensor, sentences: Sentences | None) -> ScoreInput:
        state, policy = due.state, due.state.settings.policy
        ring = self._recorder.queries.data if state.held.track_id else None
        seed = zlib.crc32(f"{state.prompt.seed}:{state.compactions}".encode())
        return ScoreInput(
            positions=positions,
            prompt_tokens=state.prompt_row_tokens,
            keep_tokens=state.keep_tokens(due.row_tokens),
            layers=self._recorder.shape.layers,
            keys=due.keys,
            queries=partial(self._queries, due),
            values=due.values,
            reach=self._reach,
            scale=self._scale,
            sentences=sentences,
            seed=seed,
            logical_tokens=due.logical_tokens,
            input_sentences=state.input_sentences() if policy.needs_spans else (),
            centres=self._centres if policy.needs_rotation else None,
            statistics=state.kv.statistics,
            location=None if due.cache is None else due.location(ring),
            ranks=self._ranks,
        )

    def _queries(self, due: Due) -> Tensor:
        """Of the last ``window`` tokens. Only while planning: the next decode step overwrites the
        ring."""
        state, policy = due.state, due.state.settings.policy
        assert policy.needs_queries, f"{policy.name} has no queries recorded"
        newest, window = due.logical_tokens - 1, policy.params.window
        return self._recorder.queries.read(state.held.track_id, newest, window)

    def _table(self, state: RequestState) -> TableEntries | None:
        """Which entries of the request's table are of sentences not known to be evicted."""
        if not state.settings.policy.needs_sentences:
            return None
        capacity = self._recorder.sentences.capacity
        known, live = state.sentences.entries(capacity), set(state.sentences.live)
        # A quarter of the table stays free for the sentences of the next interval.
        most = capacity - capacity // 4
        entries = [i for i, sentence in enumerate(known) if sentence in live][-most:]
        return TableEntries(known, entries)


def _plan(
    due: Due,
    selection: Selection,
    head_tokens: int,
    positions: Tensor,
    finite: Tensor,
    table: TableEntries | None,
) -> Plan:
    lengths = due.row_tokens, due.logical_tokens
    behind = due.tail_slots, due.written_tokens
    return Plan(due.state, selection, head_tokens, positions, finite, *lengths, table, *behind)


def _protected(state: RequestState, row_tokens: int) -> list[tuple[int, int]]:
    """Row ranges that stay whatever their score; counts only, known to the CPU.

    The tail is contiguous in logical position: a compaction never evicts in it, and it only grows
    until the next one.
    """
    policy, params = state.settings.policy, state.settings.policy.params
    prompt = state.prompt_row_tokens if params.protect_prompt else 0
    head = max(prompt, min(params.sink, row_tokens))
    keep = state.keep_tokens(row_tokens)
    # With a prompt that counts and stays, a share of the budget is one of what is left of it.
    budget = min(state.next_budget(row_tokens), keep - prompt)
    tail = policy.protected_tail(budget)
    if policy.protects_open_sentence:
        tail = max(tail, min(state.sentences.tracker.open_tokens, budget // 2))
    # Never the last token to choose.
    tail = max(policy.pinned_tail_tokens, min(tail, keep - head - 1))
    return [(0, head), (row_tokens - tail, row_tokens)]

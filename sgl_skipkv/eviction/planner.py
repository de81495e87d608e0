"""Which tokens of the due requests stay: from what a policy needs to see to a plan.

Changes nothing that another request or the scheduler can see. All counts come from integers that
the CPU has; all choices stay on the device.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.eviction.compaction import Plan
from sgl_skipkv.eviction.replay import replay_steps
from sgl_skipkv.eviction.select import select_together
from sgl_skipkv.policy.base import (
    KeyLocation,
    PagedCache,
    Policy,
    PolicyParams,
    ScoreInput,
    Sentences,
)
from sgl_skipkv.policy.token_scores import add_token_scores
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.request.state import RequestState


class Due(NamedTuple):
    """A request whose compaction is due.

    Attributes:
        row_tokens: entries of its row in use.
        output_ids: generated token ids; at least those whose KV is in the row.
        keys: layer -> float [row_tokens, Hkv, d], cached keys in row order.
        cache: where they lie, for kernels that read them in place; None where none run.
    """

    state: RequestState
    row_tokens: int
    output_ids: Sequence[int]
    keys: Callable[[int], Tensor]
    cache: PagedCache | None = None

    @property
    def logical_tokens(self) -> int:
        """Cached and evicted."""
        return self.row_tokens + self.state.evicted_tokens

    def location(self, ring: Tensor) -> KeyLocation:
        """For kernels. ring: float [L, slots, R, Hq, d], recent queries of every request."""
        assert self.cache is not None and self.state.row is not None
        last_position = self.logical_tokens - 1
        return KeyLocation(self.cache, self.state.row, ring, self.state.ring, last_position)


class Planner:
    """Makes the plans of one scheduler process.

    Args:
        layers: of the model. scale: of its attention, usually 1 / sqrt(d).
    """

    def __init__(self, recorder: Recorder, *, layers: int, scale: float) -> None:
        self._recorder = recorder
        self._layers, self._scale = layers, scale

    def plan(self, calls: Sequence[Due]) -> list[Plan]:
        """Choose what stays. Requests with the same policy and parameters share one scoring call.

        Args:
            requests: whose last compaction is read_back, so that ``alive`` is true.
        """
        self._catch_up(calls)
        inputs = self._score_inputs(calls)
        policies = [due.state.settings.policy for due in calls]
        inputs = add_token_scores(list(zip(policies, inputs, strict=True)))
        scores: dict[int, Tensor] = {}
        alike: defaultdict[tuple[type[Policy], PolicyParams], list[int]] = defaultdict(list)
        for i, policy in enumerate(policies):
            alike[type(policy), policy.params].append(i)
        for chosen in alike.values():
            together = policies[chosen[0]].scores_together([inputs[i] for i in chosen])
            scores.update(zip(chosen, together, strict=True))
        return _select(calls, inputs, [scores[i] for i in range(len(calls))])

    def must_track(self, state: RequestState, row_tokens: int, is_due: bool = False) -> bool:
        """Whether the request's statistics must be brought up to date in this step.

        They must before a compaction, and before a decode step overwrites a query that they have
        not seen.
        """
        untracked = row_tokens + state.evicted_tokens - state.tracked_tokens
        policy = state.settings.policy
        return policy.needs_attention and (is_due or untracked >= self._recorder.queries.window)

    def track(self, calls: Sequence[Due]) -> None:
        """Bring the policies' statistics up to date with every step of these requests."""
        replay_steps(calls, self._recorder, layers=self._layers, scale=self._scale)

    def _catch_up(self, calls: Sequence[Due]) -> None:
        """Sentences and statistics of the requests know every cached token."""
        for due in calls:
            state, generated = due.state, due.logical_tokens - due.state.prompt_tokens
            state.tracker.feed(due.output_ids[state.tracker.seen_tokens : generated])
            state.live.extend(range(state.live_closed, len(state.tracker.closed)))
            state.live_closed = len(state.tracker.closed)
        self.track([due for due in calls if due.state.settings.policy.needs_attention])

    def _score_inputs(self, calls: Sequence[Due]) -> list[ScoreInput]:
        tabled = [due.state for due in calls if due.state.settings.policy.needs_sentences]
        sentences = iter(self._sentences(tabled))
        inputs = []
        for due, positions in zip(calls, self._positions(calls), strict=True):
            needed = due.state.settings.policy.needs_sentences
            inputs.append(self._score_input(due, positions, next(sentences) if needed else None))
        return inputs

    def _positions(self, calls: Sequence[Due]) -> Sequence[Tensor]:
        """int64 [row tokens] of each request, logical position of every cached token."""
        every = torch.arange(max(due.logical_tokens for due in calls), device=self._recorder.device)
        parts = []
        for due in calls:
            last = due.state.last
            old, first_new = (
                (every[:0], 0) if last is None else (last.positions, last.logical_tokens)
            )
            new = every[first_new : due.logical_tokens]
            assert len(old) + len(new) == due.row_tokens, "row + evicted = logical length"
            parts += [old, new]
        return torch.split(torch.cat(parts), [due.row_tokens for due in calls])

    def _score_input(self, due: Due, positions: Tensor, sentences: Sentences | None) -> ScoreInput:
        state, policy, queries, page = due.state, due.state.settings.policy, None, None
        newest = due.logical_tokens - 1
        if due.cache is not None and policy.kernel_scores:
            page = due.location(self._recorder.queries.data)
        elif policy.needs_queries:
            queries = self._recorder.queries.read(state.ring, newest, policy.params.window)
        seed = zlib.crc32(f"{state.prompt_seed}:{state.compactions}".encode())
        return ScoreInput(
            positions=positions,
            prompt_tokens=state.prompt_tokens,
            layers=self._layers,
            keys=due.keys,
            queries=queries,
            scale=self._scale,
            sentences=sentences,
            seed=seed,
            statistics=state.statistics,
            page=page,
            known_spared=state.known_spared,
        )

    def _sentences(self, states: Sequence[RequestState]) -> list[Sentences]:
        """Drop the sentences that are gone from the device's tables, compare the rest."""
        if not states:
            return []
        table, slots = self._recorder.sentences, [state.slot for state in states]
        entries = [_table_entries(state, table.capacity) for state in states]
        alive = [
            _live_entries(state, known, table.capacity)
            for state, known in zip(states, entries, strict=True)
        ]
        table.keep_entries(slots, alive, [state.tracker.after_delimiter for state in states])
        for state, known, chosen in zip(states, entries, alive, strict=True):
            state.table = [known[i] for i in chosen]
            state.table_closed = len(state.tracker.closed)
        spans = [[state.span(sentence) for sentence in state.table] for state in states]
        return table.compare(slots, spans)


def _table_entries(state: RequestState, capacity: int) -> list[int]:
    """Sentence index of each entry that the device's table has now."""
    entries = [*state.table, *range(state.table_closed, len(state.tracker.closed))]
    if len(entries) > capacity:  # a full table kept overwriting its last entry
        entries = [*entries[: capacity - 1], entries[-1]]
    return entries


def _live_entries(state: RequestState, entries: Sequence[int], capacity: int) -> list[int]:
    """Which of them are not known to be evicted."""
    alive = set(state.live)
    found = [i for i, sentence in enumerate(entries) if sentence in alive]
    # A quarter of the table stays free for the sentences of the next interval.
    return found[-(capacity - capacity // 4) :]


def _select(
    calls: Sequence[Due], inputs: Sequence[ScoreInput], scores: Sequence[Tensor]
) -> list[Plan]:
    states = [due.state for due in calls]
    selections, finite = select_together(
        scores,
        [_protected(due.state, due.row_tokens) for due in calls],
        [one.settings.keep_tokens(one.prompt_tokens, one.compactions + 1) for one in states],
    )
    of_call = zip(calls, inputs, selections, finite.unbind(), strict=True)
    return [
        Plan(chosen, one.positions, ok, due.row_tokens, due.logical_tokens, one.spared)
        for due, one, chosen, ok in of_call
    ]


def _protected(state: RequestState, row_tokens: int) -> list[tuple[int, int]]:
    """Row ranges that stay whatever their score; counts only, known to the CPU.

    The tail is contiguous in logical position: a compaction never evicts in it, and it only grows
    until the next one.
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

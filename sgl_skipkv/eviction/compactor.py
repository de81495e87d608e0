"""When requests are compacted, and the work on all that are due in a step.

A request whose work fails keeps its row, and its ``failure`` is set; the others go on. One of
several ranks tells the others instead (``ranks.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.eviction.agreement import Agreement
from sgl_skipkv.eviction.compaction import Compaction, Plan
from sgl_skipkv.eviction.coverage import measure_demand
from sgl_skipkv.eviction.due import Due
from sgl_skipkv.eviction.in_parts import in_parts
from sgl_skipkv.eviction.planner import Planner
from sgl_skipkv.eviction.read_back import read_back
from sgl_skipkv.eviction.replay import replay_steps
from sgl_skipkv.eviction.similar_sentences import note_similar
from sgl_skipkv.eviction.window_move import WindowPool
from sgl_skipkv.metrics import Metrics
from sgl_skipkv.policy.inputs.query_centres import QueryCentres
from sgl_skipkv.ranks import Ranks
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.request.demand import AHEAD_TOKENS, UNKNOWN
from sgl_skipkv.request.state import RequestState
from sgl_skipkv.request.trace import TraceWriter


class StepWork(NamedTuple):
    """Requests with work before their next decode step.

    Attributes:
        compacted: those grown ``interval`` past their budget.
        followed: those whose statistics are brought up to date: before a compaction, and before the
            step overwrites a query that they have not seen.
        measured: those whose demand is measured.
    """

    compacted: list[RequestState]
    followed: list[RequestState]
    measured: list[RequestState]


class Compactor:
    """Compacts the requests of one scheduler process.

    Attributes:
        planner: chooses the tokens that are kept.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        recorder: Recorder,
        scale: float,
        page_tokens: int,
        trace: TraceWriter | None,
        centres: QueryCentres | None,
        reach: Tensor,
        ranks: Ranks,
        metrics: Metrics,
    ) -> None:
        self._recorder, self._scale, self._trace, self._ranks = recorder, scale, trace, ranks
        self._metrics = metrics
        self._work_bytes = config.compaction_work_bytes
        self._check_ledger, self._page_tokens = config.check_ledger, page_tokens
        checked = config.check_agreement and ranks.size > 1
        self._agreement = Agreement(recorder.device) if checked else None
        self.planner = Planner(
            recorder,
            scale=scale,
            centres=centres,
            reach=reach,
            ranks=ranks,
            agreement=self._agreement,
        )

    def due(self, state: RequestState, row_tokens: int) -> bool:
        """Whether the request has grown ``interval`` past its budget."""
        if not state.settings.evicts or state.failure is not None:
            return False
        decodes = row_tokens + state.kv.evicted_tokens >= state.kv.not_before
        return decodes and state.is_due(row_tokens)

    def work_before_step(self, row_tokens: Mapping[RequestState, int]) -> StepWork:
        """What has to be done before the next decode step of requests with these row lengths."""
        work = StepWork([], [], [])
        for state, tokens in row_tokens.items():
            if state.failure is not None:
                continue
            is_due = self.due(state, tokens)
            if is_due:
                work.compacted.append(state)
            elif state.must_measure(tokens):
                work.measured.append(state)
            if self._must_follow(state, tokens, is_due):
                work.followed.append(state)
        return work

    def _must_follow(self, state: RequestState, row_tokens: int, is_due: bool) -> bool:
        policy = state.settings.policy
        if not policy.needs_attention or is_due:
            return policy.needs_attention
        unseen_tokens = row_tokens + state.kv.evicted_tokens - state.kv.followed_tokens
        return not policy.follows_compactions and unseen_tokens >= self._recorder.query_window

    def before_step(
        self,
        work: StepWork,
        due_of: Callable[[RequestState], Due],
        req_to_token: Tensor,
        buffers: Sequence[Tensor] = (),
        windows: WindowPool | None = None,
    ) -> list[Compaction]:
        """Do this work. A request whose work fails keeps its row, and its ``failure`` is set.

        Args:
            due_of: the planner's input for a request.
            req_to_token: int32 [rows, width], SGLang's page table (changed in place).
            buffers, windows: of ``Compaction``; not read with pages of one token.
        """

        def sound(states: Sequence[RequestState]) -> list[Due]:
            return [due_of(state) for state in states if state.failure is None]

        self.follow(sound(work.followed))
        self._replay(measure_demand, sound(work.measured))
        due = sound(work.compacted)
        return self._compact(due, req_to_token, buffers, windows) if due else []

    def follow(self, due: Sequence[Due]) -> None:
        """Bring the requests' statistics up to date; a request's ``failure`` is set if it fails."""
        self._replay(replay_steps, due)

    def _replay(self, work: Callable[..., None], due: Sequence[Due]) -> None:
        replay = partial(work, recorder=self._recorder, scale=self._scale, ranks=self._ranks)
        alone, steps = self._ranks.size == 1, self._recorder.query_window
        steps += self._recorder.chain_tokens
        list(in_parts(due, replay, self._work_bytes, alone=alone, steps=steps))

    def _compact(
        self,
        due: Sequence[Due],
        req_to_token: Tensor,
        buffers: Sequence[Tensor],
        windows: WindowPool | None,
    ) -> list[Compaction]:
        cache, prepare = due[0].cache, partial(self._prepare, req_to_token, buffers, windows)
        heads = key_numbers = 0
        if cache is not None:
            heads, layers = cache.heads, max(one.state.settings.policy.joins_layers for one in due)
            key_numbers = layers * cache.layer[0].numel()
        done = []
        sizes = {"heads": heads, "key_numbers": key_numbers, "ranks": self._ranks.size}
        if cache is None or cache.v_ptrs is None or self._ranks.size > 1:
            sizes["block_tokens"] = max(one.state.settings.policy.block_tokens for one in due)
        alone = self._ranks.size == 1
        with self._metrics.compacting():
            for compaction in in_parts(due, prepare, self._work_bytes, alone=alone, **sizes):
                self._apply(compaction)
                done.append(compaction)
        return done

    def _apply(self, compaction: Compaction) -> None:
        compaction.apply()
        for plan in compaction.plans:
            self._metrics.compacted(plan.state, plan.evicted_tokens)

    def _prepare(
        self,
        req_to_token: Tensor,
        buffers: Sequence[Tensor],
        windows: WindowPool | None,
        due: Sequence[Due],
    ) -> Compaction:
        """Plan the requests. Changes nothing that another request or the scheduler can see."""
        for request in due:
            read_back(request.state, self._trace)
        plans = self.planner.plan(due)
        if self._trace is not None:
            note_similar(plans, self._recorder)
        return self._compaction(plans, req_to_token, buffers, windows)

    def _compaction(
        self,
        plans: Sequence[Plan],
        req_to_token: Tensor,
        buffers: Sequence[Tensor],
        windows: WindowPool | None = None,
    ) -> Compaction:
        return Compaction(
            plans,
            req_to_token,
            self._recorder,
            page_tokens=self._page_tokens,
            buffers=buffers,
            check=self._check_ledger,
            windows=windows,
        )

    def drop(
        self,
        due: Due,
        span: tuple[int, int],
        req_to_token: Tensor,
        buffers: Sequence[Tensor] = (),
    ) -> Compaction | None:
        """Evict a span of logical positions from the row of a finished request. None: that failed,
        the row is as it was, and the request's ``failure`` is set.

        Args:
            due: with a token behind the span that its statistics include.
        """
        kv, earlier = due.state.kv, due.state.kv.last
        prepared, error = attempt(
            f"kv_budget request {due.state.rid}",
            lambda: self._prepare_drop(due, span, req_to_token, buffers),
        )
        if error is not None:
            due.state.failure = error
        if self._ranks.any(prepared is None) or prepared is None:
            return None
        compaction, kept, statistics = prepared
        self._apply(compaction)
        kv.statistics = statistics
        assert kv.last is not None
        # Known without waiting for the device.
        kv.last = kv.last._replace(kept=kept, finite=torch.tensor(True), copied=None)
        read_back(due.state, self._trace)
        contiguous_from = span[1] + 1
        if earlier is not None:  # read by now
            seen_tokens = earlier.logical_tokens + earlier.running_tokens
            contiguous_from = max(contiguous_from, min(seen_tokens, due.logical_tokens))
        kv.last = kv.last.cut_back(contiguous_from)
        return compaction

    def _prepare_drop(
        self, due: Due, span: tuple[int, int], req_to_token: Tensor, buffers: Sequence[Tensor]
    ) -> tuple[Compaction, Tensor, dict[str, Tensor]]:
        """The compaction, the logical positions that it keeps, and their statistics."""
        state, statistics = due.state, dict[str, Tensor]()
        read_back(state, self._trace)
        positions = state.row_positions(due.row_tokens)
        first, stop = (bisect_left(positions, bound) for bound in span)
        plan = self.planner.plan_without(due, first, stop)
        if state.settings.kv_reuse == "budget":
            for name, values in state.kv.statistics.items():
                statistics[name] = torch.cat([values[:first], values[stop:]])
        state.kv.statistics = {}  # they may lack the newest token
        kept = torch.tensor(positions[:first] + positions[stop:])
        return self._compaction([plan], req_to_token, buffers), kept, statistics

    def compacted_ahead(self, state: RequestState, generated: int) -> bool:
        """Whether the row was compacted while a step was running whose token is not known yet.

        With the overlap scheduler that step reads the row from before the compaction. After a
        backup its token would be recomputed from the compacted row.
        """
        last = state.kv.last
        return last is not None and last.logical_tokens > state.prompt.tokens + generated - 1

    def read_back_arrived(self, state: RequestState, row_tokens: int) -> None:
        """Read back the last compaction and the last measurement of ``coverage``, once they were
        copied at least ``AHEAD_TOKENS`` tokens ago: those copies have arrived.

        Sets the request's ``failure`` if one of the two failed, on any rank.
        """
        arrived_tokens = row_tokens + state.kv.evicted_tokens - AHEAD_TOKENS
        if self._agreement is not None:
            self._agreement.check()
        last, demand = state.kv.last, state.kv.demand
        if last is not None and last.logical_tokens <= arrived_tokens:
            read_back(state, self._trace)
        if demand is not None and demand.logical_tokens <= arrived_tokens:
            if demand.measured_row_tokens == UNKNOWN:
                state.failure = "a rank failed to measure its coverage; see the server's log"

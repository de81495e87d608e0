"""Admission: a budgeted request reserves the most KV it can ever hold, not ``max_new_tokens``.

SGLang's ``PrefillAdder`` reads a request's future KV tokens from ``max_new_tokens`` in several
methods. While such a method runs for a budgeted request, ``max_new_tokens`` is set to the tokens
that the request may still hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from sgl_skipkv.patches.engine.binding import (
    bound_to,
    evicting_state_of,
    mixed_in,
    runtime_of,
    state_of,
)
from sgl_skipkv.patches.engine.future_kv import (
    copied_tokens,
    future_tokens,
    growth_tokens,
    must_stay,
    restored_tokens,
)
from sgl_skipkv.patches.engine.hicache import leave_to_backup
from sgl_skipkv.patches.engine.linear_states import forget_match
from sgl_skipkv.patches.engine.window_pool import unreserved_tokens
from sgl_skipkv.request.state import RequestState


def budgeted_adder_class(base: type, scheduler: Any) -> type | None:
    """AFTER ``Scheduler.get_prefill_adder_class``: the subclass that knows budgets."""
    runtime = runtime_of(scheduler)
    if runtime is None or not runtime.has_opened:
        return None  # no budgeted request so far: SGLang's own class
    return mixed_in(_BudgetedAdder, base)


class _BudgetedAdder:
    """Mixed in before SGLang's ``PrefillAdder``."""

    can_run_list: list[Any]
    preempt_list: list[Any]
    running_batch: Any
    tree_cache: Any
    memory_budget: Any
    rem_total_tokens: float
    priority_scheduling_preemption_threshold: int
    #: whether a request of this pass waits for a track; then, the last request in the queue that
    #: needs no track, until ``add_one_req`` has seen it
    track_missing, last_untracked = False, None

    def _get_running_request_total_token_offset(self, req: Any) -> float:
        state = evicting_state_of(req)
        if state is None:
            stock = super()._get_running_request_total_token_offset  # type: ignore[misc]
            return float(stock(req))
        # The bound is exact, so SGLang's estimate that some requests stop early does not apply.
        return growth_tokens(state, req)

    def add_one_req(
        self, req: Any, has_chunked_req: bool, truncation_align_size: int | None
    ) -> Any:
        from sglang.srt.managers.schedule_policy import AddReqResult

        if req is self.last_untracked:
            self.last_untracked = None
        state = evicting_state_of(req)
        if state is None:
            with _counted_as_usual(req, chain(self.running_batch.reqs, self.can_run_list)):
                return super().add_one_req(  # type: ignore[misc]
                    req, has_chunked_req, truncation_align_size
                )
        leave_to_backup(req, state)
        # Tokens restored from a backup and copied from a history need slots but no computation:
        # SGLang sees them as a cached prefix, and their slots count as future tokens. It adds a
        # page itself, for what the first and the last page of a candidate leave unused.
        matched, restored = req.prefix_len, restored_tokens(state, req)
        loaded = restored + copied_tokens(state, req.prefix_len)
        future = future_tokens(state, req) + loaded
        clipped = _clipped(future)
        needed = len(req.full_untruncated_fill_ids) - matched - restored + future
        if clipped and needed >= self.rem_total_tokens:
            return AddReqResult.NO_TOKEN
        if not self._has_track(state):
            if not self.track_missing:
                self.track_missing, self.last_untracked = True, self._find_last_untracked()
            if self.last_untracked is None:
                return AddReqResult.OTHER
            forget_match(req, self.tree_cache.req_to_token_pool)
            return AddReqResult.CONTINUE
        req.prefix_len = matched + restored
        windows = unreserved_tokens(self.tree_cache) if restored else 0
        self.memory_budget.swa_offset += windows
        with _future_as_max_new_tokens(req, loaded):
            result = super().add_one_req(  # type: ignore[misc]
                req, has_chunked_req, truncation_align_size
            )
        if self.can_run_list and self.can_run_list[-1] is req:
            self.memory_budget.total_offset += clipped
            self.memory_budget.current_offset += loaded
        else:
            req.prefix_len = matched
            self.memory_budget.swa_offset -= windows
            # What could not be loaded beside others may be loaded when one of them has ended.
            others = self.can_run_list or self.running_batch.reqs or has_chunked_req
            state.reuse.loads = state.reuse.loads or bool(others)
        return result

    def add_chunked_req(self, req: Any) -> Any:
        state = evicting_state_of(req)
        if state is None:
            return super().add_chunked_req(req)  # type: ignore[misc]
        with _future_as_max_new_tokens(req):
            unfinished = super().add_chunked_req(req)  # type: ignore[misc]
        self.memory_budget.total_offset += _clipped(future_tokens(state, req))
        return unfinished

    def preempt_to_schedule(self, req: Any) -> bool:
        # A request that could not be recomputed must not be preempted; nor one whose row would be
        # of no use, because ``req`` would wait for a track all the same. The base class skips
        # requests that are already on the list.
        state = state_of(req)
        lacks_track = state is not None and not self._has_track(state)
        if lacks_track and self.track_missing:
            return True  # the next track is for a request before it; see below
        fixed = must_stay(self._victims(req))
        if lacks_track:
            fixed += [other for other in self.running_batch.reqs if not _holds_track(other)]
        self.preempt_list.extend(fixed)
        try:
            with _future_as_max_new_tokens(req, subtracted=0):
                preempted: bool = super().preempt_to_schedule(req)  # type: ignore[misc]
        finally:
            for other in fixed:
                self.preempt_list.remove(other)
        # With False SGLang ends the pass. ``add_one_req`` skips a request that lacks a track, and
        # lets those that need none pass it.
        return preempted or lacks_track

    def _victims(self, req: Any) -> list[Any]:
        """Running requests that SGLang may preempt for this one, in its order."""
        from sglang.srt.runtime_context import get_schedule

        sign = -1 if get_schedule().schedule_low_priority_values_first else 1
        most = req.priority * sign - self.priority_scheduling_preemption_threshold
        running = (other for other in self.running_batch.reqs if not other.finished())
        lower = [other for other in running if other.priority * sign < most]
        return sorted(lower, key=lambda other: other.priority * sign)

    def _has_track(self, state: RequestState) -> bool:
        """Whether a track is free for the request. Requests that wait for one keep their order."""
        if not state.needs_track:
            return True
        before = [other for req in self.can_run_list if (other := state_of(req)) is not None]
        return not self.track_missing and state.runtime.has_track(state, before)

    def _find_last_untracked(self) -> Any:
        """The last waiting request that needs no track; None if there is none or it is admitted."""
        scheduler = bound_to(self.tree_cache.req_to_token_pool).scheduler
        for req in reversed(scheduler.waiting_queue):
            state = state_of(req)
            if state is None or not state.needs_track:
                return None if req in self.can_run_list else req
        return None


def _holds_track(req: Any) -> bool:
    state = state_of(req)
    return state is not None and state.held.track_id != 0


def _clipped(future_tokens: int) -> int:
    """Of these SGLang counts at most ``CLIP_MAX_NEW_TOKENS``; a budgeted request counts all."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    most_tokens: int = CLIP_MAX_NEW_TOKENS
    return max(future_tokens - most_tokens, 0)


@contextmanager
def _future_as_max_new_tokens(
    req: Any, loaded: int = 0, subtracted: int | None = None
) -> Iterator[None]:
    """Let SGLang's admission read the request's future KV tokens as ``max_new_tokens``.

    ``ignore_eos`` is cleared, see ``_counted_as_usual``.

    Args:
        subtracted: what SGLang subtracts there; None: the tokens already generated.
    """
    state = evicting_state_of(req)
    if state is None:
        yield
        return
    params = req.sampling_params
    saved = params.max_new_tokens, params.ignore_eos
    subtracted = len(req.output_ids) if subtracted is None else subtracted
    params.max_new_tokens = future_tokens(state, req) + loaded + subtracted
    params.ignore_eos = False
    try:
        yield
    finally:
        params.max_new_tokens, params.ignore_eos = saved


@contextmanager
def _counted_as_usual(req: Any, others: Iterable[Any]) -> Iterator[None]:
    """While a request without a budget is considered beside those that evict.

    Without a radix cache, ``ignore_eos`` selects a path of SGLang that adds up the full traces of
    all running requests. Of one that evicts the trace may be longer than the pool, and whoever
    ignores the end of sequence would wait until it has finished.
    """
    params = req.sampling_params
    if not params.ignore_eos or not any(map(evicting_state_of, others)):
        yield
        return
    params.ignore_eos = False
    try:
        yield
    finally:
        params.ignore_eos = True

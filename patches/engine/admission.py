"""Admission: a budgeted request reserves what it can ever hold, not ``max_new_tokens``.

SGLang's ``PrefillAdder`` reads a request's future from ``max_new_tokens`` in several places. For
budgeted requests this subclass lets it read the tokens they may still hold instead, for the length
of one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl_skipkv.patches.engine.binding import binding_of, state_of
from sgl_skipkv.request.state import RequestState


def budgeted_adder_class(base: type, scheduler: Any) -> type | None:
    """AFTER ``Scheduler.get_prefill_adder_class``: the adder that knows budgets."""
    binding = binding_of(scheduler)
    if binding is None or binding.runtime is None or binding.runtime.opened_requests == 0:
        return None  # nobody asked: SGLang's own class
    return _adder_class(base)


_classes: dict[type, type] = {}


def _adder_class(base: type) -> type:
    """The subclass of ``base``, made once."""
    if base not in _classes:
        _classes[base] = type(f"Budgeted{base.__name__}", (_BudgetedAdder, base), {})
    return _classes[base]


class _BudgetedAdder:
    """Mixed in before SGLang's ``PrefillAdder``."""

    can_run_list: list[Any]
    preempt_list: list[Any]
    running_batch: Any
    tree_cache: Any
    memory_budget: Any
    rem_total_tokens: float
    #: whether this pass has left a request waiting for a track; then, who in the queue is the last
    #: that needs none, until it had its turn
    passed_over, last_unconcerned = False, None

    def _get_running_request_total_token_offset(self, req: Any) -> float:
        state = state_of(req)
        if state is None or not state.settings.evicts:
            stock = super()._get_running_request_total_token_offset  # type: ignore[misc]
            return float(stock(req))
        # What it can ever hold is exact, so SGLang's guess that some stop early does not apply.
        return state.future_tokens(req.kv.kv_allocated_len, _tokens_left(req))

    def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

        if req is self.last_unconcerned:
            self.last_unconcerned = None
        state = state_of(req)
        if state is None or not state.settings.evicts:
            return super().add_one_req(req, *args, **kwargs)  # type: ignore[misc]
        # What comes back from a backup needs slots and is not computed: for SGLang it is a cached
        # prefix, and the slots are part of the future.
        matched, restored = req.prefix_len, _restored_tokens(state, req)
        future = _future_tokens(state, req) + restored
        # SGLang counts at most CLIP_MAX_NEW_TOKENS of a request's future; ours is exact.
        clipped = max(future - CLIP_MAX_NEW_TOKENS, 0)
        needed = len(req.full_untruncated_fill_ids) - matched - restored + future
        if clipped and needed >= self.rem_total_tokens:
            return AddReqResult.NO_TOKEN
        if not self._records(state):
            if not self.passed_over:
                self.passed_over, self.last_unconcerned = True, self._last_unconcerned()
            skip = self.last_unconcerned is not None
            return AddReqResult.CONTINUE if skip else AddReqResult.OTHER
        req.prefix_len = matched + restored
        with _future_as_max_new_tokens(req, restored):
            result = super().add_one_req(req, *args, **kwargs)  # type: ignore[misc]
        if self.can_run_list and self.can_run_list[-1] is req:
            self.memory_budget.total_offset += clipped
            self.memory_budget.current_offset += restored
        else:
            req.prefix_len = matched
        return result

    def add_chunked_req(self, req: Any) -> Any:
        with _future_as_max_new_tokens(req):
            return super().add_chunked_req(req)  # type: ignore[misc]

    def preempt_to_schedule(self, req: Any) -> bool:
        # Whoever could not be recomputed must not give way. The base class skips requests that are
        # already on the list.
        fixed = [running for running in self.running_batch.reqs if must_stay(running)]
        self.preempt_list.extend(fixed)
        try:
            with _future_as_max_new_tokens(req):
                preempted: bool = super().preempt_to_schedule(req)  # type: ignore[misc]
        finally:
            for running in fixed:
                self.preempt_list.remove(running)
        return preempted

    def _records(self, state: RequestState) -> bool:
        """Whether there is a track for the request. In turn: none overtakes another."""
        if not state.needs_track:
            return True
        before = [other for req in self.can_run_list if (other := state_of(req)) is not None]
        return not self.passed_over and state.runtime.has_track(state, before)

    def _last_unconcerned(self) -> Any:
        """The last in the queue that needs no slot and has not been admitted; None: nobody."""
        binding = binding_of(self.tree_cache.req_to_token_pool)
        assert binding is not None
        for req in reversed(binding.scheduler.waiting_queue):
            state = state_of(req)
            if state is None or not state.needs_track:
                return None if req in self.can_run_list else req
        return None


def must_stay(req: Any) -> bool:
    """Whether a running request could neither be restored nor recomputed: it never gives way."""
    state = state_of(req)
    if state is None or state.runtime.can_recompute(state, len(req.output_ids)):
        return False
    row_tokens = req.kv.kv_allocated_len
    return not state.runtime.can_back_up(state, row_tokens, len(req.output_ids))


def prefill_tokens(req: Any) -> int:
    """Tokens of a request that has no row: its prompt, and what it had generated before."""
    return len(req.origin_input_ids) + len(req.output_ids)


def _tokens_left(req: Any) -> int:
    return max(int(req.sampling_params.max_new_tokens) - len(req.output_ids), 0)


def _restored_tokens(state: RequestState, req: Any) -> int:
    """KV tokens that come from the request's backup, beyond what the tree still has of its
    prompt."""
    return (
        0 if state.offloaded.backup is None else state.offloaded.backup.row_tokens - req.prefix_len
    )


def _future_tokens(state: RequestState, req: Any) -> int:
    """KV tokens that a request which is about to be prefilled may need after its prefill."""
    backup = state.offloaded.backup
    row_tokens = prefill_tokens(req) if backup is None else backup.row_tokens + 1
    return state.future_tokens(row_tokens, _tokens_left(req))


@contextmanager
def _future_as_max_new_tokens(req: Any, restored: int = 0) -> Iterator[None]:
    """Let SGLang's admission see the request's future KV tokens where it reads ``max_new_tokens``.

    It subtracts the tokens already generated, so they are added first. ``ignore_eos`` without a
    radix cache takes a path that adds up the whole traces of all running requests; a request whose
    future is exact does not need that estimate.
    """
    state = state_of(req)
    if state is None or not state.settings.evicts:
        yield
        return
    params = req.sampling_params
    saved = params.max_new_tokens, params.ignore_eos
    params.max_new_tokens = _future_tokens(state, req) + restored + len(req.output_ids)
    params.ignore_eos = False
    try:
        yield
    finally:
        params.max_new_tokens, params.ignore_eos = saved

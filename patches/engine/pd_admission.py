"""Admission to a decode server (PD disaggregation): what is reserved for budgeted requests.

For each request that has a row SGLang keeps ``--num-reserved-decode-tokens`` free, whatever its
``max_new_tokens``, and for the longest one all that it may still generate. A budgeted request
reserves what it can still hold instead: no more, and no less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from sgl_skipkv.patches.engine.binding import evicting_state_of
from sgl_skipkv.patches.engine.future_kv import future_tokens, growth_tokens
from sgl_skipkv.request.pages import page_ceil
from sgl_skipkv.request.state import RequestState


def reserve_growth(
    original: Callable[..., int],
    queue: Any,
    n_active: int | None = None,
    extra_reserved_reqs: int = 0,
) -> int:
    """AROUND ``DecodePreallocQueue._active_reserved_tokens``: of every request that has a row."""
    reserved = original(queue, n_active, extra_reserved_reqs)
    for req, state in _evicting(_with_rows(queue)):
        reserved += growth_tokens(state, req) - queue.num_reserved_decode_tokens
    return reserved


def needed_by_longest(
    original: Callable[..., int], queue: Any, retractable_tokens: int | None = None
) -> int:
    """AROUND ``DecodePreallocQueue._need_space_for_single_req``: what the longest running request
    may need when all others are retracted. Their rows hold less than their tokens."""
    running = queue.scheduler.running_batch.reqs
    if retractable_tokens is not None:
        retractable_tokens -= _evicted_tokens(queue)
    with _growth_as_max_new_tokens(running):
        return original(queue, retractable_tokens)


def needed_by_arrival(
    original: Callable[..., int],
    queue: Any,
    req: Any,
    allocated_tokens: int,
    prefix_len: int,
    retractable_tokens: int,
) -> int:
    """AROUND ``DecodePreallocQueue._required_admission_tokens``: its prompt, and what it can hold
    beside it."""
    state = evicting_state_of(req)
    if state is None:
        retractable_tokens -= _evicted_tokens(queue)
        return original(queue, req, allocated_tokens, prefix_len, retractable_tokens)
    return allocated_tokens + page_ceil(future_tokens(state, req), state.runtime.page_tokens)


def needed_by_restored(
    original: Callable[..., tuple[int, int]], queue: Any, req: Any
) -> tuple[int, int]:
    """AROUND ``DecodePreallocQueue._prealloc_required_tokens``: the row of its backup, and what it
    generates. The second number is of a pool for windows, which no budgeted request has."""
    state = evicting_state_of(req)
    if state is None or state.offloaded.backup is None:
        return original(queue, req)
    tokens = state.offloaded.backup.row_tokens + 1 + future_tokens(state, req)
    needed = page_ceil(tokens, state.runtime.page_tokens)
    return needed, needed


def _with_rows(queue: Any) -> Iterator[Any]:
    """Requests that SGLang counts as active: running ones, such as wait for their first step, such
    whose prompt is on its way, and of both queues those that got their row in this pass."""
    scheduler = queue.scheduler
    arriving = (one.req for one in chain(queue.transfer_queue.queue, queue.queue))
    waiting = chain(scheduler.waiting_queue, arriving, queue.retracted_queue)
    yield from scheduler.running_batch.reqs
    yield from (req for req in waiting if req.kv.holds_kv)


@contextmanager
def _growth_as_max_new_tokens(reqs: Iterable[Any]) -> Iterator[None]:
    """Let SGLang read what running budgeted requests may still hold as ``max_new_tokens``."""
    changed = [(req.sampling_params, growth_tokens(state, req)) for req, state in _evicting(reqs)]
    saved = [params.max_new_tokens for params, _ in changed]
    for params, tokens in changed:
        params.max_new_tokens = tokens
    try:
        yield
    finally:
        for (params, _), tokens in zip(changed, saved, strict=True):
            params.max_new_tokens = tokens


def _evicted_tokens(queue: Any) -> int:
    """Of running requests, which SGLang takes to be as long as their tokens."""
    running = _evicting(queue.scheduler.running_batch.reqs)
    return sum(state.kv.evicted_tokens for _, state in running)


def _evicting(reqs: Iterable[Any]) -> Iterator[tuple[Any, RequestState]]:
    for req in reqs:
        if (state := evicting_state_of(req)) is not None:
            yield req, state

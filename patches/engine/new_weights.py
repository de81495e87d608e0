"""New weights: what policies know of the model is measured again, on an idle server.

Other requests may be running with weights that were changed under them. So the measurement waits
until a request that evicts finds the server idle, with all of its weights and its KV pool.
"""

from __future__ import annotations

import logging
from typing import Any

from sgl_skipkv.patches.engine.binding import Binding, binding_of, runtime_of
from sgl_skipkv.patches.engine.dp_attention import any_rank, has_dp_attention
from sgl_skipkv.patches.engine.pd_roles import announced, transferred
from sgl_skipkv.patches.engine.waiting import refuse_waiting, wants_to_evict

logger = logging.getLogger(__name__)


def note_weight_update(updater: Any, source: str) -> None:
    """BEFORE ``SchedulerWeightUpdaterManager._observe_weight_load``: every rank begins an update of
    weights here. It may fail on some of them, and they must agree on what is measured."""
    _forget_measurements(updater.scheduler)


def note_new_weights(result: None, scheduler: Any, new_version: str | None) -> None:
    """AFTER ``Scheduler.record_weight_version_change``: a trainer has written weights by itself and
    says so."""
    _forget_measurements(scheduler)


def note_updated_weights(result: Any, updater: Any, recv_req: Any) -> None:
    """AFTER ``SchedulerWeightUpdaterManager.end_weight_update``: weights that were written from
    outside, and such as are packed only now."""
    _forget_measurements(updater.scheduler)


def _forget_measurements(scheduler: Any) -> None:
    if (runtime := runtime_of(scheduler)) is not None:
        runtime.is_measured = False


def _has_all_weights(scheduler: Any) -> bool:
    updater = scheduler.weight_updater
    return not (updater._session or updater.offload_tags or scheduler._engine_paused)


def measure_alone(binding: Binding) -> str | None:
    """Measure new weights before a request that evicts is opened; the reason why that did not
    work. With DP attention ``measure_together`` does it, before the request's first step."""
    scheduler, runtime = binding.scheduler, binding.runtime
    assert runtime is not None
    if runtime.is_measured or has_dp_attention():
        return None
    if not scheduler.is_fully_idle() or not _has_all_weights(scheduler):
        return None
    return binding.measure_again()


def measure_together(scheduler: Any, running_batch: Any, last_batch: Any) -> None:
    """BEFORE ``Scheduler.get_next_batch_to_run``: with DP attention measure new weights as soon as
    all ranks are idle and a request that evicts waits on one of them.

    All ranks learn of an update between the same two steps, so they ask each other before the same
    steps. If one fails to measure, all will try again.
    """
    binding = binding_of(scheduler)
    runtime = None if binding is None else binding.runtime
    if binding is None or runtime is None or runtime.is_measured or not has_dp_attention():
        return
    runs = not running_batch.is_empty() or scheduler.chunked_req is not None
    runs |= last_batch is not None and not last_batch.is_empty()
    runs |= scheduler.enable_overlap and len(scheduler.result_queue) > 0
    # A request whose grammar is ready may skip the other queue.
    queues = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    queues += announced(scheduler)
    runs |= any(req.kv.holds_kv for req in (*queues, *transferred(scheduler)))
    is_busy, is_wanted = any_rank(
        runs or not _has_all_weights(scheduler), any(map(wants_to_evict, queues))
    )
    if is_busy or not is_wanted:
        return
    reason = binding.measure_again()
    if reason is not None:
        logger.error(unmeasured(reason))
    (failed,) = any_rank(reason is not None)
    if failed:
        runtime.is_measured = False
        refuse_waiting(scheduler, unmeasured(reason or "on another rank; see the server's log"))


def measure_before_arrivals(scheduler: Any) -> None:
    """BEFORE ``process_decode_queue``: as ``measure_together``, before arriving prompts take KV."""
    measure_together(scheduler, scheduler.running_batch, scheduler.last_batch)


def unmeasured(reason: str) -> str:
    """What a client is told."""
    return f"kv_budget: the new weights were not measured: {reason}"

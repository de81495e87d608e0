"""New weights: what policies know of the model is measured again, on an idle server.

Other requests may be running with weights that were changed under them. So the measurement waits
until a request that evicts finds the server idle, with all of its weights and its KV pool.
"""

from __future__ import annotations

from typing import Any

from sgl_skipkv.patches.engine.binding import Binding, binding_of, runtime_of, state_of
from sgl_skipkv.patches.engine.dp_attention import any_rank, has_dp_attention
from sgl_skipkv.policy.inputs.ranks import RanksError


def note_new_weights(result: None, scheduler: Any, new_version: str | None) -> None:
    """AFTER ``Scheduler.record_weight_version_change``, which updates of weights call."""
    _forget_measurements(scheduler)


def note_updated_weights(result: Any, updater: Any, recv_req: Any) -> None:
    """AFTER ``SchedulerWeightUpdaterManager.end_weight_update``: weights that were written from
    outside, and such as are packed only now."""
    if updater.scheduler is not None:
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

    All ranks learn of new weights between the same two steps, so they ask each other before the
    same steps.
    """
    binding = binding_of(scheduler)
    runtime = None if binding is None else binding.runtime
    if binding is None or runtime is None or runtime.is_measured or not has_dp_attention():
        return
    runs = not running_batch.is_empty() or last_batch or scheduler.chunked_req is not None
    states = [state_of(req) for req in scheduler.waiting_queue]
    waits = any(state is not None and state.settings.evicts for state in states)
    is_busy, is_wanted = any_rank(bool(runs) or not _has_all_weights(scheduler), waits)
    if is_wanted and not is_busy and (reason := binding.measure_again()) is not None:
        # The others have measured, and will not ask again.
        raise RanksError(f"new weights could not be measured on all ranks: {reason}")

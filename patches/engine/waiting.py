"""Requests that end while they wait: they hold no row, and their clients are told outside of the
output stream."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from sgl_skipkv.patches.engine.binding import state_of
from sgl_skipkv.patches.engine.linear_states import has_linear_states
from sgl_skipkv.patches.engine.pd_roles import announced

logger = logging.getLogger(__name__)


def is_stranded(req: Any) -> bool:
    """Whether a request without KV has no backup and its tokens do not fit the pool."""
    state = state_of(req)
    return (
        state is not None
        and state.offloaded.backup is None
        and not state.runtime.can_recompute(state, len(req.output_ids))
    )


#: why a request has lost its KV, and what helps
_LOST = {
    "the pool is full": (
        "the KV pool was full and no other request could be retracted",
        "Lower the load",
    ),
    "a pause": ("pause_generation (mode retract) freed its KV", "Pause with mode in_place"),
    "a flush": ("flush_cache dropped its KV", "Flush when no request waits"),
}


def end_stranded(scheduler: Any, req: Any, lost_to: str) -> None:
    """End a request that can be neither restored nor recomputed, with 500.

    Args:
        lost_to: a key of ``_LOST``.
    """
    state, (why, remedy) = req.skipkv, _LOST[lost_to]
    has_backups = not has_linear_states(scheduler.req_to_token_pool)
    with_backups = lost_to == "the pool is full" and has_backups
    backups = "retraction_backup_bytes (host memory), " if with_backups else ""
    because = (
        f"its {state.prompt.sent_tokens + len(req.output_ids)} tokens do not fit the KV pool "
        f"({state.runtime.pool_tokens} tokens). {remedy}, or raise {backups}--max-total-tokens or "
        "--mem-fraction-static."
    )
    if not state.runtime.recomputes:  # only a pause takes KV from it here
        because = "a decode server computes no prompts. Pause with mode in_place."
    message = f"kv_budget request {state.rid}: {why}, and the request cannot be recomputed: "
    message += because
    state.failure = message
    _end(scheduler, req, message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def wants_to_evict(req: Any) -> bool:
    """Whether a waiting request evicts and has not begun. One that was refused waits for its end,
    and one that was retracted has begun with what was known of the weights then."""
    state = state_of(req)
    begun = req.output_ids or req.to_finish is not None
    return state is not None and state.settings.evicts and not begun


def refuse_waiting(scheduler: Any, message: str) -> None:
    """End every request that waits to evict with 503: its client may retry. SGLang ends those whose
    grammar is not ready yet."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    status, err_type = HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"
    for req in [*filter(wants_to_evict, scheduler.waiting_queue)]:
        scheduler.waiting_queue.remove(req)
        req.skipkv.runtime.metrics.refused("unavailable")
        _end(scheduler, req, message, status, err_type)
    for req in filter(wants_to_evict, scheduler.grammar_manager.grammar_queue):
        req.skipkv.runtime.metrics.refused("unavailable")
        req.set_finish_with_abort(message, status, err_type)
    for req in filter(wants_to_evict, announced(scheduler)):
        req.skipkv.runtime.metrics.refused("unavailable")
        req.finished_reason = FINISH_ABORT(message, status, err_type)


def _end(scheduler: Any, req: Any, message: str, status: HTTPStatus, err_type: str) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler import _make_abort_req

    reason = FINISH_ABORT(message, status_code=status, err_type=err_type)
    logger.error(message)
    req.skipkv.runtime.close(req.skipkv, 0, req.output_ids, "abort")
    send_abort(scheduler, _make_abort_req(req, finished_reason=reason.to_json()), req)


def send_abort(scheduler: Any, abort_req: Any, req: Any) -> None:
    """Say that a request has ended outside the output stream. SGLang 0.5.22 has no
    ``send_abort_output``, which does what is done here and serves the Rust server too."""
    if hasattr(scheduler, "send_abort_output"):
        scheduler.send_abort_output(abort_req, req)
    else:
        scheduler.ipc_channels.send_to_tokenizer.send_output(abort_req, req)

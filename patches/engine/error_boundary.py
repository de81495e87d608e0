"""The one place where an error of ours is caught: while nothing has changed yet.

An exception that leaves a hook ends the scheduler, and with it every request of every tenant. Until
a row is rewritten, a mistake of ours concerns one request: that one ends with 500, and the log has
    the traceback. From there on nothing is caught, because what is half done must not be served;
    neither is what proves that memory is wrong already, or that the device is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import torch

from sgl_skipkv.eviction.compaction import Plan
from sgl_skipkv.eviction.page_table import LedgerError
from sgl_skipkv.eviction.planner import Due
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.request.state import RequestState

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: what stops the worker wherever it happens
FATAL = (LedgerError, torch.AcceleratorError)


def attempt(what: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The work's result, or None and what went wrong.

    Args:
        what: whose work it is, for the log.

    Raises:
        LedgerError, torch.AcceleratorError: as they came.
    """
    try:
        return work(), None
    except FATAL:
        raise
    except Exception as error:
        logger.exception(what)
        return None, f"an error of the plugin, {type(error).__name__}; the server's log has it"


def plan_requests(runtime: Runtime, calls: Sequence[Due]) -> list[tuple[Due, Plan]]:
    """Plans of the due requests. One that cannot be planned is out, with its ``failure`` set.

    Planned together they fail together, so then each is planned by itself.
    """
    plans, error = attempt("kv_budget requests", lambda: runtime.plan(calls))
    if error is None:
        assert plans is not None
        return list(zip(calls, plans, strict=True))
    planned = []
    for due in calls:
        found, error = attempt(_name(due.state), partial(runtime.plan, [due]))
        if found is not None:
            planned.append((due, found[0]))
        else:
            due.state.failure = error
    return planned


def track_requests(runtime: Runtime, calls: Sequence[Due]) -> None:
    """Bring the requests' statistics up to date. One for which that fails has its ``failure`` set.

    If tracking the batch raises, each request is tracked alone.
    """
    _, error = attempt("kv_budget requests", partial(runtime.planner.track, calls))
    if error is None:
        return
    for due in calls:
        _, error = attempt(_name(due.state), partial(runtime.planner.track, [due]))
        if error is not None:
            due.state.failure = error


def end_request(req: Any, state: RequestState) -> None:
    """End a request that can no longer be served as it was asked for; the others go on."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if req.to_finish is None:
        message = f"kv_budget request {req.rid}: {state.failure}"
        logger.error(message)
        req.to_finish = FINISH_ABORT(
            message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
        )


def _name(state: RequestState) -> str:
    return f"kv_budget request {state.rid}"

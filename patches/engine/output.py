"""``meta_info["skipkv"]``: one object per finished request, from the scheduler to the client.

SGLang sends request-level fields as lists and concatenates them over chunks. The object is sent
once, with the last chunk of the request, and the main process unwraps it.
"""

from __future__ import annotations

import json
from typing import Any

from sgl_skipkv.patches.engine.binding import mixed_in, state_of
from sgl_skipkv.request.summary import META_KEY


def reporting_streamer_class(base: type, scheduler: Any) -> type | None:
    """AFTER ``Scheduler.get_output_streamer_class``: the streamer that adds our object."""
    if scheduler.rust_server is not None:
        return None  # the Rust server does not start with a streamer that has additional fields
    return mixed_in(_ReportingStreamer, base)


class _ReportingStreamer:
    """Mixed in before SGLang's ``SchedulerOutputStreamer``."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        stock = super().build_additional_customized_info  # type: ignore[misc]
        info: dict[str, list[Any]] = stock(reqs)
        summaries = [summary_of(req) for req in reqs]
        if any(summaries):
            info[META_KEY] = [[summary] if summary else [] for summary in summaries]
        return info

    def is_request_level_customized_info_key(self, key: str) -> bool:
        if key == META_KEY:
            return True
        is_level: bool = super().is_request_level_customized_info_key(key)  # type: ignore[misc]
        return is_level


def summary_of(req: Any) -> dict[str, Any] | None:
    """Of a request that has ended; None: it runs, or has no budget."""
    state = state_of(req)
    if state is None or not req.finished():
        return None
    if state.report.summary is None:  # a decode server streams the end of one that has no row yet
        state.runtime.close(state, 0, req.output_ids, "abort")
    summary: dict[str, Any] | None = state.report.summary
    return summary


def send_summary(abort_req: Any, summary: dict[str, Any] | None, failure: str | None) -> None:
    """Send the summary of a request that ends while it waits: as text in the reason, because the
    message has no field for an object. Without a reason SGLang has this default.

    Args:
        failure: why it ended, where SGLang may know less.
    """
    message = abort_req.abort_message or "Abort in waiting queue"
    reason = abort_req.finished_reason or {"type": "abort", "message": message}
    if failure is not None:
        reason = {**reason, "message": failure}
    abort_req.finished_reason = {**reason, META_KEY: json.dumps(summary)}

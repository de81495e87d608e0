"""``meta_info["skipkv"]``: one object per finished request, from the scheduler to the caller.

SGLang's output stream carries request-level fields as lists and adds them up over chunks; the value
is sent once, with the chunk that finishes the request, and unwrapped in the main process.
"""

from __future__ import annotations

from typing import Any

from sgl_skipkv.patches.engine.binding import state_of
from sgl_skipkv.request.summary import META_KEY


def reporting_streamer_class(base: type, scheduler: Any) -> type | None:
    """AFTER ``Scheduler.get_output_streamer_class``: the streamer that adds our object."""
    if scheduler.rust_server is not None:
        return None  # that way out cannot carry additional fields, and refuses to start with one
    if base not in _classes:
        namespace = {"has_additional_customized_info": True, "__slots__": ()}
        _classes[base] = type(f"Budgeted{base.__name__}", (_ReportingStreamer, base), namespace)
    return _classes[base]


_classes: dict[type, type] = {}


class _ReportingStreamer:
    """Mixed in before SGLang's ``SchedulerOutputStreamer``."""

    __slots__ = ()

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        stock = super().build_additional_customized_info  # type: ignore[misc]
        info: dict[str, list[Any]] = stock(reqs)
        summaries = [_summary(req) for req in reqs]
        if any(summaries):
            info[META_KEY] = [[summary] if summary else [] for summary in summaries]
        return info

    def is_request_level_customized_info_key(self, key: str) -> bool:
        if key == META_KEY:
            return True
        is_level: bool = super().is_request_level_customized_info_key(key)  # type: ignore[misc]
        return is_level


def _summary(req: Any) -> dict[str, Any] | None:
    state = state_of(req)
    return state.report.summary if state is not None and req.finished() else None

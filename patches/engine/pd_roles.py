"""PD disaggregation: a prefill server computes prompts, a decode server generates."""

from __future__ import annotations

from typing import Any


def is_prefill_server() -> bool:
    return _mode() == "prefill"


def is_decode_server() -> bool:
    return _mode() == "decode"


def _mode() -> str:
    from sglang.srt.runtime_context import get_disagg

    return str(get_disagg().disaggregation_mode)


def announced(scheduler: Any) -> list[Any]:
    """Requests of a decode server that have no row yet; of every other server none."""
    if not is_decode_server():
        return []
    return [one.req for one in scheduler.disagg_decode_prealloc_queue.queue]


def transferred(scheduler: Any) -> list[Any]:
    """Requests of a decode server whose prompt is on its way; of every other server none."""
    if not is_decode_server():
        return []
    return [one.req for one in scheduler.disagg_decode_transfer_queue.queue]

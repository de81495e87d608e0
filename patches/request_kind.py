"""Requests beside which a row cannot be evicted from, nor steered.

The server's defaults are not for them: such a request runs in full unless it asks for our keys
itself, and is refused if it does.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

#: the keys of one that asks for nothing
OPTED_OUT: Final[dict[str, Any]] = {"kv_policy": "full", "steering": False}


class RequestKind(NamedTuple):
    """What such a request is refused with."""

    expected: str
    got: str


def request_kind(request: Any, beam_width: object) -> RequestKind | None:
    """The kind of a request as SGLang's tokenizer manager or its scheduler has it; None: another.

    Args:
        beam_width: of its sampling parameters, unchecked.
    """
    if isinstance(beam_width, int) and beam_width > 1:
        return RequestKind("no beam search with it", f"beam_width={beam_width}")
    # A session_id alone labels metrics and cache events; it does not change the prompt.
    if getattr(request, "session_params", None) is not None:
        return RequestKind("no session with it", "session_params")
    return None

"""Requests beside which a row cannot be evicted from, nor steered.

The server's defaults are not for them: such a request runs in full unless it asks for our keys
itself, and is refused if it does.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from sgl_skipkv.config import SettingError
from sgl_skipkv.request.settings import RequestSettings

#: the keys of one that asks for nothing
OPTED_OUT: Final[dict[str, Any]] = {"kv_policy": "full", "steering": False}


class RequestKind(NamedTuple):
    """What such a request is refused with."""

    expected: str
    got: str

    def refuse_beside(self, settings: RequestSettings | None) -> None:
        """Refuse what such a request cannot have.

        Raises:
            SettingError: it asks for a budget or for steering.
        """
        if settings is None or not (settings.evicts or settings.steers):
            return
        field = "kv_budget" if settings.evicts else "steering"
        off = [(settings.evicts, 'kv_policy "full"'), (settings.steers, "steering false")]
        choices = f"only one of the two, or {' and '.join(key for on, key in off if on)}"
        raise SettingError(field, self.expected, self.got, choices)


def request_kind(session_params: object, beam_width: object) -> RequestKind | None:
    """The kind of a request with these parameters; None: one that can have all of ours.

    Args:
        session_params: None if it has none; to SGLang an empty object is none as well.
        beam_width: of its sampling parameters, unchecked.
    """
    if isinstance(beam_width, int) and beam_width > 1:
        return RequestKind("no beam search with it", f"beam_width={beam_width}")
    # A session_id alone labels metrics and cache events; it does not change the prompt.
    if session_params:
        return RequestKind("no session with it", "session_params")
    return None

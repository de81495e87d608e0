"""Kinds of requests beside which a row cannot be evicted from.

The server's defaults are not for them: such a request runs in full unless it asks for our keys
itself, and is refused if it does.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class RequestKind(NamedTuple):
    """One of them.

    Attributes:
        expected, got: of the refusal.
        steers: whether it may be steered.
    """

    expected: str
    got: str
    steers: bool = False

    @property
    def opted_out(self) -> dict[str, Any]:
        """Keys of a request that wants nothing which it cannot have."""
        return {"kv_policy": "full", **({} if self.steers else {"steering": False})}


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
    captures = ("return_routed_experts", "return_indexer_topk")
    if any(getattr(request, name, False) for name in captures):
        expected = "no per-token capture of the row with it"
        return RequestKind(expected, " or ".join(captures), steers=True)
    return None

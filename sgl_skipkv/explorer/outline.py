"""Which lines of a trace are of which request: enough to choose requests, and small."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_skipkv.explorer.events import Finish, TraceEvent


@dataclass(eq=False)
class OutlinedRequest:
    """One request.

    Attributes:
        lines: at which byte of the file each of its lines begins.
    """

    number: int
    rid: str
    lines: list[int] = field(default_factory=list)
    continues: OutlinedRequest | None = None


class Outline:
    """The requests of one file, told apart and linked as in a ``Book``.

    Attributes:
        requests: in the order in which they appeared.
    """

    def __init__(self, events: Iterable[tuple[TraceEvent, int]]) -> None:
        self.requests: list[OutlinedRequest] = []
        self._open: dict[str, OutlinedRequest] = {}
        self._finished: dict[str, OutlinedRequest] = {}
        for event, at in events:
            self._add(event, at)

    def _add(self, event: TraceEvent, at: int) -> None:
        request = self._open.get(event.rid)
        if request is None:
            request = self._open[event.rid] = OutlinedRequest(len(self.requests), event.rid)
            self.requests.append(request)
        request.lines.append(at)
        if isinstance(event, Finish):
            if event.continues is not None:
                request.continues = self._finished.get(event.continues.rid)
            self._finished[event.rid] = self._open.pop(event.rid)

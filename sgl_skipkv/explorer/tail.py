"""Reads a trace while it grows: each line once, and no more at a time than a bound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sgl_skipkv.explorer.events import TraceEvent, event_of

#: read at once; of a longer file that is met for the first time, the end
LIMIT_BYTES: Final = 64 << 20


class TraceTail:
    """The lines of one file that are new since the last call.

    Attributes:
        at: bytes of the file that were read.
        unreadable: lines that are no events, or longer than ``LIMIT_BYTES``.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self.at = self.unreadable = 0
        self._inside_line = False

    def events(self) -> Iterator[tuple[TraceEvent, int]]:
        """Each new event, and the bytes of the file up to its end. None of a file that is not there
        yet."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size - self.at > LIMIT_BYTES or size < self.at:  # or it was cut off
                    self.at = max(0, size - LIMIT_BYTES)
                    self._inside_line = self.at > 0
                file.seek(self.at)
                data = file.read(LIMIT_BYTES)
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == LIMIT_BYTES:  # one line: its end will be met
            self.at, self._inside_line = self.at + len(data), True
            return
        for line in data[:whole].splitlines(keepends=True):
            self.at += len(line)
            if self._inside_line:
                self._inside_line = False
                self.unreadable += 1
                continue
            try:
                event = event_of(json.loads(line))
            except (ValueError, RecursionError):  # no JSON, no UTF-8, no event
                self.unreadable += 1
                continue
            if event is not None:
                yield event, self.at

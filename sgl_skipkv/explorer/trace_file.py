"""Reads a trace from its first line to its last, one line at a time."""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, Self

from sgl_skipkv.config import SettingError, Unabridged, why_unopened
from sgl_skipkv.explorer.events import TraceEvent, event_of

_EXPECTED: Final = "a trace, JSON lines"
_CHOICES: Final = "a file written by --skipkv-trace"


class TraceFile:
    """The events of one file.

    A server that was killed leaves half a line, and one that runs may be writing one. So lines that
    are no events are skipped and counted, as on the page of a server.

    Attributes:
        unreadable: lines that are no events, other than an incomplete last one.
        incomplete: whether the last line is half a line.

    Raises:
        SettingError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, _opened(path)
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def events(self, rid: str | None = None) -> Iterator[tuple[TraceEvent, int]]:
        """From the first line on, each event, and at which byte of the file its line begins.

        Args:
            rid: of this request only; None: of all.

        Raises:
            SettingError: the file has lines, and none of them is an event.
        """
        self._begin()
        begin, readable = 0, 0
        for number, line in enumerate(self._file, start=1):
            at, begin = begin, begin + len(line)
            if line.isspace():
                continue
            try:
                decoded = json.loads(line)
                event = None if rid is not None and not _is_of(decoded, rid) else event_of(decoded)
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, no event
                self._skip(number, line, error)
                continue
            readable += 1
            if event is not None:
                yield event, at
        if self._first_fault and not readable:
            got = Unabridged(f"{self.path}, {self._first_fault}")
            raise SettingError("file", _EXPECTED, got, _CHOICES)

    def at(self, begins: Iterable[int]) -> Iterator[TraceEvent]:
        """The events whose lines begin there."""
        for begin in begins:
            self._file.seek(begin)
            event = event_of(json.loads(self._file.readline()))
            if event is not None:
                yield event

    @property
    def skipped(self) -> str:
        """What was skipped, in words; empty: nothing."""
        told = []
        if self.unreadable:
            lines = "1 line" if self.unreadable == 1 else f"{self.unreadable:,} lines"
            fault = self._first_fault
            told.append(f"skipped {lines} of {self.path}, no events of a trace: {fault}")
        if self.incomplete:
            told.append(
                f"skipped the last line of {self.path}, which is incomplete: its server is writing "
                "it, or was killed"
            )
        return "\n".join(told)

    def _begin(self) -> None:
        self.unreadable, self.incomplete, self._first_fault = 0, False, ""
        self._file.seek(0)

    def _skip(self, number: int, line: bytes, error: Exception) -> None:
        is_json = not isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        if is_json or line.endswith(b"\n"):
            self.unreadable += 1
        else:
            self.incomplete = True
        # What JSON says of its own lines would be taken for the file's.
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        self._first_fault = self._first_fault or f"line {number}: {why}"


def _is_of(decoded: Any, rid: str) -> bool:
    """Whether it is of this request, or of none: that is no event."""
    return not isinstance(decoded, dict) or decoded.get("rid", rid) == rid


def _opened(path: Path) -> IO[bytes]:
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:
        replicas = _replicas(path) if isinstance(error, FileNotFoundError) else []
        choices = ", ".join(map(str, replicas)) or _CHOICES
        got = Unabridged(f"{path} ({why_unopened(error)})")
        raise SettingError("file", _EXPECTED, got, choices) from error
    if file.seekable():
        return file
    copy = TemporaryFile()  # a pipe, whose lines are read twice
    with file:
        shutil.copyfileobj(file, copy)
    copy.seek(0)
    return copy


def _replicas(path: Path) -> list[Path]:
    """The files that replicas or attention groups write in place of this one."""
    name = f"{glob.escape(path.stem)}.dp*{glob.escape(path.suffix)}"
    return sorted(path.parent.glob(name))

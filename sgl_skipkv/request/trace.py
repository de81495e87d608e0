"""The trace: one JSON line per compaction, restore, recomputation and finish of a request.

It holds logical positions and output ids, no prompt text. ``explorer/trace_file.py`` reads it.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from sgl_skipkv.config import SettingError, why_unopened

logger = logging.getLogger(__name__)


class TraceWriter:
    """Appends lines to the operator's file; ``write`` flushes each line to the operating system.

    A killed server may have left half a line; the first event then begins a line of its own. Once a
    line cannot be written, because the disk is full or a pipe has no reader any more, the trace
    ends: a file with a gap would be read as if it were whole, and requests go on.

    Raises:
        SettingError: the file cannot be opened for appending.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file: TextIO | None = open(path, "a", encoding="utf-8", opener=_private)
            if _ends_inside_line(Path(path)):
                self._file.write("\n")
        except (OSError, ValueError) as error:
            raise _unwritable(path, why_unopened(error)) from error

    def write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        line = json.dumps({"event": event, **fields}, separators=(",", ":"))
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            logger.error("sgl_skipkv: the trace %s ends here: %s", self._path, error.strerror)
            with suppress(OSError):  # what is left in its buffer
                self._file.close()
            self._file = None


def check_trace(path: str) -> None:
    """Refuse a file that certainly cannot be appended to, without creating it.

    Raises:
        SettingError: it is a folder, its folder is missing, or it may not be written to.
    """
    if "\0" in path:
        raise _unwritable(path, "not a file name")
    real = os.path.realpath(path)  # a link may lead to a file that is not there yet
    if os.path.isdir(real):
        raise _unwritable(path, "a folder")
    if not os.path.lexists(real) and not os.path.isdir(real := os.path.dirname(real)):
        raise _unwritable(path, "no such folder")
    if not os.access(real, os.W_OK):
        raise _unwritable(path, "not permitted")


def _unwritable(path: str, why: str) -> SettingError:
    expected = "a file that can be appended to"
    return SettingError("trace", expected, f"{path} ({why})", "a writable path")


def _private(path: str, flags: int) -> int:
    """Opened for this user alone, if it is new: it has everybody's text."""
    return os.open(path, flags, mode=0o600)


def _ends_inside_line(path: Path) -> bool:
    """Whether this file, if it is one at all and no pipe, has a last line without an end."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"

"""The trace: one JSON line per compaction, recomputation and finish, in a file the operator named.

It holds logical positions and output ids, no prompt text. Readers: ``skipkv trace`` and the masking
oracle of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgl_skipkv.config import SettingError


class TraceWriter:
    """Appends lines; every line is handed to the system when ``write`` returns.

    Raises:
        SettingError: the file cannot be opened for appending.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("a", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            expected = "a file that can be appended to"
            reason = getattr(error, "strerror", None) or "no name of a file"
            got = f"{path} ({reason})"
            raise SettingError("trace", expected, got, "a writable path") from error

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}, separators=(",", ":"))
        self._file.write(line + "\n")
        self._file.flush()


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """All events of a trace file, in order."""
    with Path(path).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]

"""The trace: one JSON line per compaction, restore, recomputation and finish of a request.

It holds logical positions and output ids, no prompt text. ``read_trace`` is strict, for the masking
oracle of the tests and for ``bench``; what users run skips lines that are no events
(``explorer/trace_file.py``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sgl_skipkv.config import SettingError, why_unopened

# Fields that readers need, by event.
_FIELDS: Final = {
    "compact": {"prompt_tokens", "generated", "kept"},
    "finish": {"output_ids", "policy", "evicted_tokens", "full_kv_tokens", "evicted_sentences"}
    | {"sentences", "peak_kv_tokens"},
}


class TraceWriter:
    """Appends lines to the operator's file; ``write`` flushes each line to the operating system.

    A killed server may have left half a line; the first event then begins a line of its own.

    Raises:
        SettingError: the file cannot be opened for appending.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("a", encoding="utf-8")
            if _ends_inside_line(Path(path)):
                self._file.write("\n")
        except (OSError, ValueError) as error:
            expected, got = "a file that can be appended to", f"{path} ({why_unopened(error)})"
            raise SettingError("trace", expected, got, "a writable path") from error

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}, separators=(",", ":"))
        self._file.write(line + "\n")
        self._file.flush()


def _ends_inside_line(path: Path) -> bool:
    """Whether this file, if it is one at all and no pipe, has a last line without an end."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """All events of a trace file, in order.

    Raises:
        SettingError: no such file, or a line that is not an event of a trace.
    """
    try:
        with Path(path).open(encoding="utf-8") as lines:
            events = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        expected, got = "a trace, JSON lines", f"{path} ({error})"
        raise SettingError("file", expected, got, "a file written by --skipkv-trace") from error
    for event in events:
        named = isinstance(event, dict) and "rid" in event and isinstance(event.get("event"), str)
        if not named or not _FIELDS.get(event["event"], set()) <= event.keys():
            expected = "lines of a trace, with event, rid and the fields of the event"
            raise SettingError("file", expected, event, "a file written by --skipkv-trace")
    return events

"""The trace: one JSON line per compaction, return and finish, in a file that the operator named.

It holds logical positions and output ids, no prompt text. Readers: ``skipkv trace`` and the masking
oracle of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sgl_skipkv.config import SettingError, why_unopened

# What readers go by, of the events that they look into.
_FIELDS: Final = {
    "compact": {"prompt_tokens", "generated", "kept"},
    "finish": {"output_ids", "policy", "evicted_tokens", "full_kv_tokens", "evicted_sentences"}
    | {"sentences", "peak_kv_tokens"},
}


class TraceWriter:
    """Appends lines; every line is handed to the system when ``write`` returns.

    Raises:
        SettingError: the file cannot be opened for appending.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("a", encoding="utf-8")
        except (OSError, ValueError) as error:
            expected, got = "a file that can be appended to", f"{path} ({why_unopened(error)})"
            raise SettingError("trace", expected, got, "a writable path") from error

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}, separators=(",", ":"))
        self._file.write(line + "\n")
        self._file.flush()


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """All events of a trace file, in order.

    Raises:
        SettingError: no such file, or a line that is none of ours.
    """
    try:
        with Path(path).open(encoding="utf-8") as lines:
            found = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        expected, got = "a trace, JSON lines", f"{path} ({error})"
        raise SettingError("file", expected, got, "what --skipkv-trace wrote") from error
    for event in found:
        named = isinstance(event, dict) and "rid" in event and isinstance(event.get("event"), str)
        if not named or not _FIELDS.get(event["event"], set()) <= event.keys():
            expected = "lines of a trace, with event, rid and what belongs to the event"
            raise SettingError("file", expected, event, "what --skipkv-trace wrote")
    return found

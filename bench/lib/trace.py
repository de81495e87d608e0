"""Reads the trace of a server that has stopped writing, or is idle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """All events of a trace file, in order."""
    with Path(path).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]

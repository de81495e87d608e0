"""The README's demo command: real, finished by itself, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from background import Background


def marked_processes(mark: str) -> list[int]:
    """Processes that carry the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended, or it is not ours
    return found


@pytest.mark.server
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_demo_runs_and_leaves_no_process(background: Background) -> None:
    demo = background.outcome("demo")
    assert demo.status == 0, demo.errors[-3000:]
    for part in ("quickstart.py", "of 3 say", "of 4", "struck through", "ran at once"):
        assert part in demo.said, part
    assert marked_processes(demo.mark) == []

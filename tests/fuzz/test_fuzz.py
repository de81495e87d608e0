"""Random lives of many requests on SGLang's real pools and tree, and proof that the checks bite.

The machine (pool_machine.py) checks every invariant after every rule; with one of our functions
broken (planted_bugs.py) it must fail. ``make fuzz`` runs the same commands for longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planted_bugs import bugs

COMMAND = (sys.executable, str(Path(__file__).parent / "fuzz.py"), "--report", "rows.json")

pytestmark = pytest.mark.timeout(1800)  # minutes where nothing else runs


def rows_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [*COMMAND, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    report = folder / "rows.json"
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(report.read_text())
    return found


def test_every_planted_bug_is_found(clean_folder: Path) -> None:
    """Within 3,000 lives each, and each with the seed that is known to find it soonest."""
    found = rows_of(clean_folder, "--planted", "--soonest", "--seeds", "2")
    assert [row["bug"] for row in found] == [name for name, *_ in bugs()]
    assert [row["bug"] for row in found if not row["lives"]] == []


def test_memory_stays_sound(clean_folder: Path) -> None:
    """300 lives of 50 steps. A failure names their seed."""
    rows = rows_of(clean_folder, "--examples", "300", "--seeds", "2")
    seen = {row["event"]: row["times"] for row in rows}
    # an empty run proves nothing
    wanted = {"compactions": 6000, "retractions": 400, "retractions, pool full": 8, "refused": 100}
    wanted |= {"backups": 100, "restored": 100, "recomputed because just compacted": 10}
    wanted |= {"prefix hits": 700, "finished": 600, "aborts": 1500}
    missed = {name: seen.get(name, 0) for name in wanted}
    assert {name: n for name, n in missed.items() if n < wanted[name]} == {}

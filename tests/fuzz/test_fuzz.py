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
from bug_lives import RARE
from planted_bugs import bugs

COMMAND = (
    *(sys.executable, str(Path(__file__).parent / "fuzz.py"), "--report", "rows.json"),
    *("--workers", "1"),  # another of pytest's workers has the other core
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # minutes where nothing else runs


def rows_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [*COMMAND, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    report = folder / "rows.json"
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(report.read_text())


def seen_in(folder: Path, *arguments: str) -> dict[str, int]:
    """event -> how often it happened, in 100 lives of 50 steps."""
    rows = rows_of(folder, *arguments, "--examples", "100", "--seeds", "1")
    return {row["event"]: row["times"] for row in rows}


def missing(seen: dict[str, int], wanted: dict[str, int]) -> dict[str, int]:
    """Events that happened less often than wanted."""
    return {name: seen.get(name, 0) for name in wanted if seen.get(name, 0) < wanted[name]}


def test_every_planted_bug_is_found(tmp_path: Path) -> None:
    """In the first lives of a seed; ``make fuzz`` looks at thousands of lives of others."""
    found = rows_of(tmp_path, "--planted", "--soonest")
    assert [row["bug"] for row in found] == [name for name, *_ in bugs() if name not in RARE]
    assert [row["bug"] for row in found if not row["lives"]] == []


def test_memory_stays_sound(tmp_path: Path) -> None:
    """100 lives of 50 steps; ``make fuzz`` has 20,000. A failure names their seed."""
    seen = seen_in(tmp_path)
    # an empty run proves nothing
    wanted = {"compactions": 1500, "retractions": 100, "retractions, pool full": 1, "refused": 10}
    wanted |= {"backups": 25, "restored": 10, "prefix hits": 175, "finished": 150, "aborts": 375}
    wanted |= {"continued": 75, "continued, evicted from": 50, "copied": 10, "histories": 175}
    wanted |= {"continued, not to its end": 25, "histories lost": 50, "no history, diverged": 12}
    wanted |= {"thoughts dropped": 15, "continued behind thoughts": 4, "demands": 400}
    wanted |= {"lost, counted": 20}
    assert missing(seen, wanted) == {}


def test_memory_stays_sound_with_hicache(tmp_path: Path) -> None:
    seen = seen_in(tmp_path, "--hicache")
    wanted = {"compactions": 500, "compactions in pages": 300, "retractions": 15, "restored": 4}
    wanted |= {"loaded": 15, "copied": 30, "continued": 50, "continued, evicted from": 40}
    assert missing(seen, wanted) == {}


def test_memory_stays_sound_on_a_decode_server(tmp_path: Path) -> None:
    seen = seen_in(tmp_path, "--decode")
    wanted = {"compactions": 1500, "compactions in pages": 500, "begun": 200, "aborts": 250}
    wanted |= {"retractions": 35, "retractions, pool full": 5, "backups": 10, "restored": 25}
    wanted |= {"copies of SGLang": 15, "pauses, retract": 5, "prefix hits": 20, "finished": 125}
    wanted |= {"failed, transfer": 4, "failed, handshake": 4, "steered tokens": 200}
    assert missing(seen, wanted) == {}


def test_memory_stays_sound_with_a_window_pool(tmp_path: Path) -> None:
    seen = seen_in(tmp_path, "--windows")
    wanted = {"compactions": 1000, "windows read": 10_000, "retractions": 100, "restored": 25}
    wanted |= {"restored, compacted": 10, "finished": 150, "aborts": 200, "prefix hits": 200}
    wanted |= {"retractions, pool full": 1, "window pool full": 1, "steered tokens": 200}
    wanted |= {"compactions in pages": 1000, "copied": 5, "windows without KV": 10}
    assert missing(seen, wanted) == {}


def test_memory_stays_sound_with_drafts(tmp_path: Path) -> None:
    seen = seen_in(tmp_path, "--drafts")
    wanted = {"compactions": 800, "compactions beside a step": 250, "right drafts": 6_000}
    wanted |= {"compactions in pages": 350, "wrong drafts": 6_000, "stopped within a step": 65}
    wanted |= {"retractions": 45, "retractions, pool full": 10, "aborts": 150, "refused": 5}
    wanted |= {"backups": 20, "restored": 4, "finished": 230, "prefix hits": 300}
    wanted |= {"histories": 80, "continued": 15, "continued, not to its end": 10}
    wanted |= {"copied": 12, "lost, counted": 12, "thoughts dropped": 10}
    assert missing(seen, wanted) == {}


def test_memory_stays_sound_with_states(tmp_path: Path) -> None:
    seen = seen_in(tmp_path, "--states")
    wanted = {"compactions": 900, "compactions in pages": 450, "states copied": 1100}
    wanted |= {"states kept": 375, "states continued": 80, "retractions": 80, "finished": 450}
    wanted |= {"retractions, pool full": 1, "measurements": 50, "aborts": 240}
    wanted |= {"steered tokens": 250}
    assert missing(seen, wanted) == {}

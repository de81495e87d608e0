"""The documents quote rows and nothing else; test_commands.py has the check itself."""

from __future__ import annotations

import re
from pathlib import Path

from bench.report import __main__ as tables

ROOT = Path(__file__).resolve().parents[2]


def test_rows_name_no_place_of_the_machine() -> None:
    sources = [*(ROOT / "bench" / "rows").glob("*.csv"), *(ROOT / "docs").glob("*.md")]
    places = re.compile(r"[ =\"](/(tmp|home|root|work|mnt|data)/\S*)")
    found = {
        f"{path.name}: {match[1]}"
        for path in sources
        for match in places.finditer(path.read_text())
    }
    assert len(sources) > 20 and not found


def test_the_check_sees_a_changed_number() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    changed = text.replace("| hard | `skipkv+` | ", "| hard | `skipkv+` | 9")
    assert changed != text == tables.rendered(changed)

"""The documents quote rows and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "bench" / "tables.py"


def test_tables_are_the_rows() -> None:
    done = subprocess.run([sys.executable, str(TABLES), "--check"], check=False, timeout=60)
    assert done.returncode == 0, "run: python bench/tables.py"


def test_the_check_sees_a_changed_number() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(TABLES.parent)!r}); import tables;"
        "text = tables.README.read_text();"
        "changed = text.replace('| hard | `skipkv+` | ', '| hard | `skipkv+` | 9');"
        "sys.exit(changed == text or tables.rendered(changed) != text)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

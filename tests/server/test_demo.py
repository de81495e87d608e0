"""The README's demo command: real, finished by itself, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.mark.server
@pytest.mark.slow
def test_demo_runs_and_leaves_no_process(tmp_path: Path) -> None:
    mark = f"demo-{uuid.uuid4()}"
    # what a user has: without helpers/quick_starts, which comes first
    path = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
    demo = subprocess.run(
        [sys.executable, "-P", str(DEMO), "--problems", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "SKIPKV_TEST_MARK": mark, "COLUMNS": "110"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stderr[-3000:]
    for part in ("quickstart.py", "of 3 say", "of 1", "struck through", "ran at once", "too small"):
        assert part in demo.stdout, part
    page = tmp_path / "skipkv-demo.html"
    assert str(page.resolve()) in demo.stdout
    assert '"rid":"distinct"' in page.read_text() and '"rid":"streaming"' in page.read_text()
    environments = [one.info["environ"] for one in psutil.process_iter(["environ"])]
    assert not [one for one in environments if one and mark in one.values()]

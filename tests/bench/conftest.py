"""Run a script of ``bench/`` in this process, and read the rows it wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.accuracy.figure import STYLE_PARAMETERS, plt
from bench.lib import device_clock, record

Rows = list[dict[str, str]]


@pytest.fixture
def drawn(tmp_path: Path) -> Callable[..., list[bytes]]:
    """What each of several inputs is drawn to."""

    def files(draw: Callable[[Any, Path], None], *inputs: Any) -> list[bytes]:
        for number, rows in enumerate(inputs):
            plt.rcParams.update(STYLE_PARAMETERS)
            draw(rows, tmp_path / f"{number}.svg")
        return [(tmp_path / f"{number}.svg").read_bytes() for number in range(len(inputs))]

    return files


@pytest.fixture
def rows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rows]:
    """Rows that a script writes with these arguments, on a small CPU."""
    monkeypatch.setenv(record.FOLDER, str(tmp_path))
    monkeypatch.setitem(device_clock.SIZES, "cpu", (1 << 20, 64))

    def run(script: ModuleType, rows: str, *arguments: str) -> Rows:
        monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
        script.main()
        return record.recorded(rows)

    return run

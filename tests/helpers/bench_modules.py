"""The rows of ``bench/``, for tests and load jobs that add to them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.lib.record import append_row

BENCH = Path(__file__).resolve().parents[2] / "bench"


def record(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append to ``bench/rows/<name>.csv``, as the benchmarks do."""
    for row in rows:
        append_row(name, row)


def bench_module(name: str) -> ModuleType:
    """``bench/<folder>/<module>.py``, as ``folder.module``."""
    return importlib.import_module(f"bench.{name}")

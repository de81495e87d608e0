"""The modules of ``bench/``, which import each other by bare names, for tests and load jobs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

BENCH = Path(__file__).resolve().parent.parent / "bench"


def bench_module(name: str) -> ModuleType:
    """``bench/<name>.py``.

    The folder is on the path for this import only: one of its names, ``kernels``, is also a package
    of PyPI that other packages look for.
    """
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


def record(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append to ``bench/rows/<name>.csv``, as the benchmarks do."""
    for row in rows:
        bench_module("record").append_row(name, row)

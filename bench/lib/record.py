"""Rows: every number that README quotes is one line of a CSV file in ``bench/rows``."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROWS = Path(__file__).resolve().parents[1] / "rows"
#: Where a checkout travels without its history: which one it is, and the folder for new rows.
COMMIT, FOLDER = "BENCH_COMMIT", "BENCH_ROWS"


def provenance() -> dict[str, str]:
    """Where a number came from: date, commit, device, versions, command."""
    import torch

    device = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get(COMMIT) or _commit() or "unknown",
        "device": device,
        "sglang": metadata.version("sglang"),
        "torch": metadata.version("torch"),
        "command": shlex.join(["python", *_script(), *map(_portable, sys.argv[1:])]),
    }


def _script() -> list[str]:
    """``-m bench.accuracy`` or ``tests/launches.py``: what runs, as it is called in a checkout."""
    script, root = Path(sys.argv[0]).resolve(), ROWS.parents[1]
    if not script.is_relative_to(root):
        return [script.name]
    name = script.relative_to(root)
    if name.parts[0] != "bench":
        return [str(name)]
    return ["-m", ".".join(name.with_suffix("").parts).removesuffix(".__main__")]


def _commit() -> str:
    git = ["git", "-C", str(ROWS), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # a machine without git
        return ""


def _portable(argument: str) -> str:
    """A row tells how it was made, not where its maker keeps things."""
    path = Path(argument)
    return f"PATH/{path.name}" if path.is_absolute() else argument


def _path(name: str) -> Path:
    return Path(os.environ.get(FOLDER) or ROWS) / f"{name}.csv"


def recorded(name: str) -> list[dict[str, str]]:
    """The lines of ``bench/rows/<name>.csv``; none where there is no such file."""
    path = _path(name)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_row(name: str, values: Mapping[str, Any]) -> None:
    """Add one line to ``bench/rows/<name>.csv``; the first line of a new file is its header.

    ``BENCH_ROWS`` names another folder.

    Raises:
        ValueError: the file has other columns.
    """
    path = _path(name)
    row = {**values, **provenance()}
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as existing:
            header = next(csv.reader(existing))
        if header != list(row):
            raise ValueError(f"{path.name}: expected columns {header}, got {list(row)}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)

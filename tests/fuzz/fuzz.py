"""Long runs of the state machine, and how soon it finds planted bugs.

    python tests/fuzz/fuzz.py --examples 20000          # make fuzz
    python tests/fuzz/fuzz.py --planted --seeds 1 2 3   # one line per bug and seed
    python tests/fuzz/fuzz.py --planted --soonest       # one line per bug: what make test runs

The first prints how often everything happened; the second how many lives pass before each planted
bug is found. Both end with 1 if something is wrong: an invariant that does not hold, a bug that
stays.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), str(ROOT / "tests" / "helpers")])

from planted_bugs import FOUND, bugs, plant
from pool_books import plugin_and_topology
from pool_machine import PoolMachine, run_machine
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from bench.lib.record import append_row, recorded

Row = dict[str, Any]
STEPS = 50
logging.disable()  # requests that the machine has refused are not news


def fuzz(examples: int, seed: int, part: int = 500) -> list[Row]:
    """Lives in parts of their own seed, so that a failure names a short run that shows it.

    Raises:
        SystemExit: an invariant does not hold.
    """
    total: Counter[str] = Counter()
    for number in tqdm(range(0, examples, part), desc="fuzz", unit=f"{part} lives"):
        try:
            total += run_machine(min(part, examples - number), steps=STEPS, seed=seed + number)
        except FOUND as error:
            raise SystemExit(f"seed {seed + number}: {type(error).__name__}: {error}") from error
    sizes = {"lives": examples, "steps": STEPS, "seed": seed}
    return [{**sizes, "event": name, "times": count} for name, count in sorted(total.items())]


def soonest() -> dict[str, list[int]]:
    """Bug -> of the recorded seeds, the one that took the fewest lives."""
    found = [row for row in recorded("planted_bugs") if row["lives"]]
    order = sorted(found, key=lambda row: -int(row["lives"]))
    return {row["bug"]: [int(row["seed"])] for row in order}


def planted(seeds_of: Mapping[str, Sequence[int]], seeds: Sequence[int], most: int) -> list[Row]:
    """Lives that pass until each planted bug is found; empty where it never is.

    Args:
        seeds_of: bug -> its seeds.
        seeds: of the other bugs.
        most: lives per bug and seed.
    """
    rows: list[Row] = []
    for name, function, piece, instead in tqdm(bugs(), desc="bugs", unit="bug"):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, function, piece, instead)
            for seed in seeds_of.get(name, seeds):
                found = found_after(seed, most)
                rows.append({"bug": name, "seed": seed, "lives": "" if found is None else found})
    return rows


def found_after(seed: int, most: int) -> int | None:
    try:
        run_machine(most, steps=STEPS, seed=seed)
    except FOUND:
        return PoolMachine.lives
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--planted", action="store_true", help="plant bugs instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--soonest", action="store_true", help="only the seed that found a bug soonest, by the rows"
    )
    parser.add_argument("--most", type=int, default=3_000, help="lives per planted bug and seed")
    parser.add_argument("--report", type=Path, help="write the rows, as JSON")
    parser.add_argument("--record", action="store_true", help="append to bench/rows")
    arguments = parser.parse_args()
    with plugin_and_topology():
        if arguments.planted:
            seeds_of = soonest() if arguments.soonest else {}
            name, rows = "planted_bugs", planted(seeds_of, arguments.seeds, arguments.most)
        else:
            name, rows = "fuzz", fuzz(arguments.examples, arguments.seeds[0])
    table = Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(rows))
    if arguments.record:
        for row in rows:
            append_row(name, row)
    return int(any(row.get("lives") == "" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

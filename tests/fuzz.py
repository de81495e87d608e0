"""Long runs of the state machine, and how soon it finds planted bugs.

    python tests/fuzz.py --examples 20000          # make fuzz
    python tests/fuzz.py --planted --seeds 1 2 3   # one line per bug

The first prints how often everything happened; the second how many lives pass before each planted
bug is found. Both end with 1 if something is wrong: an invariant that does not hold, a bug that
stays.
"""

from __future__ import annotations

import argparse
import logging
import sys

import pytest
from planted_bugs import FOUND, bugs, plant
from pool_books import plugin_and_topology
from pool_machine import PoolMachine, run_machine
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

STEPS = 50
logging.disable()  # calls that the machine has refused are not news


def fuzz(console: Console, examples: int, seed: int, part: int = 500) -> int:
    """Lives in parts of their own seed, so that a failure names a short run that shows it."""
    total: dict[str, int] = {}
    for number in tqdm(range(0, examples, part), desc="fuzz", unit=f"{part} lives"):
        try:
            seen = run_machine(min(part, examples - number), steps=STEPS, seed=seed + number)
        except FOUND as error:
            console.print(f"seed {seed + number}: {type(error).__name__}: {error}")
            return 1
        for name, count in seen.items():
            total[name] = total.get(name, 0) + count
    table = Table(
        "what happened", "times", title=f"{examples:,} lives of {STEPS} steps, no failure"
    )
    for name, count in sorted(total.items()):
        table.add_row(name, f"{count:,}")
    console.print(table)
    return 0


def lives_until_found(seed: int, most: int) -> int | None:
    """Lives that pass before the machine fails; None if it never does."""
    try:
        run_machine(most, steps=STEPS, seed=seed)
    except FOUND:
        return PoolMachine.lives
    return None


def planted(console: Console, seeds: list[int], most: int) -> int:
    table = Table("planted bug", *(f"seed {seed}" for seed in seeds), title="lives until found")
    survivors = 0
    for name, function, piece, instead in tqdm(bugs(), desc="bugs", unit="bug"):
        patch = pytest.MonkeyPatch()
        with patch.context() as one:
            plant(one, function, piece, instead)
            found = [lives_until_found(seed, most) for seed in seeds]
        survivors += found.count(None)
        table.add_row(name, *("never" if lives is None else f"{lives:,}" for lives in found))
    console.print(table)
    return int(survivors > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--planted", action="store_true", help="plant bugs instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--most", type=int, default=3_000, help="lives per planted bug and seed")
    arguments = parser.parse_args()
    console = Console(width=110)
    with plugin_and_topology():
        if arguments.planted:
            return planted(console, arguments.seeds, arguments.most)
        return fuzz(console, arguments.examples, arguments.seeds[0])


if __name__ == "__main__":
    sys.exit(main())

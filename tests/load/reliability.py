"""Every run that docs/reliability.md quotes, and the table of its goals.

    python tests/load/reliability.py            # make reliability: about 2.5 hours of two cores
    python tests/load/reliability.py --print    # the table of the rows that are there

Two lanes side by side: what needs one core, and the servers whose limits are wide. The servers
whose limits are seconds run after them, alone. The rows of the last run are replaced; what each run
prints goes to a log.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), str(ROOT / "tests" / "helpers")])

from bench.report import goal_table
from sgl_skipkv.cli.progress import progress

ROWS = (
    *("fuzz", "planted_bugs", "hook_calls", "load", "ranks", "rank_runs", "rank_costs", "models"),
    *("pages", "page_runs"),
)
Command = tuple[str, ...]
LANES: tuple[tuple[Command, ...], ...] = (
    (
        ("tests/fuzz/fuzz.py", "--examples", "20000", "--seeds", "1", "--workers", "1"),
        ("tests/fuzz/fuzz.py", "--planted", "--workers", "1"),
        ("tests/fuzz/fuzz_hooks.py", "--calls", "1000000"),
    ),
    tuple(("tests/load/load.py", name) for name in ("L5", "L6", "L7", "L8", "L9")),
)
ALONE: tuple[Command, ...] = (
    *(("tests/load/load.py", f"L{number}") for number in range(5)),
    ("tests/load/ranks.py", "--scale", "0.2"),
    ("tests/load/models.py",),
    ("tests/load/pages.py",),
)
bar = progress()
console = bar.console


def run(command: Command, folder: Path) -> bool:
    """One run, and whether it held its limits."""
    name = "-".join(Path(part).stem for part in command if part[0] != "-")
    start = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, *command, "--record"],
            cwd=ROOT,
            check=False,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    minutes, held = (time.monotonic() - start) / 60, done.returncode == 0
    verdict = "held" if held else f"[bold red]missed a limit or failed: {log.name}"
    console.print(f"{minutes:5.1f} min  {' '.join(command)}  {verdict}")
    bar.advance(bar.task_ids[0])
    return held


def run_lane(commands: Sequence[Command], folder: Path) -> bool:
    """One after the other, all of them."""
    held = [run(command, folder) for command in commands]  # the next one runs either way
    return all(held)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--print", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    held = True
    if not arguments.print:
        for name in ROWS:
            (ROOT / "bench" / "rows" / f"{name}.csv").unlink(missing_ok=True)
        folder, start = Path(tempfile.mkdtemp(prefix="reliability-")), time.monotonic()
        console.print(f"logs: {folder}")
        bar.add_task("runs", total=sum(map(len, (*LANES, ALONE))))
        with bar:
            with ThreadPoolExecutor(len(LANES)) as pool:
                held = all(list(pool.map(lambda lane: run_lane(lane, folder), LANES)))
            held &= run_lane(ALONE, folder)
        console.print(f"{(time.monotonic() - start) / 60:5.1f} min in all")
    print(goal_table.goals())
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())

"""Every run that docs/reliability.md quotes, one after the other, and the table of the goals.

    python tests/reliability.py            # make reliability: about an hour of two cores
    python tests/reliability.py --print    # the table of the rows that are there

The rows of the last run are replaced. What has no rows is in `make test`: wrong parameters (G8),
wrong starts (G10), isolation among steered and aborted neighbours (G4).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("fuzz", "planted_bugs", "hook_calls", "load")
COMMANDS = (
    ("tests/fuzz.py", "--examples", "10000", "--seeds", "1"),
    ("tests/fuzz.py", "--planted"),
    ("tests/fuzz_hooks.py", "--calls", "1000000"),
    ("tests/load.py", "L0", "L1", "L2", "L3", "L5", "L6", "L7"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--print", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    missed = 0
    if not arguments.print:
        for name in ROWS:
            (ROOT / "bench" / "rows" / f"{name}.csv").unlink(missing_ok=True)
        for command in tqdm(COMMANDS, desc="reliability", unit="run"):
            done = subprocess.run([sys.executable, *command, "--record"], cwd=ROOT, check=False)
            missed += done.returncode != 0
    sys.path.insert(0, str(ROOT / "bench"))
    from goal_table import goals

    print(goals())
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

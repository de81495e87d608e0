"""Load on the real server, with every check of SGLang on: what happens often, together, or rudely.

    python tests/load/load.py L0 L1 L2 L3 L4 L6 L8     # minutes each
    python tests/load/load.py L5 L7 L9                 # a quarter of an hour each, or more
    python tests/load/load.py L0 L5 --scale 0.02       # a trial
    python tests/load/load.py L9 --scale 0.1           # of 60 seconds instead of 600

One line per measured quantity, with its limit; ends with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), *(str(ROOT / "tests" / one) for one in ("helpers", "fuzz", "api"))])

from isolated import isolate

isolate()  # before anything imports sglang

from load_hostile import hostile
from load_jobs import Job, differential, long_output, pressure, smoke, storms
from load_mixed import mixed
from load_rows import Findings, Row
from load_server import FAMILY
from load_soak import kill, soak
from load_turns import conversations
from row_table import show
from tiny_models import save_model

from sgl_skipkv.cli.server_process import exit_on_sigterm

JOBS: dict[str, Job] = {
    **{"L0": smoke, "L1": pressure, "L2": storms, "L3": differential},
    **{"L4": hostile, "L5": soak, "L6": long_output, "L7": kill},
    **{"L8": conversations, "L9": mixed},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="+", choices=JOBS, metavar="JOB", help=" ".join(JOBS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--record", action="store_true", help="append to bench/rows")
    arguments = parser.parse_args()
    exit_on_sigterm()
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="load-"))
    print("logs and traces, kept if anything goes wrong:", folder)
    model = save_model(FAMILY, folder / "model")
    for job in arguments.jobs:
        findings = Findings(job, arguments.scale)
        JOBS[job](model, folder / job, findings)
        show(findings.rows, "load", record="load" if arguments.record else None)
        rows += findings.rows
    missed = [row for row in rows if row["ok"] == "no"]
    if missed:
        show(missed, "load")
    else:
        shutil.rmtree(folder)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""``skipkv tune`` on bundled problems: what it says, and how long it takes.

    python -m bench.accuracy.tune                # 40 problems of three levels
    python -m bench.accuracy.tune --problems 80  # arguments of skipkv tune

Appends a row per setting to bench/rows/tune.csv. ``seconds`` is the whole command, with the start
of its server, and ``cpu_seconds`` what both computed: on a machine that others use, less than
``seconds`` times the cores says that the command had to wait.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time

from bench.lib.record import append_row
from bench.lib.serving import BUNDLED
from sgl_skipkv.cli.main import main as skipkv

#: the traces are a tenth of a real model's
BASE = ("--kv-params", '{"interval": 32}', "--max-new-tokens", "2000")


def main() -> int:
    command = ["tune", "--model-path", str(BUNDLED), "--prompts", str(BUNDLED / "heldout.jsonl")]
    start, printed = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = skipkv([*command, *BASE, *sys.argv[1:], "--json"])
    seconds = round(time.perf_counter() - start)
    if status:
        print(printed.getvalue())
        return status
    report = json.loads(printed.getvalue())
    print("\n".join(report["sentences"]))
    cpu_seconds = round(sum(os.times()[:4]))  # its own, and of the server, which has ended
    shared = {"prompts": report["prompts"], "seconds": seconds, "cpu_seconds": cpu_seconds}
    shared["full_output_tokens_p50"] = report["full_output_tokens_p50"]
    for i, row in enumerate(report["rows"]):
        chosen = {"recommended": int(row == report["recommended"])}
        append_row("tune", {**shared, "number": i, **chosen, **rounded(row)})
    return 0


def rounded(row: dict[str, object]) -> dict[str, object]:
    """Columns with four digits, empty where there is no value."""
    values = ((name, "" if value is None else value) for name, value in row.items())
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values}


if __name__ == "__main__":
    sys.exit(main())

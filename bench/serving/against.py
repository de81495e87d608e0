"""This checkout against an older one: throughput without budgets, and of requests that compact.

    python -m bench.serving.against --python OLD/.venv/bin/python --commit 200a094

Two servers of the same configuration run side by side, one per checkout; the same load goes to the
one and the other in turn, so both see the same machine. One row per load in bench/rows/against.csv:
the median of the paired ratios and its 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.lib.pairs import START_S, load, measure, parser_of
from sgl_skipkv.cli.server_process import ServerProcess

#: load -> what its requests ask for. A compaction every 16 tokens: what it costs shows.
LOADS: dict[str, dict[str, Any]] = {
    "no budget": {},
    **{
        f"{policy}, interval 16": {
            "kv_budget": 64,
            "kv_policy": policy,
            "kv_params": {"interval": 16},
        }
        for policy in ("skipkv", "skipkv+", "h2o", "streaming")
    },
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--python", required=True, help="of the older checkout's environment")
    parser.add_argument("--commit", required=True, help="the older checkout's")
    parser.add_argument("--loads", nargs="+", default=[*LOADS], choices=LOADS)
    arguments = parser.parse_args()
    run(arguments)
    return 0


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and append the rows."""
    flags = ["--max-total-tokens", "16384"]
    model = Path(arguments.model_path).resolve()
    with (
        tempfile.TemporaryDirectory() as name,
        ServerProcess(model, Path(name) / "new", flags) as new,
        ServerProcess(model, Path(name) / "old", flags, python=arguments.python) as old,
    ):
        servers = {"this": new.wait_ready(START_S), "older": old.wait_ready(START_S)}
        rows = []
        for what in arguments.loads:
            ways = {way: load(one, arguments, **LOADS[what]) for way, one in servers.items()}
            metric = f"throughput over that of {arguments.commit}: {what}"
            rows.append(measure("against", metric, ways, arguments))
        return rows


if __name__ == "__main__":
    sys.exit(main())

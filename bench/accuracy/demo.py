"""The demo's table as rows: what README quotes.

    python -m bench.accuracy.demo

Runs the rounds of ``examples/demo.py`` on this machine and appends one row each to
bench/rows/demo.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from bench.lib.record import append_row
from examples import demo
from sgl_skipkv.cli.progress import progress as progress_bar
from sgl_skipkv.cli.server_process import ServerProcess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=16)
    arguments = parser.parse_args()
    console, tokenizer = Console(), AutoTokenizer.from_pretrained(demo.MODEL)
    flags = ["--max-total-tokens", str(demo.POOL_TOKENS), "--max-running-requests", "64"]
    flags += ["--kv-policy", "distinct"]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(demo.MODEL, Path(folder), flags) as server,
        progress_bar(transient=True) as progress,
    ):
        server.wait_ready()
        problems = demo.hard_problems(arguments.problems)
        rounds = [
            demo.run_round(server, problems, kv_budget, tokenizer, progress)
            for kv_budget in demo.BUDGETS
        ]
    for measured in rounds:
        row = {**dataclasses.asdict(measured), "pool_tokens": demo.POOL_TOKENS}
        row["kv_budget"] = "" if measured.kv_budget is None else measured.kv_budget
        row["seconds"] = round(measured.seconds, 2)
        row["tokens_per_s"] = round(measured.output_tokens / measured.seconds)
        append_row("demo", row)
    console.print(demo.results_table(rounds))


if __name__ == "__main__":
    main()

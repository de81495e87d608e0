"""Accuracy against KV budget: levels x policies x budgets, through the real server.

    python -m bench.accuracy                                  # the bundled model, everything
    python -m bench.accuracy --levels hard --policies skipkv rkv random --sampling greedy
    python -m bench.accuracy --model-path M --problem-file math500.jsonl \\
        --suffix ' Put the final answer in \\boxed{}.' --max-new-tokens 16384

Budgets are shares of the mean trace of FullKV, which runs first. One row per cell in
bench/rows/accuracy.csv; a sweep that was stopped goes on where it was. ``bench/accuracy/figure.py``
draws the rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.lib.policies import compared
from bench.lib.record import recorded
from bench.lib.serving import BUNDLED_PARAMS, add_arguments, is_bundled, sweep_over
from bench.lib.sweep import Cell
from sgl_skipkv import policy

SHARES = (0.08, 0.15, 0.25, 0.35, 0.5)
SEEDS = 3


def params_of(policy: str, given: dict[str, dict[str, Any]]) -> str:
    """Parameters of one policy: those of ``*``, then its own."""
    return json.dumps({**given.get("*", {}), **given.get(policy, {})}, sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--policies", nargs="+", choices=policy.names(), default=list(compared()))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--sampling", nargs="+", default=["greedy", "sampled"])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="answers per problem when sampled")
    parser.add_argument("--kv-params", type=json.loads, help="JSON: policy, or *, to parameters")
    arguments = parser.parse_args()
    bundled = is_bundled(arguments.model_path)
    params = arguments.kv_params or (BUNDLED_PARAMS if bundled else {})
    with sweep_over(arguments, "accuracy") as sweep:
        full = sweep.baseline()
        for sampling in arguments.sampling:
            seeds = arguments.seeds if sampling == "sampled" else 1
            cells = [Cell(level, "full", sampling=sampling, seeds=seeds) for level in full]
            for level, row in full.items():
                trace_tokens = float(row["output_tokens"])
                cells += [
                    Cell(
                        level,
                        policy,
                        round(share * trace_tokens),
                        params_of(policy, params),
                        sampling,
                        seeds,
                    )
                    for policy in arguments.policies
                    if policy != "full"
                    for share in arguments.shares
                ]
            sweep.run(cells)
    show(sweep.name, sweep.labels)


def show(name: str, labels: Mapping[str, str | int]) -> None:
    """What the rows say, on the terminal."""
    table = Table(title=f"bench/rows/{name}.csv", box=box.SIMPLE)
    for heading in ("level", "sampling", "policy", "budget", "right, % [95%]", "output", "peak KV"):
        table.add_column(heading, no_wrap=True)
    policies = ("full", *compared())
    for row in sorted(
        recorded(name),
        key=lambda row: (
            *(row["sampling"], row["level"], policies.index(row["policy"])),
            int(row["kv_budget"] or 0),
        ),
    ):
        if all(row[key] == str(value) for key, value in labels.items()):
            middle, low, high = (
                100 * float(row[column]) for column in ("accuracy", "wilson_low", "wilson_high")
            )
            right = f"{middle:.1f} [{low:.0f}, {high:.0f}]"
            setting = [row[column] for column in ("level", "sampling", "policy", "kv_budget")]
            table.add_row(*setting, right, row["output_tokens"], row["peak_kv_tokens"])
    Console().print(table)


if __name__ == "__main__":
    main()

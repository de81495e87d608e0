"""Right traces under a budget, family by family, without a server: a comparison in minutes.

    python -m bench.accuracy.forced --problems 20
    python -m bench.accuracy.forced --families notes search --policies rkv gkv --shares 0.15 0.25
    python -m bench.accuracy.forced --first-problem 200 --rows unseen   # none that was looked at

``bench/lib/forced.py`` says what is computed and what it cannot say. Budgets are shares of the mean
trace of a family and size, or numbers of tokens. One row per cell in bench/rows; cells on record
are not run again. ``wrong_tokens`` are those that the same model writes rightly with a full cache.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.lib.cells import run_cells
from bench.lib.forced import FAMILIES_MODEL, forced_model, outcome
from bench.lib.policies import compared
from bench.reasoner.check_families import encode
from bench.reasoner.families.base import SIZES, Size
from bench.reasoner.families.registry import FAMILIES, HELDOUT, heldout_task
from sgl_skipkv import policy

SHARES = (0.08, 0.15, 0.25, 0.35)
INTERVAL = 32


@dataclass(frozen=True)
class Cell:
    """One setting on held-out problems of one family and size."""

    model: str
    family: str
    size: Size
    policy: str
    kv_budget: int
    kv_params: str
    problems: int
    first_problem: int


def run(folder: Path, cell: Cell) -> dict[str, float]:
    """Its row, without the setting."""
    forced, right, wrong, held = forced_model(folder), 0, 0, 0.0
    keys = {
        "kv_budget": cell.kv_budget,
        "kv_policy": cell.policy,
        "kv_params": json.loads(cell.kv_params),
    }
    for index in range(cell.first_problem, cell.first_problem + cell.problems):
        ids, prompt = encode(forced.tokenizer, heldout_task(cell.family, cell.size, index))
        forced_run = forced.run(ids, prompt, keys)
        missed = forced.missed(ids, forced_run.wrong)
        right, wrong, held = right + (not missed), wrong + missed, held + forced_run.mean_kv_tokens
    mean_kv_tokens = round(held / cell.problems, 1)
    return {**outcome(right, wrong, cell.problems), "mean_kv_tokens": mean_kv_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, default=FAMILIES_MODEL)
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--policies", nargs="+", choices=policy.names(), default=list(compared()))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--kv-budgets", type=int, nargs="+", help="tokens, in place of shares")
    parser.add_argument("--kv-params", type=json.loads, default={}, help="JSON, of all policies")
    parser.add_argument("--problems", type=int, default=HELDOUT, help="of each family and size")
    parser.add_argument("--first-problem", type=int, default=0, help="index of the first of them")
    parser.add_argument("--rows", default="forced", help="file in bench/rows, without its ending")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    tokenizer = forced_model(arguments.model_path).tokenizer
    params = json.dumps({"interval": INTERVAL, **arguments.kv_params}, sort_keys=True)
    first, problems = arguments.first_problem, arguments.problems
    indices, cells = range(first, first + problems), []
    for family in arguments.families:
        for size in arguments.sizes:
            tasks = (heldout_task(family, size, index) for index in indices)
            lengths = [len(ids) - prompt for ids, prompt in (encode(tokenizer, t) for t in tasks)]
            trace_tokens = sum(lengths) / len(lengths)
            shared = [round(share * trace_tokens) for share in arguments.shares]
            cells += [
                Cell(
                    *(arguments.model_path.name, family, size, name),
                    *(kv_budget, params, problems, first),
                )
                for kv_budget in arguments.kv_budgets or shared
                for name in arguments.policies
            ]
    run_cells(arguments.rows, cells, partial(run, arguments.model_path), arguments.workers)


if __name__ == "__main__":
    main()

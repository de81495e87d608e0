"""The same budget at batch sizes 1, 10 and 32: accuracy, and whether a single kept token differs.

    python -m bench.accuracy.batch_size

Papers report that accuracy falls as the batch grows, because their static batches pad prompts. Here
each request is compacted by itself, so the kept sets have to be identical. One row per batch size
in bench/rows/batch_size.csv.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.lib.accuracy import accuracy_columns
from bench.lib.record import append_row
from bench.lib.serving import add_arguments, read_problems, servers
from bench.lib.sweep import Cell, Problem
from bench.lib.trace import read_trace
from sgl_skipkv.cli.progress import track
from sgl_skipkv.cli.tune.grading import is_right

SIZES = (1, 10, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.set_defaults(problems=32, levels=["easy"], parallel=max(SIZES))
    parser.add_argument("--policy", default="skipkv")
    parser.add_argument("--kv-budget", type=int, default=75)
    parser.add_argument("--kv-params", default='{"interval": 32, "tau": 0.85}')
    parser.add_argument("--trace", type=Path, help="where the server writes its trace")
    arguments = parser.parse_args()
    ((level, problems),) = read_problems(arguments).items()
    trace = (arguments.trace or Path(".sweep") / f"batch_size-{time.time_ns()}.jsonl").resolve()
    trace.parent.mkdir(parents=True, exist_ok=True)
    arguments.server_flags = [*arguments.server_flags, f"skipkv-trace={trace}"]
    cell = Cell(level, arguments.policy, arguments.kv_budget, arguments.kv_params)
    params = cell.sampling_params(arguments.max_new_tokens, seed=0)
    with servers(arguments) as (server,):

        def solve(problem: Problem, size: int) -> dict[str, Any]:
            body = {"text": problem.text, "sampling_params": params, "rid": f"{size}:{problem.id}"}
            answer: dict[str, Any] = server.post("/generate", body)
            return answer

        alone: list[Any] = []
        for size in SIZES:
            with ThreadPoolExecutor(size) as pool:
                replies = list(
                    track(
                        pool.map(lambda problem, size=size: solve(problem, size), problems),
                        f"batch {size}",
                        len(problems),
                    )
                )
            kept: dict[str, list[list[int]]] = {}
            for event in read_trace(trace):
                if event["event"] == "compact":
                    kept.setdefault(event["rid"], []).append(event["kept"])
            outputs = [
                (reply["output_ids"], kept.get(f"{size}:{problem.id}", []))
                for reply, problem in zip(replies, problems, strict=True)
            ]
            alone = alone or outputs
            right = sum(
                is_right(reply["text"], problem.answer)
                for reply, problem in zip(replies, problems, strict=True)
            )
            pairs = list(zip(outputs, alone, strict=True))
            append_row(
                "batch_size",
                {
                    "level": level,
                    "policy": arguments.policy,
                    "kv_budget": arguments.kv_budget,
                    "kv_params": arguments.kv_params,
                    "batch": size,
                    "problems": len(problems),
                    **accuracy_columns(right, len(problems)),
                    "compactions": sum(len(sets) for _, sets in outputs),
                    "same_kept_sets_as_alone": sum(
                        batched[1] == other[1] for batched, other in pairs
                    ),
                    "same_outputs_as_alone": sum(
                        batched[0] == other[0] for batched, other in pairs
                    ),
                },
            )


if __name__ == "__main__":
    main()

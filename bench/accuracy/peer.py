"""kvpress beside this package: same model, problems, budgets and machine, one after the other.

    uv venv peer && uv pip install --python peer/bin/python 'kvpress>=0.5,<0.6'
    python -m bench.accuracy.peer --peer-python peer/bin/python

One row per cell in bench/rows/peer.csv. Every cell runs alone, one request at a time, because that
is what kvpress does; one more cell of ours per budget shows the same with 16 requests at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.lib.accuracy import accuracy_columns
from bench.lib.record import append_row
from bench.lib.serving import add_arguments, prompts_of, read_problems, servers
from bench.lib.sweep import Cell, Problem
from sgl_skipkv.cli.progress import track
from sgl_skipkv.cli.tune.grading import is_right

PRESSES = ("SnapKVPress", "KnormPress")
OURS = (("snapkv", {}), ("skipkv", {"tau": 0.85}), ("skipkv+", {"tau": 0.85}))
INTERVAL = 32
BATCH = 16


def report(
    package: str,
    policy: str,
    kv_budget: int | None,
    problems: Sequence[Problem],
    texts: Sequence[str],
    *,
    tokens: int,
    seconds: float,
    parallel: int = 1,
) -> None:
    right = sum(
        is_right(text, problem.answer) for text, problem in zip(texts, problems, strict=True)
    )
    append_row(
        "peer",
        {
            "package": package,
            "policy": policy,
            "level": problems[0].level,
            "kv_budget": "" if kv_budget is None else kv_budget,
            "requests_at_once": parallel,
            "problems": len(problems),
            **accuracy_columns(right, len(problems)),
            "output_tokens": round(tokens / len(problems), 1),
            "tokens_per_s": round(tokens / seconds),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.set_defaults(problems=16, levels=["easy"], parallel=BATCH, max_new_tokens=600)
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--budgets", nargs="+", type=int, default=[77, 154])
    arguments = parser.parse_args()
    ((level, problems),) = read_problems(arguments).items()
    prompts = prompts_of(arguments.problem_file, level, len(problems))

    jobs = [("none", None), *((press, b) for b in arguments.budgets for press in PRESSES)]
    request = {
        "model_path": arguments.model_path,
        "max_new_tokens": arguments.max_new_tokens,
        "jobs": [
            {"press": press, "kv_budget": budget, "interval": INTERVAL, "prompts": prompts}
            for press, budget in jobs
        ],
    }
    script = Path(__file__).with_name("peer_kvpress.py")
    with subprocess.Popen(
        [arguments.peer_python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        peer.stdin.write(json.dumps(request))
        peer.stdin.close()
        for press, budget in track(jobs, "kvpress"):
            result = json.loads(peer.stdout.readline())
            cost = {"tokens": result["tokens"], "seconds": result["seconds"]}
            report("kvpress", press, budget, problems, result["answers"], **cost)

    with servers(arguments) as (server,):

        def run(policy: str, budget: int | None, parameters: dict[str, Any], parallel: int) -> None:
            cell = Cell(level, policy, budget, json.dumps({"interval": INTERVAL, **parameters}))
            params = cell.sampling_params(arguments.max_new_tokens, seed=0)
            bodies = [{"text": problem.text, "sampling_params": params} for problem in problems]
            started = time.monotonic()
            with ThreadPoolExecutor(parallel) as pool:
                replies = list(pool.map(lambda body: server.post("/generate", body), bodies))
            seconds = time.monotonic() - started
            texts = [reply["text"] for reply in replies]
            tokens = sum(reply["meta_info"]["completion_tokens"] for reply in replies)
            cost = {"tokens": tokens, "seconds": seconds, "parallel": parallel}
            report("sgl_skipkv", policy, budget, problems, texts, **cost)

        cells = [("full", None, {}), *((p, b, k) for b in arguments.budgets for p, k in OURS)]
        for policy, budget, parameters in track(cells, "sgl_skipkv"):
            run(policy, budget, parameters, 1)
        run("full", None, {}, BATCH)
        for budget in arguments.budgets:
            run("skipkv+", budget, {"tau": 0.85}, BATCH)


if __name__ == "__main__":
    main()

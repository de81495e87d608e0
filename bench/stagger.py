"""The longest decode step while many calls compact, with and without staggered phases.

    python bench/stagger.py --model-path examples/reasoner

Calls of the same length begin together, so without staggering all of them compact in the same
steps. A call without a budget runs beside them and streams: the gaps between its tokens are the
server's steps. One row per setting in bench/rows/stagger.csv.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from record import append_row
from serving import BUNDLED

from sgl_skipkv.server_process import ServerProcess
from sgl_skipkv.trace import read_trace


def step_gaps_ms(server: ServerProcess, body: dict[str, Any]) -> list[float]:
    """Time between the tokens of a streaming call."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(
        f"{server.url}/generate", data, {"Content-Type": "application/json"}
    )
    times = []
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return [1000 * (after - before) for before, after in pairwise(times)]


def measure(arguments: argparse.Namespace, *, stagger: bool) -> dict[str, Any]:
    """One server, one batch of calls; a first one warms it up."""
    with tempfile.TemporaryDirectory() as folder:
        config, trace = Path(folder) / "skipkv.json", Path(folder) / "trace.jsonl"
        settings = {"stagger": stagger, "kv_interval": arguments.interval, "trace": str(trace)}
        config.write_text(json.dumps(settings))
        flags = ["--skipkv-config", str(config), "--max-total-tokens", "131072"]
        flags += ["--max-running-requests", str(arguments.calls + 1)]
        with ServerProcess(arguments.model_path, Path(folder) / "server", flags) as server:
            server.wait_ready()
            run(server, arguments, arguments.interval)
            gaps = run(server, arguments, arguments.tokens)
        lines = read_trace(trace)
    last = [line["rid"] for line in lines if line["event"] == "finish"][-arguments.calls :]
    steps = Counter(
        line["generated"] for line in lines if line["event"] == "compact" and line["rid"] in last
    )
    return {
        "stagger": str(stagger).lower(),
        "calls": arguments.calls,
        "kv_budget": arguments.kv_budget,
        "interval": arguments.interval,
        "tokens": arguments.tokens,
        "compactions": sum(steps.values()),
        "most_compactions_in_a_step": max(steps.values()),
        "median_step_ms": round(statistics.median(gaps), 1),
        "p99_step_ms": round(statistics.quantiles(gaps, n=100)[-1], 1),
        "longest_step_ms": round(max(gaps), 1),
    }


def run(server: ServerProcess, arguments: argparse.Namespace, tokens: int) -> list[float]:
    """All calls at once, and the streaming one; its gaps once all of them decode."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    budgeted = {**params, "kv_budget": arguments.kv_budget, "kv_params": {"tau": 0.85}}
    prompts = [[10 + i] * arguments.prompt_tokens for i in range(arguments.calls)]
    with ThreadPoolExecutor(arguments.calls) as pool:
        calls = [
            pool.submit(
                server.post, "/generate", {"input_ids": prompt, "sampling_params": budgeted}
            )
            for prompt in prompts
        ]
        gaps = step_gaps_ms(server, {"input_ids": [9] * 16, "sampling_params": params})
        for call in calls:
            call.result()
    return gaps[arguments.calls :]  # the first ones hold the prompts' prefills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default=str(BUNDLED))
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--kv-budget", type=int, default=128)
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=2, help="each setting in turn")
    arguments = parser.parse_args()
    for _ in range(arguments.rounds):
        for stagger in (False, True):
            row = measure(arguments, stagger=stagger)
            append_row("stagger", row)
            print(row)


if __name__ == "__main__":
    main()

"""What a decode step takes while requests compact: seen by a request that streams its tokens.

``python -m bench.serving --only latency compaction`` runs it. SGLang schedules one step for all
running requests, so the gaps between the tokens of one request are the steps of the server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests

from bench.lib.pairs import START_S
from bench.lib.trace import read_trace
from sgl_skipkv.cli.server_process import ServerProcess, server_flags

#: what the neighbours of the streaming request do
NEIGHBOURS = ("no budget", "compact together")
#: steps beside a compaction that its cost may fall on, and steps that it is compared with
NEAR, FAR = 2, 8


def gaps_ms(server: ServerProcess, prompt: Sequence[int], params: Mapping[str, Any]) -> list[float]:
    """Times between the tokens of a streaming call; 0 between two that came in one piece."""
    body = {"input_ids": list(prompt), "sampling_params": {**params}, "stream": True}
    times: list[float] = []
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=3600) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
                times += [now] * (tokens - len(times))
    return [1000 * (after - before) for before, after in pairwise(times)]


def latency(arguments: argparse.Namespace, neighbours: str) -> dict[str, Any]:
    """One server and one batch of requests that begin together; a first one warms it up."""
    calls = arguments.parallel
    with _traced_server(arguments, calls + 1) as (server, trace):
        _run(server, arguments, neighbours, arguments.interval)
        gaps = _run(server, arguments, neighbours, arguments.tokens)
        lines = read_trace(trace)
    last = {line["rid"] for line in [x for x in lines if x["event"] == "finish"][-calls:]}
    steps = Counter(
        line["generated"] for line in lines if line["event"] == "compact" and line["rid"] in last
    )
    return {
        "neighbours": neighbours,
        "calls": calls,
        "kv_policy": arguments.kv_policy if steps else "",
        "kv_budget": arguments.kv_budgets[0] if steps else "",
        "interval": arguments.interval,
        "tokens": arguments.tokens,
        "compactions": sum(steps.values()),
        "most_compactions_in_a_step": max(steps.values(), default=0),
        "p50_ms": round(statistics.median(gaps), 1),
        "p99_ms": round(statistics.quantiles(gaps, n=100)[-1], 1),
        "longest_ms": round(max(gaps), 1),
    }


def compaction(arguments: argparse.Namespace, kv_budget: int, calls: int) -> dict[str, Any]:
    """One request with a budget: what each of its compactions costs, in decode steps around it.

    Args:
        requests: in the batch, all others without a budget.
    """
    rounds = arguments.rounds * 4
    tokens = kv_budget + arguments.interval * (rounds + 1) + 2 * FAR
    params = _params(arguments, tokens, kv_budget)
    warm_up = _params(arguments, kv_budget + 2 * arguments.interval, kv_budget)
    beside = {"sampling_params": _params(arguments, tokens, None)}
    with (
        _traced_server(arguments, calls) as (server, trace),
        ThreadPoolExecutor(calls) as pool,
    ):
        gaps_ms(server, [9] * 16, warm_up)
        others = [
            pool.submit(server.post, "/generate", {**beside, "input_ids": [10 + i] * 16})
            for i in range(1, calls)
        ]
        gaps = gaps_ms(server, [10] * 16, params)
        for other in others:
            other.result()
        lines = read_trace(trace)
    last = [line["rid"] for line in lines if line["event"] == "finish"][-1]
    at = [x["generated"] for x in lines if x["event"] == "compact" and x["rid"] == last]
    costs, steps = zip(*(cost_and_step(gaps, generated) for generated in at), strict=True)
    in_steps = sorted(cost / step for cost, step in zip(costs, steps, strict=True))
    return {
        "kv_policy": arguments.kv_policy,
        "kv_budget": kv_budget,
        "interval": arguments.interval,
        "calls": calls,
        "compactions": len(costs),
        "step_ms_p50": round(statistics.median(steps), 2),
        "compaction_ms_p50": round(statistics.median(costs), 2),
        "in_steps_p50": round(statistics.median(in_steps), 2),
        "in_steps_p90": round(in_steps[int(0.9 * (len(in_steps) - 1))], 2),
        "share_of_time": round(
            statistics.median(costs) / (arguments.interval * statistics.median(steps)), 4
        ),
    }


def cost_and_step(gaps: Sequence[float], at: int) -> tuple[float, float]:
    """What the gaps around number ``at`` take beyond as many usual ones, and a usual one.

    It may fall on the gap before or after: a server decides about a step while the last one runs.
    """
    around = gaps[at - NEAR : at + NEAR + 1]
    step = statistics.median([*gaps[at - FAR : at - NEAR], *gaps[at + NEAR + 1 : at + FAR + 1]])
    return sum(around) - len(around) * step, step


def eviction_flags(folder: Path, arguments: argparse.Namespace, **settings: Any) -> list[str]:
    """Of a server on which eviction is enabled at start, with these settings in a file."""
    tracked = {"max_tracked_requests": arguments.tracked_requests}
    config = folder / "skipkv.json"
    config.write_text(json.dumps({"kv_interval": arguments.interval, **tracked, **settings}))
    return ["--skipkv-config", str(config)]


@contextmanager
def _traced_server(
    arguments: argparse.Namespace, calls: int
) -> Iterator[tuple[ServerProcess, Path]]:
    """A server that writes a trace, and the trace's path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        flags = eviction_flags(folder, arguments, trace=str(trace))
        flags += ["--max-running-requests", str(calls)]
        flags += ["--max-total-tokens", str(calls * (2 * arguments.tokens + 4096))]
        flags += server_flags(arguments.server_flags)
        with ServerProcess(arguments.model_path, folder / "server", flags, captures=True) as server:
            yield server.wait_ready(START_S), trace


def _params(arguments: argparse.Namespace, tokens: int, kv_budget: int | None) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if kv_budget is not None:
        params |= {"kv_budget": kv_budget, "kv_policy": arguments.kv_policy}
    return params


def _run(
    server: ServerProcess, arguments: argparse.Namespace, neighbours: str, tokens: int
) -> list[float]:
    """All requests at once, and the streaming one; its gaps once all of them decode."""
    kv_budget = None if neighbours == "no budget" else arguments.kv_budgets[0]
    params = _params(arguments, tokens, kv_budget)
    prompts = [[10 + i] * arguments.prompt_tokens for i in range(arguments.parallel)]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        calls = [
            pool.submit(server.post, "/generate", {"input_ids": one, "sampling_params": params})
            for one in prompts
        ]
        gaps = gaps_ms(server, [9] * 16, _params(arguments, tokens, None))
        for call in calls:
            call.result()
    return gaps[arguments.parallel :]  # the first ones hold the prompts' prefills

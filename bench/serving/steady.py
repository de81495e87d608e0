"""How fast a server decodes when its memory is full and its requests are at every age.

``python -m bench.serving --only steady`` runs it: one server after the other, each with all of the
memory. A whole generation of 16,384 tokens by as many requests as fit takes half an hour on a GPU.
So the first requests stand for ones that have generated a part of theirs: they have that much less
to generate, and without a budget so much longer prompts. Whoever finishes is followed by a new
request, and more requests wait than fit. What counts begins after ``warm_up_s`` seconds, when
prompts are computed and requests with a budget compact; before its first compaction a request is
shorter than later, so nothing is won by leaving that out.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from bench.lib.pairs import START_S
from bench.lib.server_log import retractions
from bench.serving import latency
from sgl_skipkv.cli.server_process import Endpoint, ServerProcess, server_flags

#: requests in flight over those that fit: some always wait
CROWD = 1.2
_DECODE = re.compile(
    r"Decode batch, #running-req: (\d+), .*gen throughput \(token/s\): ([\d.]+), #queue-req: (\d+)"
)


class Line(NamedTuple):
    """Of the log, once in so many decode steps."""

    running: int
    tokens_per_s: float
    waiting: int


def decode_lines(log: str) -> list[Line]:
    found = _DECODE.findall(log)
    return [Line(int(running), float(rate), int(waiting)) for running, rate, waiting in found]


def tokens_per_s(lines: Sequence[Line]) -> float:
    """Of all lines together: each is of as many steps, and a step is one token per request."""
    tokens = [line.running for line in lines]
    return sum(tokens) / sum(line.running / line.tokens_per_s for line in lines)


def fitting(arguments: argparse.Namespace, kv_budget: int | None, pool_tokens: int) -> int:
    """Requests at every age whose tokens fill the pool, by arithmetic."""
    own = arguments.tokens / 2
    if kv_budget is not None:
        own = min(own, kv_budget + arguments.interval + 1)
    return int(pool_tokens / (arguments.prompt_tokens + own))


def call(
    server: Endpoint, arguments: argparse.Namespace, kv_budget: int | None, seed: int, done: int
) -> None:
    """One request that stands for one which has generated ``done`` tokens."""
    rng, size = random.Random(seed), arguments.prompt_tokens
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": arguments.tokens - done}
    if kv_budget is None:
        size += done
    else:
        params |= {"kv_budget": kv_budget, "kv_policy": arguments.kv_policy}
        params["kv_params"] = {"interval": arguments.interval}
    prompt = [rng.randrange(5, 60) for _ in range(size)]
    body = {"input_ids": prompt, "sampling_params": params}
    server.post("/generate", body, timeout=3600)


def measured_log(
    server: ServerProcess, arguments: argparse.Namespace, kv_budget: int | None, callers: int
) -> str:
    """What the server logs in a steady state of so many callers, each with one request after the
    other. When it has, all requests are aborted."""
    ended, seeds = Event(), count()

    def one_after_the_other(done: int) -> None:
        while not ended.is_set():
            call(server, arguments, kv_budget, next(seeds), done)
            done = 0

    with ThreadPoolExecutor(callers) as pool:
        dones = [arguments.tokens * (2 * i + 1) // (2 * callers) for i in range(callers)]
        running = [pool.submit(one_after_the_other, done) for done in dones]
        time.sleep(arguments.warm_up_s)
        logged = len(server.log)
        time.sleep(arguments.seconds)
        log = server.log[logged:]
        ended.set()
        while not all(one.done() for one in running):  # some had just begun another request
            server.post("/abort_request", {"rid": "", "abort_all": True})
            time.sleep(0.5)
        for one in running:
            one.result()
    return log


def steady(arguments: argparse.Namespace, kv_budget: int | None) -> dict[str, Any]:
    """The row of one way, on a server of its own."""
    flags, environment = server_flags(arguments.server_flags), {"SGLANG_PLUGINS": "none"}
    with tempfile.TemporaryDirectory() as name:
        if kv_budget is not None:
            flags, environment = [*flags, *latency.eviction_flags(Path(name), arguments)], {}
        with ServerProcess(
            arguments.model_path, Path(name) / "server", flags, environment, captures=True
        ) as server:
            server.wait_ready(START_S)
            pool_tokens = server.get("/server_info")["max_total_num_tokens"]
            fits = fitting(arguments, kv_budget, pool_tokens)
            log = measured_log(server, arguments, kv_budget, int(CROWD * fits) + 1)
    lines = decode_lines(log)
    return {
        "kv_policy": "" if kv_budget is None else arguments.kv_policy,
        "kv_budget": "" if kv_budget is None else kv_budget,
        "interval": arguments.interval,
        "prompt_tokens": arguments.prompt_tokens,
        "tokens": arguments.tokens,
        "pool_tokens": pool_tokens,
        "fits_by_arithmetic": fits,
        "running": round(sum(line.running for line in lines) / len(lines), 1),
        "waiting": lines[-1].waiting,
        "tokens_per_s": round(tokens_per_s(lines), 1),
        "warm_up_s": arguments.warm_up_s,
        "seconds": arguments.seconds,
        "log_lines": len(lines),
        "retractions": retractions(log),
    }

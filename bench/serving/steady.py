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
import contextlib
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import requests

from bench.lib.pairs import START_S
from bench.serving import latency
from sgl_skipkv.cli.server_process import HTTPFailure, ServerProcess

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


class Callers:
    """So many threads, each with one request after the other, until the block ends."""

    def __init__(
        self, server: ServerProcess, arguments: argparse.Namespace, kv_budget: int | None
    ) -> None:
        self._server, self._arguments, self._kv_budget = server, arguments, kv_budget
        self._ended, self._numbers = Event(), count()

    @contextlib.contextmanager
    def running(self, calls: int) -> Iterator[None]:
        for number in range(calls):
            done = self._arguments.tokens * (2 * number + 1) // (2 * calls)
            Thread(target=self._one_after_the_other, args=(done,), daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def _one_after_the_other(self, done: int) -> None:
        try:
            while not self._ended.is_set():
                self._call(done)
                done = 0
        except (requests.RequestException, HTTPFailure):
            if not self._ended.is_set():  # else the server ended, with all requests that it had
                raise

    def _call(self, done: int) -> None:
        arguments, rng = self._arguments, random.Random(next(self._numbers))
        params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": arguments.tokens - done}
        size = arguments.prompt_tokens
        if self._kv_budget is None:
            size += done
        else:
            params |= {"kv_budget": self._kv_budget, "kv_policy": arguments.kv_policy}
            params["kv_params"] = {"interval": arguments.interval}
        prompt = [rng.randrange(5, 60) for _ in range(size)]
        body = {"input_ids": prompt, "sampling_params": params}
        self._server.post("/generate", body, timeout=3600)


def steady(arguments: argparse.Namespace, kv_budget: int | None) -> dict[str, Any]:
    """The row of one way: a server of its own, which ends with all its requests."""
    flags, environment = latency.server_flags(arguments), {"SGLANG_PLUGINS": "none"}
    with tempfile.TemporaryDirectory() as name:
        if kv_budget is not None:
            flags, environment = [*flags, *latency.eviction_flags(Path(name), arguments)], {}
        with ServerProcess(
            arguments.model_path, Path(name) / "server", flags, environment, captures=True
        ) as server:
            server.wait_ready(START_S)
            pool_tokens = server.get("/server_info")["max_total_num_tokens"]
            fits = fitting(arguments, kv_budget, pool_tokens)
            callers = Callers(server, arguments, kv_budget)
            with callers.running(int(CROWD * fits) + 1):
                time.sleep(arguments.warm_up_s)
                logged = len(server.log)
                time.sleep(arguments.seconds)
                log = server.log[logged:]
            server.stop(grace_s=0)
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
        "retractions": sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", log)),
    }

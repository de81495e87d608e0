"""Paired rounds: two ways of serving the same load in turn, so both see the same machine."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from bench.lib.record import append_row
from bench.lib.serving import BUNDLED
from sgl_skipkv.cli.progress import track
from sgl_skipkv.cli.server_process import ServerProcess

Round = Callable[[int], float]
#: for a start; on a new GPU libraries compile their kernels first
START_S = 900


def parser_of(doc: str) -> argparse.ArgumentParser:
    """The arguments that every paired measurement has."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model-path", default=str(BUNDLED))
    parser.add_argument("--rounds", type=int, default=41, help="pairs of rounds after a warm-up")
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    return parser


def load(server: ServerProcess, arguments: argparse.Namespace, **keys: Any) -> Round:
    """A round: seed -> generated tokens per second of greedy requests; ``keys`` are the API's."""
    calls, tokens = arguments.calls, arguments.tokens
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **keys}

    def one_round(seed: int) -> float:
        rng = random.Random(seed)
        prompts = [[rng.randrange(5, 60) for _ in range(64)] for _ in range(calls)]

        def call(prompt: list[int]) -> None:
            server.post("/generate", {"input_ids": prompt, "sampling_params": params})

        start = time.perf_counter()
        with ThreadPoolExecutor(arguments.parallel) as pool:
            list(pool.map(call, prompts))
        return calls * tokens / (time.perf_counter() - start)

    return one_round


def paired_ratio(rates: list[float], baseline: list[float]) -> dict[str, float]:
    """Median of two or more rounds' ratios, with its 95% bootstrap interval, as columns."""
    ratios = np.divide(rates, baseline)
    interval = bootstrap((ratios,), np.median, method="percentile", rng=0).confidence_interval
    numbers = {"ratio_p50": np.median(ratios), "ratio_low": interval.low}
    numbers["ratio_high"] = interval.high
    return {name: round(float(value), 4) for name, value in numbers.items()}


def measure(
    name: str, metric: str, ways: dict[str, Round], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Append the row of the first way over the second to ``bench/rows/<name>.csv``."""
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for i in track(range(arguments.rounds + 1), "paired rounds"):
        for way in ways if i % 2 else reversed(ways):  # whoever is first changes each time
            rate = ways[way](i)
            if i > 0:
                rates[way].append(rate)
    row = {
        "metric": metric,
        **paired_ratio(*rates.values()),
        **{f"{way}_tokens_per_s_p50": round(statistics.median(rates[way])) for way in ways},
        **{
            setting: getattr(arguments, setting)
            for setting in ("rounds", "calls", "parallel", "tokens")
        },
    }
    append_row(name, row)
    return row

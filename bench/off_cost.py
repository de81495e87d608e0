"""What the plugin costs a server that nobody asked to evict: throughput with it over without it.

    python bench/off_cost.py --model-path examples/reasoner

Two servers of the same configuration run side by side, one with the plugin and one where SGLang
never loads it; the same load goes to the one and the other in turn, so both see the same machine.
The row holds the median of the paired ratios and its 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record import append_row
from tqdm import tqdm

from sgl_skipkv.server_process import ServerProcess


def load(
    server: ServerProcess, seed: int, calls: int, tokens: int, parallel: int, **keys: Any
) -> float:
    """Generated tokens per second of one round of greedy calls; ``keys`` are those of the API."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 60) for _ in range(64)] for _ in range(calls)]
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **keys}

    def call(prompt: list[int]) -> None:
        server.post("/generate", {"input_ids": prompt, "sampling_params": params})

    start = time.perf_counter()
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(call, prompts))
    return calls * tokens / (time.perf_counter() - start)


def median_interval(values: list[float]) -> tuple[float, float]:
    """95% percentile bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(10_000))
    return medians[249], medians[9749]


def paired_ratio(rates: list[float], baseline: list[float]) -> dict[str, float]:
    """Median of the rounds' ratios with its interval, as columns."""
    ratios = [one / other for one, other in zip(rates, baseline, strict=True)]
    low, high = median_interval(ratios)
    numbers = {"ratio_p50": statistics.median(ratios), "ratio_low": low, "ratio_high": high}
    return {name: round(value, 4) for name, value in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--rounds", type=int, default=41, help="pairs of rounds after a warm-up")
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    shape = (arguments.calls, arguments.tokens, arguments.parallel)
    flags = ["--max-total-tokens", "16384"]
    model = Path(arguments.model_path).resolve()
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(model, Path(folder) / "with", flags) as ours,
        ServerProcess(model, Path(folder) / "without", flags, {"SGLANG_PLUGINS": "none"}) as plain,
    ):
        servers = {"with": ours.wait_ready(), "without": plain.wait_ready()}
        rates: dict[str, list[float]] = {"with": [], "without": []}
        for i in tqdm(range(arguments.rounds + 1), desc="paired rounds", unit="pair"):
            order = ("with", "without") if i % 2 else ("without", "with")
            for name in order:
                rate = load(servers[name], i, *shape)
                if i > 0:
                    rates[name].append(rate)
    row = {
        "metric": "throughput with the plugin loaded and no budget over without the plugin",
        **paired_ratio(rates["with"], rates["without"]),
        "with_tokens_per_s_p50": round(statistics.median(rates["with"])),
        "without_tokens_per_s_p50": round(statistics.median(rates["without"])),
        "rounds": arguments.rounds,
        "calls": arguments.calls,
        "parallel": arguments.parallel,
        "tokens": arguments.tokens,
    }
    append_row("off_cost", row)
    print(row)


if __name__ == "__main__":
    main()

"""What steering costs: throughput of steered calls over that of the same calls without steering.

    python bench/steering_cost.py --model-path examples/wanderer

One server; the same load goes to it steered and not steered in turn, with the same number of
tokens. The row holds the median of the paired ratios and its 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from off_cost import load, paired_ratio
from record import append_row
from tqdm import tqdm

from sgl_skipkv.server_process import ServerProcess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--vector", type=Path, help="default: steering.safetensors beside it")
    parser.add_argument("--steering", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=41, help="pairs of rounds after a warm-up")
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    shape = (arguments.calls, arguments.tokens, arguments.parallel)
    vector = (arguments.vector or arguments.model_path / "steering.safetensors").resolve()
    flags = ["--max-total-tokens", "16384", "--steering-vector", str(vector)]
    model = arguments.model_path.resolve()
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(model, Path(folder) / "server", flags) as server,
    ):
        server.wait_ready()
        rates: dict[bool, list[float]] = {True: [], False: []}
        for i in tqdm(range(arguments.rounds + 1), desc="paired rounds", unit="pair"):
            for steered in (True, False) if i % 2 else (False, True):
                strength = arguments.steering if steered else False
                rate = load(server, i, *shape, steering=strength)
                if i > 0:
                    rates[steered].append(rate)
    row = {
        "metric": "throughput of steered calls over the same calls not steered",
        **paired_ratio(rates[True], rates[False]),
        "steered_tokens_per_s_p50": round(statistics.median(rates[True])),
        "plain_tokens_per_s_p50": round(statistics.median(rates[False])),
        "rounds": arguments.rounds,
        "calls": arguments.calls,
        "parallel": arguments.parallel,
        "tokens": arguments.tokens,
    }
    append_row("steering_cost", row)
    print(row)


if __name__ == "__main__":
    main()

"""The real server under load: what budgets give when memory is short, and what they cost.

    python -m bench.serving                            # the first four, on the bundled model
    python -m bench.serving --only pressure --pool-tokens 12288 --kv-budgets 128 256

- ``pressure``: one pool, more requests than it holds. Generated tokens per second and requests at
  once, with each budget and without one; the server without a budget never loads the plugin and has
  SGLang's own defaults. Rounds of all ways in turn, so all see the same machine.
- ``latency``: the time between two tokens of a request whose neighbours have no budget, or compact
  all in the same step.
- ``compaction``: the extra time that a compaction of one request takes, in decode steps of the same
  batch, alone and among requests that do not compact.
- ``off``: what the plugin costs when nobody asks; the same as bench/serving/off_cost.py.

Only where ``--only`` names them:

- ``ample``: the same requests on a pool that holds them all, where a budget can win nothing: with
  one, and without one on the same server, over SGLang without the plugin. Memory for two servers.
- ``steady``: decoding with full memory and requests at every age, one server after the other
  (bench/serving/steady.py).

One row per way in bench/rows/serve_<measurement>.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.lib.pairs import START_S, paired_ratio
from bench.lib.record import append_row
from bench.lib.server_log import retractions, running_requests
from bench.lib.serving import BUNDLED
from bench.serving import latency, off_cost
from bench.serving.steady import steady
from sgl_skipkv.cli.progress import track
from sgl_skipkv.cli.server_process import ServerProcess, server_flags

MEASUREMENTS = ("pressure", "latency", "compaction", "off")
#: need a pool, or a memory, of another size than those
APART = ("ample", "steady")


def round_of(
    server: ServerProcess, arguments: argparse.Namespace, kv_budget: int | None, seed: int
) -> tuple[float, int, int]:
    """One load, from an empty cache: tokens per second, most requests at once, retractions."""
    server.post("/flush_cache")
    logged, rng = len(server.log), random.Random(seed)
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    params["max_new_tokens"] = arguments.tokens
    if kv_budget is not None:
        params |= {"kv_budget": kv_budget, "kv_policy": arguments.kv_policy}
        params["kv_params"] = {"interval": arguments.interval}
    size = arguments.prompt_tokens - 1
    # No two prompts begin alike, so none shares another one's KV.
    drawn = [[rng.randrange(5, 60) for _ in range(size)] for _ in range(arguments.calls)]
    prompts = [[5 + i, *rest] for i, rest in enumerate(drawn)]

    def call(prompt: Sequence[int]) -> None:
        body = {"input_ids": list(prompt), "sampling_params": params}
        answer = server.post("/generate", body, timeout=3600)
        assert answer["meta_info"]["completion_tokens"] == arguments.tokens

    start = time.perf_counter()
    with ThreadPoolExecutor(arguments.calls) as pool:
        list(pool.map(call, prompts))
    rate = arguments.calls * arguments.tokens / (time.perf_counter() - start)
    log = server.log[logged:]
    return rate, max(running_requests(log)), retractions(log)


def _pool_flags(arguments: argparse.Namespace) -> list[str]:
    """Of a server with a pool and as many requests as the command line names."""
    flags = ["--max-total-tokens", str(arguments.pool_tokens), "--decode-log-interval", "5"]
    flags += ["--max-running-requests", str(arguments.calls)]
    return flags + server_flags(arguments.server_flags)


def _columns(
    arguments: argparse.Namespace, kv_budget: int | None, rates: Sequence[float]
) -> dict[str, Any]:
    """What was asked for, and the median of the rounds."""
    asked = ("interval", "pool_tokens", "calls", "prompt_tokens", "tokens", "rounds")
    return {
        "kv_policy": "" if kv_budget is None else arguments.kv_policy,
        "kv_budget": "" if kv_budget is None else kv_budget,
        **{name: getattr(arguments, name) for name in asked},
        "tokens_per_s_p50": round(statistics.median(rates), 1),
    }


def ample(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the plugin without budgets and one for each budget, all against no plugin."""
    flags = _pool_flags(arguments)
    ways: list[tuple[str, int | None]] = [("without", None), ("with", None)]
    ways += [("with", one) for one in arguments.kv_budgets]
    found: dict[tuple[str, int | None], list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        plain = [*flags], {"SGLANG_PLUGINS": "none"}
        ours = [*flags, *latency.eviction_flags(Path(name), arguments)], {}
        with contextlib.ExitStack() as stack:
            servers = {
                which: stack.enter_context(
                    ServerProcess(*(arguments.model_path, Path(name) / which, *how), captures=True)
                ).wait_ready(START_S)  # one after the other: each sees what memory is left
                for which, how in (("without", plain), ("with", ours))
            }
            for number in track(range(arguments.rounds + 1), "rounds"):
                for which, kv_budget in ways if number % 2 else reversed(ways):
                    rate, running, _ = round_of(servers[which], arguments, kv_budget, number)
                    assert running == arguments.calls, f"{running} at once: the pool is not ample"
                    if number > 0:  # the first one warms up
                        found[which, kv_budget].append(rate)
    return [
        {
            "plugin": which,
            **_columns(arguments, kv_budget, rates),
            **paired_ratio(rates, found["without", None]),
        }
        for (which, kv_budget), rates in found.items()
    ]


def pressure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the full cache and one for each budget, all against the full cache."""
    flags = _pool_flags(arguments)
    budgets = [None, *arguments.kv_budgets]
    found: dict[int | None, list[tuple[float, int, int]]] = {one: [] for one in budgets}
    with (
        tempfile.TemporaryDirectory() as name,
        ServerProcess(
            *(arguments.model_path, Path(name) / "plain", flags, {"SGLANG_PLUGINS": "none"}),
            captures=True,
        ) as plain,
        ServerProcess(
            *(arguments.model_path, Path(name) / "ours"),
            [*flags, *latency.eviction_flags(Path(name), arguments)],
            captures=True,
        ) as ours,
    ):
        servers = {one: ours if one else plain for one in budgets}
        for server in (plain, ours):
            server.wait_ready(START_S)
        for number in track(range(arguments.rounds + 1), "rounds"):
            for kv_budget in budgets if number % 2 else reversed(budgets):
                one = round_of(servers[kv_budget], arguments, kv_budget, number)
                if number > 0:  # the first one warms up
                    found[kv_budget].append(one)
    rates = {one: [rate for rate, _, _ in rounds] for one, rounds in found.items()}
    return [
        {
            **_columns(arguments, one, rates[one]),
            **paired_ratio(rates[one], rates[None]),
            "peak_running": max(running for _, running, _ in found[one]),
            "fits_by_arithmetic": arguments.pool_tokens
            // (
                arguments.prompt_tokens
                + (arguments.tokens if one is None else one + arguments.interval + 1)
            ),
            "retractions": sum(retracted for _, _, retracted in found[one]),
        }
        for one in budgets
    ]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model-path", default=str(BUNDLED))
    made.add_argument("--only", nargs="+", default=MEASUREMENTS, choices=(*MEASUREMENTS, *APART))
    made.add_argument("--kv-policy", default="distinct")
    made.add_argument("--kv-budgets", type=int, nargs="+", default=[128, 256, 512])
    made.add_argument("--interval", type=int, default=128)
    made.add_argument("--pool-tokens", type=int, default=12288)
    made.add_argument("--calls", type=int, default=40, help="sent at once to the short pool")
    made.add_argument("--parallel", type=int, default=32, help="neighbours of a streaming call")
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--tokens", type=int, default=1500, help="generated by every call")
    made.add_argument("--rounds", type=int, default=5, help="after a warm-up")
    made.add_argument("--tracked-requests", type=int, default=256, help="with a budget at once")
    ways = ("full", "budgets")
    made.add_argument("--ways", nargs="+", default=ways, choices=ways, help="of a steady state")
    made.add_argument("--warm-up-s", type=float, default=45.0, help="of a steady state")
    made.add_argument("--seconds", type=float, default=20.0, help="of a steady state")
    made.add_argument("--compaction-budget", type=int, default=512)
    made.add_argument("--compaction-calls", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--server-flags", nargs="*", default=[], help="as NAME=VALUE, without --")
    return made


def keep(measurement: str, row: dict[str, Any]) -> None:
    append_row(f"serve_{measurement}", row)
    print(measurement, row)


def main() -> None:
    arguments = parser().parse_args()
    if "pressure" in arguments.only:
        for row in pressure(arguments):
            keep("pressure", row)
    if "ample" in arguments.only:
        for row in ample(arguments):
            keep("ample", row)
    if "steady" in arguments.only:
        full = [None] if "full" in arguments.ways else []
        budgets = arguments.kv_budgets if "budgets" in arguments.ways else []
        for kv_budget in (*full, *budgets):
            keep("steady", steady(arguments, kv_budget))
    if "latency" in arguments.only:
        for neighbours in latency.NEIGHBOURS:
            keep("latency", latency.latency(arguments, neighbours))
    if "compaction" in arguments.only:
        for calls in arguments.compaction_calls:
            row = latency.compaction(arguments, arguments.compaction_budget, calls)
            keep("compaction", row)
    if "off" in arguments.only:
        given = ["--model-path", arguments.model_path, "--server-flags", *arguments.server_flags]
        print("off", off_cost.run(off_cost.arguments_of(given)))


if __name__ == "__main__":
    main()

"""The load jobs that take minutes: smoke, pressure, storms, differential, long output.

Each takes the tiny model, an empty folder and its findings. Numbers of requests are those of a run
of full size; ``Findings.count`` shrinks them. Limits of time count from the moment a server is
ready, except where a job says otherwise.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from load_calls import (
    POOL_TOKENS,
    PROMPT_TOKENS,
    budget_keys,
    compare,
    hits,
    mixed_calls,
    prompt_ids,
    retractions,
    short,
    without_keys,
)
from load_client import Call, percentile_99, run_load
from load_rows import Findings
from load_server import INTERVAL, LoadServer, report_outcomes, report_trace, without_plugin

Job = Callable[[Path, Path, Findings], None]


def smoke(model: Path, folder: Path, findings: Findings) -> None:
    """L0: 64 requests of 64 + 256 tokens, 16 at once, the start of the server in the limit of time.
    After that a server without the plugin says what requests without a budget should have got."""
    start, calls = time.perf_counter(), mixed_calls(findings.count(64, 8), 256, 1)
    with LoadServer(model, folder / "ours", pool_tokens=2 * POOL_TOKENS) as ours:
        outcomes = run_load(ours.ready(findings), calls, 16, "L0 smoke")
        report_outcomes(findings, outcomes)
        report_trace(findings, ours.trace_counts(), 100)
        findings.happened("requests with a prefix hit", hits(outcomes), 16)
        ours.report_clean(findings)
        findings.at_most("seconds with the start", time.perf_counter() - start, 60)
    plain = [outcome for outcome in outcomes if not outcome.call.keys]
    expected = without_plugin(
        *(model, folder, findings, [one.call for one in plain], 16), pool_tokens=2 * POOL_TOKENS
    )
    compare(findings, "without a budget", expected, plain)


def pressure(model: Path, folder: Path, findings: Findings) -> None:
    """L1: 96 requests of 64 + 512 tokens, 32 at once, into 4,096 tokens, a retraction every 3
    steps; evicted KV made NaN; then the same load into the same pool without the plugin, also with
    retractions. That second run is the yardstick and not in the limit of time."""
    calls = mixed_calls(findings.count(96, 16), 512, 2)
    shape: dict[str, Any] = {"pool_tokens": POOL_TOKENS, "retract_every": 3}
    with LoadServer(model, folder / "ours", poison=True, **shape) as ours:
        url, start = ours.ready(findings), time.perf_counter()
        outcomes = run_load(url, calls, 32, "L1 pressure")
        report_outcomes(findings, outcomes)
        report_trace(findings, ours.trace_counts(), 100, 100)
        findings.happened("retractions", retractions(outcomes), 100)
        ours.report_clean(findings)
        findings.at_most("seconds", time.perf_counter() - start, 120)
    expected = without_plugin(model, folder, findings, without_keys(calls), 32, **shape)
    plain = findings.plain()
    plain.happened("retractions", retractions(expected), 100)
    for found, answers in ((findings, outcomes), (plain, expected)):
        found.note("p99, seconds", percentile_99(answers))
        found.exactly("answers with a token or log-probability too few", short(answers), 0)
    ratio = percentile_99(outcomes) / percentile_99(expected)
    findings.at_most("p99 over that of plain SGLang", ratio, 3)


def storms(model: Path, folder: Path, findings: Findings) -> None:
    """L2: 300 aborts, then 300 clients that hang up, 32 at once, some before their first token and
    some among compactions; an eighth of the requests without a budget. The clock of each storm
    stops when the server is idle. Then both without the plugin."""
    rng, count = random.Random(3), findings.count(300, 32)

    def call(**how: Any) -> Call:
        kv_budget = rng.choice([None, *[16, 24, 32, 40] * 2])
        keys = budget_keys(kv_budget, rng.choice(["skipkv", "rkv", "streaming", "h2o"]), interval=8)
        return Call(prompt_ids(rng, 8), 2000, keys, **how)

    delays_s = [rng.uniform(0, 0.2) if i % 3 else rng.uniform(0.9, 1.4) for i in range(count)]
    chunks = [rng.randrange(1, 50) for _ in range(count)]
    aborts = [call(ending="abort", abort_after_s=delay_s) for delay_s in delays_s]
    hang_ups = [call(ending="disconnect", leave_after_chunks=n) for n in chunks]
    with LoadServer(model, folder / "ours", pool_tokens=2 * POOL_TOKENS) as ours:
        ours.ready(findings)
        both = storm(ours, "aborts", aborts, 6, findings)
        both += storm(ours, "disconnects", hang_ups, 12, findings)
        findings.at_most("seconds", both, 30)
    plain = findings.plain()
    with LoadServer(model, folder / "base", pool_tokens=2 * POOL_TOKENS, plugin=False) as base:
        base.ready(plain)
        storm(base, "aborts", without_keys(aborts), 6, plain)
        storm(base, "disconnects", without_keys(hang_ups), 12, plain)


def storm(
    server: LoadServer, name: str, calls: list[Call], limit_s: float, findings: Findings
) -> float:
    """One storm, and the seconds that it took."""
    before, start = server.trace_counts()["compact"], time.perf_counter()
    outcomes = run_load(server.url, calls, 32, f"L2 {name}")
    server.wait_idle()
    seconds = time.perf_counter() - start
    report_outcomes(findings, outcomes)
    ended = sum(outcome.ended in ("aborted", "left") for outcome in outcomes)
    findings.exactly(name, ended, len(calls))
    compactions = server.trace_counts()["compact"] - before
    findings.happened(f"compactions among {name}", compactions, 100)
    findings.at_most(f"seconds of {name}", seconds, limit_s)
    server.report_clean(findings)
    return seconds


def differential(model: Path, folder: Path, findings: Findings) -> None:
    """L3: 64 prompts x 128 tokens without a budget. Yardstick: no plugin, one at a time. Against
    it: no plugin, 16 at once; the plugin, one at a time, 16 at once, and 16 at once with a
    retraction every 3 steps. The two servers' one-at-a-time runs share the machine."""
    rng = random.Random(4)
    count = findings.count(64, 8)
    calls = [Call(prompt_ids(rng, 8), 128, logprobs=True) for _ in range(count)]
    with contextlib.ExitStack() as stack:
        ways: dict[str, dict[str, Any]] = {"base": {"plugin": False}, "ours": {}}
        ways["retracting"] = {"retract_every": 3}
        servers = {
            name: stack.enter_context(
                LoadServer(model, folder / name, pool_tokens=POOL_TOKENS, **how)
            )
            for name, how in ways.items()
        }
        for name, server in servers.items():
            server.ready(findings.plain() if name == "base" else findings)
        start = time.perf_counter()
        runs = [("base", 1), ("ours", 1), ("base", 16), ("ours", 16), ("retracting", 16)]
        with ThreadPoolExecutor(2) as pool:
            run = lambda way: run_load(servers[way[0]].url, calls, way[1], f"L3 {way}")  # noqa: E731
            found = dict(zip(runs, pool.map(run, runs), strict=True))
        for way, outcomes in found.items():
            report_outcomes(findings, outcomes)
            if way != runs[0]:
                compare(findings, f"{way[0]}, {way[1]} at once", found[runs[0]], outcomes)
        findings.happened("retractions", retractions(found["retracting", 16]), 100)
        for name, server in servers.items():
            server.report_clean(findings.plain() if name == "base" else findings)
        findings.at_most("seconds", time.perf_counter() - start, 180)


def long_output(model: Path, folder: Path, findings: Findings) -> None:
    """L6: 8 requests at once, 64 + 3,000 tokens, budget 128, into 4,096 tokens. The scale shortens
    the output, to 1,500 tokens at least: it has to fill the pool."""
    seconds, rng, tokens = 0.0, random.Random(5), findings.count(3000, 1500)
    prompts = [(3 + i, *prompt_ids(rng, 10**6)[1:]) for i in range(8)]  # nothing is shared
    running: dict[str, int] = {}
    for name, keys, found in (("base", {}, findings.plain()), ("ours", budget_keys(128), findings)):
        calls = [Call(prompt, tokens, keys) for prompt in prompts]
        with LoadServer(
            model, folder / name, pool_tokens=POOL_TOKENS, plugin=name == "ours"
        ) as server:
            url, start = server.ready(found), time.perf_counter()
            outcomes = run_load(url, calls, 8, f"L6 {name}")
            seconds += time.perf_counter() - start
            report_outcomes(found, outcomes)
            running[name] = server.largest("#running-req")
            found.note("requests at once", running[name])
            found.exactly("retractions", retractions(outcomes), 0)
            if name == "ours":
                infos = [outcome.answer["meta_info"]["skipkv"] for outcome in outcomes]
                held, bound = max(info["peak_kv_tokens"] for info in infos), 128 + INTERVAL + 1
                found.at_most("KV tokens of a request", held, bound)
                all_tokens = server.largest("#token")
                found.at_most("KV tokens, by SGLang", all_tokens, 8 * (PROMPT_TOKENS + bound))
                report_trace(found, server.trace_counts(), 1000)
            server.report_clean(found)
    findings.at_least("requests at once, over plain SGLang", running["ours"] / running["base"], 3)
    findings.at_most("seconds", seconds, 900)

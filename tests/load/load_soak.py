"""The load jobs that take a quarter of an hour: soak and kill."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from load_calls import POOL_TOKENS, budget_keys, hits, prompt_ids, retractions, without_keys
from load_client import Call, run_load
from load_rows import Findings
from load_server import START_WITHIN_S, LoadServer, report_outcomes, report_trace

from sgl_skipkv import policy
from sgl_skipkv.cli.progress import track

WARM_UP = 0.2
GONE_WITHIN_S = 15.0
# Of the trace: some compactions of every client. Of a log: some of its lines for decode steps.
TRACED_BYTES = 20_000
LOGGED_BYTES = 20_000
NO_CORE_DUMPS = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
VICTIMS = ("scheduler", "detokenizer", "parent")


def soak_calls(count: int, seed: int) -> list[Call]:
    """Any budget, any policy, a quarter steered; a tenth aborted, a tenth left in the middle."""
    rng = random.Random(seed)
    names = [name for name in policy.names() if name != "full"]
    calls = []
    for _ in range(count):
        keys = budget_keys(rng.choice([None, 32, 48, 64]), rng.choice(names))
        if rng.random() < 0.25:
            keys["steering"] = 1.0
        how: dict[str, Any] = {}
        if (draw := rng.random()) < 0.1:
            how = {"ending": "abort", "abort_after_s": rng.uniform(0, 1)}
        elif draw < 0.2:
            how = {"ending": "disconnect", "leave_after_chunks": rng.randrange(1, 90)}
        calls.append(Call(prompt_ids(rng, 50), 96, keys, **how))
    return calls


def soak(model: Path, folder: Path, findings: Findings) -> None:
    """L5: 10,000 requests of 64 + 96 tokens, 32 at once, into 4,096 tokens, a retraction every 20
    steps; then the same requests without the plugin. The limit of time is for the first."""
    calls = soak_calls(findings.count(10_000, 100), 6)
    shape: dict[str, Any] = {"pool_tokens": POOL_TOKENS, "retract_every": 20}
    with LoadServer(model, folder / "ours", vector=True, **shape) as ours:
        soak_server(ours, calls, findings)
        report_trace(findings, ours.trace_counts(), 5000, 500)
    with LoadServer(model, folder / "base", plugin=False, **shape) as base:
        soak_server(base, without_keys(calls), findings.plain())


def soak_server(server: LoadServer, calls: Sequence[Call], findings: Findings) -> None:
    """All requests. The first fifth is the warm-up, after which the scheduler's memory is read."""
    warm, url, start = round(WARM_UP * len(calls)), server.ready(findings), time.perf_counter()
    outcomes = run_load(url, calls[:warm], 32, "L5 warm-up")
    before_mb = server.scheduler_mb()
    outcomes += run_load(url, calls[warm:], 32, "L5 soak")
    after_mb = server.scheduler_mb()
    seconds = time.perf_counter() - start
    report_outcomes(findings, outcomes)
    ended = Counter(outcome.ended for outcome in outcomes)
    findings.note("answers", ended["finished"])
    findings.happened("aborts", ended["aborted"], 800)
    findings.happened("disconnects", ended["left"], 800)
    findings.happened("retractions", retractions(outcomes), 1000)
    findings.happened("requests with a prefix hit", hits(outcomes), 2000)
    findings.note("scheduler's memory after the warm-up, MB", before_mb)
    findings.at_most("its growth since, MB", after_mb - before_mb, 20)
    server.report_clean(findings)
    findings.at_most("seconds", seconds, 1200)


def kill(model: Path, folder: Path, findings: Findings) -> None:
    """L7: 20 times start, 16 clients (half of them streaming), and ``kill -9`` of scheduler,
    detokenizer or parent in turn, while requests compact; then one start more. Without the plugin:
    once per victim.

    On both SGLang's wait for CUDA core dumps is off: where a scheduler outlives its parent's other
    child, SGLang waits a minute for them before it ends, on a machine without CUDA too.
    """
    start = time.perf_counter()
    kill_server(model, folder / "ours", findings, findings.count(20, len(VICTIMS)), plugin=True)
    findings.at_most("seconds", time.perf_counter() - start, 1200)
    kill_server(model, folder / "base", findings.plain(), len(VICTIMS), plugin=False)


def kill_server(
    model: Path, folder: Path, findings: Findings, rounds: int, *, plugin: bool
) -> None:
    """All rounds share a folder, so each start finds the log and the trace of a killed server."""
    ended, slowest = Counter[str](), dict.fromkeys(("start", "client", *VICTIMS), 0.0)
    for number in track(range(rounds + 1), "L7 kill"):
        begun = time.perf_counter()
        with LoadServer(
            model, folder, pool_tokens=2 * POOL_TOKENS, plugin=plugin, more=NO_CORE_DUMPS
        ) as server:
            server.wait_ready(START_WITHIN_S)
            slowest["start"] = max(slowest["start"], time.perf_counter() - begun)
            keys = budget_keys(32 if plugin else None)
            answer = server.generate(prompt_ids(random.Random(number), 8), 64, **keys)
            server.assert_clean()
            compacted = answer["meta_info"].get("skipkv", {}).get("compactions", 0) > 0
            ended["clean starts"] += compacted is plugin
            if number < rounds:
                victim = VICTIMS[number % len(VICTIMS)]
                asyncio.run(one_kill(server, victim, ended, slowest, plugin=plugin))
    findings.exactly("clean starts", ended["clean starts"], rounds + 1)
    findings.note("slowest start, seconds", slowest["start"])
    if plugin:
        findings.exactly("kills among compactions", ended["busy"], rounds)
    findings.exactly("clients told by an error or a close", ended["told"], 16 * rounds)
    findings.exactly("clients left waiting", ended["waiting"], 0)
    findings.note("slowest client, seconds", slowest["client"])
    for victim in VICTIMS:
        findings.note(f"slowest end, killed {victim}, seconds", slowest[victim])
    findings.at_most("slowest end, seconds", max(map(slowest.get, VICTIMS)), GONE_WITHIN_S)
    findings.exactly("processes left behind", ended["orphans"], 0)


async def one_kill(
    server: LoadServer, victim: str, ended: Counter[str], slowest: dict[str, float], *, plugin: bool
) -> None:
    """Load, kill one process, and count how everybody learns of it."""
    rng, family = random.Random(server.port), [server.part("parent"), *server.descendants()]
    grows, enough = (server.trace_path, TRACED_BYTES) if plugin else (server.log_path, LOGGED_BYTES)
    before = grows.stat().st_size
    async with aiohttp.ClientSession(
        server.url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)
    ) as session:
        budgets, tokens = (range(32, 48), 20_000) if plugin else ([None] * 16, 4_000)
        calls = [Call(prompt_ids(rng, 8), tokens, budget_keys(budget)) for budget in budgets]
        clients = [
            asyncio.create_task(until_broken(session, call, stream=i % 2 == 0))
            for i, call in enumerate(calls)
        ]
        busy = False
        while not busy and not any(client.done() for client in clients):
            await asyncio.sleep(0.05)
            busy = grows.stat().st_size > before + enough
        ended["busy"] += busy
        server.part(victim).send_signal(signal.SIGKILL)
        killed = time.perf_counter()
        told: asyncio.Future[Any] = asyncio.ensure_future(
            asyncio.wait(clients, timeout=GONE_WITHIN_S)
        )
        while time.perf_counter() - killed < GONE_WITHIN_S and server.process.poll() is None:
            await asyncio.sleep(0.05)
        gone_s = time.perf_counter() - killed
        await told
        slowest[victim] = max(slowest[victim], gone_s)
        for client in clients:
            if client.done():
                at = client.result()
                ended["told" if at else "answered"] += 1
                slowest["client"] = max(slowest["client"], at - killed)
            else:
                ended["waiting"] += 1
                client.cancel()
    left = [process for process in family if alive(process)]
    while left and time.perf_counter() - killed < GONE_WITHIN_S:
        await asyncio.sleep(0.1)
        left = [process for process in left if alive(process)]
    ended["orphans"] += len(left)


async def until_broken(session: aiohttp.ClientSession, call: Call, *, stream: bool) -> float:
    """Read an answer until it breaks off, and when that was; 0 if it came to its end instead."""
    try:
        async with session.post(
            "/generate", json={**call.body(""), "rid": None, "stream": stream}
        ) as response:
            text = await response.read()
            if response.status == 200 and (not stream or b"[DONE]" in text[-50:]):
                return 0.0
    except aiohttp.ClientError:
        pass
    return time.perf_counter()


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; what only waits to be buried does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

"""The load job of everything at once: what the other jobs send one kind at a time."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from hostile_bodies import Body, judge
from hostile_client import complaint, drawn
from hostile_client import send as send_body
from load_calls import POOL_TOKENS, budget_keys, compare, prompt_ids, retractions
from load_client import Call, Outcome, run_load, send, session_of
from load_rows import Findings
from load_server import SETTINGS, LoadServer, report_outcomes, report_trace
from servers import HTTPFailure
from tiny_models import LETTERS, LINE_ENDS

from bench.lib.trace import read_trace
from sgl_skipkv import policy
from sgl_skipkv.cli.progress import track
from sgl_skipkv.config import ServerConfig
from sgl_skipkv.request.settings import KEYS

CLIENTS, CANARY_TOKENS, LONG_TOKENS = 24, 150, 2300
MIXED_POOL_TOKENS = POOL_TOKENS // 2
PAUSES = ("retract", "in_place", "abort")
POLICIES = [name for name in policy.names() if name != "full"]
#: what a request is told whose trace no pool of this size can compute again
LOST_TO_A_PAUSE = (
    "pause_generation (mode retract) freed its KV",
    "flush_cache dropped its KV",
)
#: how often a client asks for what
KINDS = {"canary": 20, "any": 40, "abort": 14, "disconnect": 14, "body": 12}
COUNTED = ("n", "stop", "regex", "steering", "kv_reuse")


def canaries() -> list[Call]:
    """Requests whose answers are known: one of every policy, and as many without a budget."""
    rng = random.Random(9)
    draw = lambda keys: Call(prompt_ids(rng, 8), CANARY_TOKENS, keys, logprobs=True)  # noqa: E731
    budgets = (budget_keys(rng.choice([32, 48, 64]), name) for name in POLICIES)
    return [draw(keys) for budget in budgets for keys in (budget, {})]


def any_call(rng: random.Random) -> Call:
    """Any length, any way to end, perhaps a budget, perhaps steered, perhaps three samples."""
    tokens, keys = rng.choice([1, 2, 17, 64, 150, 300]), {}
    if rng.random() < 0.7:
        keys = budget_keys(rng.choice([32, 48, 64]), rng.choice(policy.names()))
        if rng.random() < 0.3:
            keys["kv_reuse"] = rng.choice(["keep", "budget", False])
        if keys["kv_policy"] == "full":
            keys["kv_reuse"] = False
        elif rng.random() < 0.1:
            tokens = rng.choice([900, LONG_TOKENS])  # longer than the pool
    if rng.random() < 0.2:
        keys["steering"] = rng.choice([1.0, -1.0, 0, False])
    if rng.random() < 0.5:
        keys |= {"temperature": 1.0, "top_p": rng.choice([0.8, 1.0])}
    ending = rng.random()
    if ending < 0.15:
        keys["stop"] = [rng.choice(LETTERS), rng.choice(LINE_ENDS)]
    elif ending < 0.3:
        keys["regex"] = "([a-z]{2,8}\n){3,40}"
    if rng.random() < 0.2:
        keys["n"] = rng.choice([2, 3])
    return Call(prompt_ids(rng, 8), tokens, keys)


class Storm:
    """Clients that ask for anything, and what is done to the server meanwhile.

    Args:
        references: outcomes of the canaries, each sent alone.
        bodies: hostile ones, and what must come of each; None: 200 or 400.
    """

    def __init__(
        self,
        server: LoadServer,
        references: Sequence[Outcome],
        bodies: Sequence[tuple[Body, Any]],
        seconds: float,
    ) -> None:
        self.server, self.references, self.bodies = server, references, bodies
        self.outcomes: list[Outcome] = []
        self.canaries: list[tuple[Outcome, Outcome]] = []
        self.excused, self.wrong, self.done = 0, list[str](), Counter[str]()
        self._seconds, self._end = seconds, 0.0
        self._stops = 0  # begins and ends of pauses that abort; odd in one of them

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._end = time.monotonic() + self._seconds
        # A thread for every client: the one that ends a pause must not wait behind bodies that do.
        threads = ThreadPoolExecutor(CLIENTS + 1)
        asyncio.get_running_loop().set_default_executor(threads)
        async with session_of(self.server.url) as session, asyncio.TaskGroup() as group:
            group.create_task(self._disturb())
            for number in range(CLIENTS):
                group.create_task(self._client(session, random.Random(number)))
            for _ in track(range(math.ceil(self._seconds)), "L9 seconds"):
                await asyncio.sleep(1)

    async def _client(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while time.monotonic() < self._end:
            [kind] = rng.choices([*KINDS], [*KINDS.values()])
            stops = self._stops
            if kind == "body":
                sent, verdict = rng.choice(self.bodies)
                answer = await asyncio.to_thread(send_body, self.server, sent)
                self.done["hostile bodies"] += 1
                if verdict is None:
                    wrong = None if answer.status in (200, 400) else f"{sent} {answer}"
                else:
                    wrong = complaint(sent, verdict, answer)
                if wrong and not self._stopped_since(stops):
                    self.wrong.append(wrong)
                continue
            reference = rng.choice(self.references)
            call = reference.call if kind == "canary" else self._call(rng, kind)
            outcome = await send(session, call)
            self.done.update(name for name in COUNTED if call.keys.get(name))
            if outcome.ended == "aborted" and self._stopped_since(stops):
                self.excused += 1  # by the pause, whatever its client asked for
            elif call.tokens > MIXED_POOL_TOKENS and any(
                lost in outcome.error for lost in LOST_TO_A_PAUSE
            ):
                self.done["lost to a pause"] += 1  # docs/reliability.md: what a pause cannot keep
            else:
                self.outcomes.append(outcome)
                if kind == "canary" and outcome.ended == "finished":
                    self.canaries.append((reference, outcome))
            self._count(outcome)

    def _stopped_since(self, stops: int) -> bool:
        """Whether a pause has aborted what was asked for after so many begins and ends."""
        return self._stops > stops or stops % 2 == 1

    def _call(self, rng: random.Random, kind: str) -> Call:
        call = any_call(rng)
        if not self.server.evicts:
            tokens = min(call.tokens, MIXED_POOL_TOKENS // 4)
            call = replace(call, tokens=tokens, keys=without_ours(call))
        if kind == "any":
            return call
        call = replace(call, keys={k: v for k, v in call.keys.items() if k != "n"})
        call = replace(call, tokens=max(call.tokens, 150), ending=kind)
        if kind == "disconnect":
            return replace(call, leave_after_chunks=rng.randrange(1, 60))
        if rng.random() < 0.5:
            return replace(call, abort_after_chunks=rng.randrange(1, 100))
        return replace(call, abort_after_s=rng.uniform(0, 2))

    def _count(self, outcome: Outcome) -> None:
        if outcome.ended == "left":
            self.done["disconnects"] += 1
        if outcome.ended == "aborted":
            self.done["aborts"] += 1
            self.done["aborts, waiting"] += "waiting queue" in outcome.error
        if "kv_budget" in outcome.call.keys:
            self.done["silent"] += sum("skipkv" not in one["meta_info"] for one in outcome.samples)

    async def _disturb(self) -> None:
        """Now and then a pause, with a flush or without, or a flush of a busy server."""
        rng = random.Random(0)
        for what in itertools.cycle([*PAUSES, "flush", "health"]):
            await asyncio.sleep(rng.uniform(2, 6))
            if time.monotonic() > self._end:
                break
            if what == "health":
                await asyncio.to_thread(self.server.get, "/health_generate")
            elif what == "flush":
                await self._flush("busy")
            else:
                self.done[f"pause, {what}"] += 1
                self._stops += what == "abort"
                await self._post("/pause_generation", {"mode": what})
                self._stops += what == "abort"
                await asyncio.sleep(rng.uniform(0, 1.5))
                if rng.random() < 0.5:
                    await self._flush("paused")
                await self._post("/continue_generation", {})

    async def _flush(self, when: str) -> None:
        try:
            await self._post("/flush_cache")
            self.done[f"flushed, {when}"] += 1
        except HTTPFailure as failure:
            if failure.status != 400:  # a server that holds requests is not flushed
                raise

    async def _post(self, *what: Any) -> None:
        await asyncio.to_thread(self.server.post, *what)


def without_ours(call: Call) -> dict[str, Any]:
    """Its sampling parameters, for a server that does not know our keys."""
    return {name: value for name, value in call.keys.items() if name not in KEYS}


def mixed(model: Path, folder: Path, findings: Findings) -> None:
    """L9: 24 clients for 10 minutes into 2,048 tokens, with a retraction every 10 steps: every
    policy, steering, ``kv_reuse``, grammars, stop strings, samples, traces longer than the pool,
    aborts, hang-ups, pauses in all modes, flushes, hostile bodies. Then as long without the plugin,
    on the same kinds of requests without our keys. Among them all are requests whose answers are
    known; one without a budget must be the same unless it was aborted, one with a budget unless it
    was recomputed too."""
    sent = drawn(findings.count(1000, 50))
    settings = ServerConfig(steering_vector="v.safetensors", **SETTINGS)
    judged = [(body, judge(body, settings)) for body in sent]
    # Ids outside the vocabulary would end it.
    unjudged = [(body, None) for body in sent if not names_ids(body)]
    for plugin, bodies, found in ((True, judged, findings), (False, unjudged, findings.plain())):
        with LoadServer(
            model,
            folder / ("ours" if plugin else "base"),
            pool_tokens=MIXED_POOL_TOKENS,
            retract_every=10,
            poison=True,
            vector=plugin,
            plugin=plugin,
        ) as server:
            storm_server(server, bodies, found)


def names_ids(body: Body) -> bool:
    return b"input_ids" in body.text or b'"prompt": [' in body.text


def storm_server(server: LoadServer, bodies: Sequence[Any], findings: Findings) -> None:
    """The storm, what happened in it, and that the server is as it was before."""
    url, calls = server.ready(findings), canaries()
    if not server.evicts:
        calls = [replace(call, keys={}) for call in calls]
    references = run_load(url, calls, 1, "L9 references")
    seconds = findings.count(600, 20)
    storm, start = Storm(server, references, bodies, seconds), time.perf_counter()
    storm.run()
    server.wait_idle()
    findings.note("requests", len(storm.outcomes) + storm.excused + storm.done["hostile bodies"])
    findings.note("seconds until idle", time.perf_counter() - start)
    report_outcomes(findings, storm.outcomes)
    for text in storm.wrong[:3]:
        print(text)
    findings.exactly("bodies answered otherwise than the schema says", len(storm.wrong), 0)
    for name, full in HAPPENED.items():
        findings.happened(name, storm.done[name], full)
    for name in COUNTED if server.evicts else [one for one in COUNTED if one not in KEYS]:
        findings.happened(f"requests with {name}", storm.done[name], 50)
    findings.note("aborts by a pause", storm.excused)
    lost = storm.done["lost to a pause"]
    findings.note("traces longer than the pool that a retracting pause ended", lost)
    findings.happened("retractions", retractions(storm.outcomes), 500)
    if server.evicts:
        silent = storm.done["silent"]
        findings.exactly('answers with a budget and without meta_info["skipkv"]', silent, 0)
        report_trace(findings, server.trace_counts(), 3000, 300)
    report_canaries(findings, server, storm, run_load(url, calls, 4, "L9 after the storm"))
    server.report_clean(findings)


#: so often at least in ten minutes
HAPPENED = {
    **{"aborts": 100, "aborts, waiting": 20, "disconnects": 100, "hostile bodies": 100},
    **{f"pause, {mode}": 10 for mode in PAUSES},
    **{"flushed, paused": 5},
}


def report_canaries(
    findings: Findings, server: LoadServer, storm: Storm, after: Sequence[Outcome]
) -> None:
    """Known answers, in the storm and behind it."""
    recomputed = set()
    if server.evicts:
        events = read_trace(server.trace_path)
        recomputed = {event["rid"] for event in events if event["event"] == "recompute"}
    for name, budgeted in (("with a budget", True), ("without a budget", False)):
        pairs = [pair for pair in storm.canaries if bool(pair[1].call.keys) == budgeted]
        exact = [pair for pair in pairs if pair[1].answer["meta_info"]["id"] not in recomputed]
        if budgeted and server.evicts:
            findings.note("known answers not compared, recomputed", len(pairs) - len(exact))
        if exact:
            findings.happened(f"known answers {name}", len(exact), 100)
            compare(findings, f"{name}, in the storm", *zip(*exact, strict=True))
    compare(findings, "behind the storm", storm.references, after)

"""The load job of conversations in a pool that is too small for them (``kv_reuse``)."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from load_calls import budget_keys, compare
from load_client import Call, Outcome, send, session_of
from load_rows import Findings
from load_server import INTERVAL, LoadServer, report_outcomes, report_trace, without_plugin
from oracle import Event, MaskingOracle
from servers import HTTPFailure, Server
from tiny_models import prompt_ids
from turns import LOGPROB_TOLERANCE, Turn

from bench.lib.trace import read_trace
from sgl_skipkv import policy
from sgl_skipkv.cli.progress import progress, track

BUDGET, TEXT, TOKENS, PLAIN_TOKENS = 40, 40, 70, 32
POLICIES = [name for name in policy.names() if name != "full"]
#: how a request may end unfinished: the client's part, and where it was by the trace
PHASES = ("waiting", "prefill", "decode", "just compacted")
#: generated tokens since a compaction
SOON = INTERVAL // 2
#: conversations that run at once, of all
ACTIVE = 0.2
DISTURBANCES = ("pause", "flush", "flush of a busy server", "new weights", "pause")


@dataclass(frozen=True)
class Talk:
    """What one conversation asks for.

    Attributes:
        burst: turns until other conversations have theirs.
    """

    number: int
    turns: int
    opening_tokens: int
    burst: int = 3

    @property
    def mode(self) -> str:
        return ("keep", "budget")[self.number % 2]

    @property
    def keys(self) -> dict[str, Any]:
        keys = budget_keys(BUDGET, POLICIES[self.number // 2 % len(POLICIES)])
        return {**keys, "kv_reuse": self.mode}

    @property
    def need_tokens(self) -> int:
        """KV tokens of its last turn, its branches not counted."""
        kept = BUDGET + INTERVAL + 1
        if self.mode == "budget":
            return self.opening_tokens + kept + TEXT
        return self.opening_tokens + kept * self.turns + TEXT * (self.turns - 1)

    def text(self, *what: object) -> list[int]:
        return prompt_ids(f"{self.number} {what}", TEXT)


class Crowd:
    """Conversations, all at once on one server, and what is done to them on the way.

    Args:
        model: folder whose weights are loaded again.
        pool_tokens: of the server's KV pool.

    Attributes:
        turns: in the order in which they finished.
        plain: requests without a budget beside them.
        aborted: requests that were aborted.
    """

    def __init__(
        self, server: Server, model: Path, talks: Sequence[Talk], pool_tokens: int
    ) -> None:
        self.server, self.model, self.talks, self.pool_tokens = server, model, talks, pool_tokens
        self.turns: list[Turn] = []
        self.plain: list[Outcome] = []
        self.aborted: list[Outcome] = []
        self.failed: list[Outcome] = []
        self.done = Counter[str]()
        self._rng, self._asked = random.Random(8), 0
        self._places = asyncio.Semaphore(round(ACTIVE * len(talks)))
        total = sum(talk.turns for talk in talks)
        self._disturbances = {total * i // 6: what for i, what in enumerate(DISTURBANCES, start=1)}

    @property
    def outcomes(self) -> list[Outcome]:
        """Of everything that was to finish or be aborted."""
        return [*self.plain, *self.aborted, *self.failed]

    def run(self) -> None:
        """All conversations to their ends; every turn has its events then."""
        asyncio.run(self._run())
        events = defaultdict[str, list[Event]](list)
        for event in read_trace(self.server.trace_path):
            events[event["rid"]].append(event)
        for turn in self.turns:
            turn.events = events[turn.rid]
        for outcome in self.aborted:
            if outcome.ended == "aborted":
                self.done[f"aborted, {_phase(outcome, events)}"] += 1
        for kind in ("restore", "recompute"):
            ours = (events[turn.rid] for turn in self.turns)
            self.done[kind] = sum(event["event"] == kind for own in ours for event in own)
        self.done["continued"] = sum(turn.info["reused_tokens"] > 0 for turn in self.turns)
        misses = Counter(turn.info["kv_reuse_miss"] for turn in self.turns)
        self.done["lost"] = misses["evicted"]

    def judge(self, oracle: MaskingOracle) -> list[float | None]:
        """Every turn; earlier ones first."""
        turns = sorted(self.turns, key=lambda turn: len(turn.prompt))
        return [turn.judge(oracle) for turn in track(turns, "oracle")]

    async def _run(self) -> None:
        async with session_of(self.server.url) as session:
            with progress() as bar:
                done = bar.add_task("turns", total=sum(talk.turns for talk in self.talks))
                async with asyncio.TaskGroup() as group:
                    for talk in self.talks:
                        group.create_task(self._converse(session, talk, lambda: bar.advance(done)))

    async def _converse(
        self, session: aiohttp.ClientSession, talk: Talk, taken: Callable[[], None]
    ) -> None:
        opening = prompt_ids(f"opening {talk.number}", talk.opening_tokens)
        before: list[Turn] = []
        await self._places.acquire()
        for number in range(talk.turns):
            if number and number % talk.burst == 0:
                self._places.release()
                await self._places.acquire()  # behind those who wait
            seen = before[0].tokens if before else opening[:-TEXT]
            text = talk.text(number) if before else opening[-TEXT:]
            async with asyncio.TaskGroup() as group:
                samples = 3 if (talk.number + number) % 8 == 5 else 1
                asked = group.create_task(self._say(session, talk, [*seen, *text], before, samples))
                for side in range(2 if number == 2 else 0):
                    branch = [*seen, *talk.text(number, side)]
                    group.create_task(self._say(session, talk, branch, before))
                if (talk.number + number) % 2:
                    group.create_task(self._plain(session, [*seen, *talk.text(number, "plain")]))
                else:
                    group.create_task(self._abort(session, talk, [*seen, *talk.text("abort")]))
            before = asked.result()
            taken()
            await self._disturb()
            if not before:
                break
        self._places.release()

    async def _say(
        self,
        session: aiohttp.ClientSession,
        talk: Talk,
        prompt: list[int],
        before: Sequence[Turn],
        samples: int = 1,
    ) -> list[Turn]:
        keys = {**talk.keys, "n": samples} if samples > 1 else talk.keys
        outcome = await send(session, Call(tuple(prompt), TOKENS, keys, logprobs=True))
        if outcome.ended != "finished":
            self.failed.append(outcome)
            return []
        turns = [Turn(prompt, answer, before) for answer in outcome.samples]
        self.turns += turns
        self.done["n = 3"] += samples > 1
        return turns

    async def _plain(self, session: aiohttp.ClientSession, prompt: list[int]) -> None:
        self.plain.append(await send(session, Call(tuple(prompt), PLAIN_TOKENS, logprobs=True)))

    async def _abort(self, session: aiohttp.ClientSession, talk: Talk, prompt: list[int]) -> None:
        """One whose abort is to come in one of the phases, in turn."""
        phase = PHASES[len(self.aborted) % len(PHASES)]
        how: dict[str, Any] = {"abort_after_s": 0.0}
        if phase == "prefill":
            prompt = [*prompt, *prompt_ids(f"long {talk.number}", self.pool_tokens // 4)]
            how = {"abort_after_s": self._rng.uniform(0, 1)}
        elif phase == "decode":
            how = {"abort_after_chunks": self._rng.randrange(5, 2 * TOKENS)}
        elif phase == "just compacted":
            first = BUDGET + INTERVAL if talk.mode == "keep" else 2
            how = {"abort_after_chunks": first}
        call = Call(tuple(prompt), 5 * TOKENS, talk.keys, ending="abort", **how)
        self.aborted.append(await send(session, call))

    async def _disturb(self) -> None:
        """A turn has finished: what comes after so many."""
        self._asked += 1
        what = self._disturbances.get(self._asked)
        if what is None:
            return
        await asyncio.to_thread(self._interrupt, what)
        self.done[what] += 1

    def _interrupt(self, what: str) -> None:
        """Everybody is retracted and nobody backed up, but for a flush of a busy server."""
        if what == "flush of a busy server":
            with pytest.raises(HTTPFailure, match=r"^400"):
                self.server.post("/flush_cache")
            return
        self.server.post("/pause_generation", {"mode": "retract"})
        if what == "flush":
            self.server.post("/flush_cache")
        elif what == "new weights":
            # As a trainer does it, with requests that wait; the same, so that one oracle serves.
            updated = self.server.post("/update_weights_from_disk", {"model_path": str(self.model)})
            assert updated["success"], updated
        self.server.post("/continue_generation", {})


def _phase(outcome: Outcome, events: dict[str, list[Event]]) -> str:
    """Where an aborted request was, by SGLang's reason and the trace."""
    if "waiting queue" in outcome.error:
        return "waiting"
    own = events[outcome.answer["meta_info"]["id"]]
    ended = [event for event in own if event["event"] == "finish"]
    generated = len(ended[0]["output_ids"])
    if not generated:
        return "prefill"
    compacted = [event["generated"] for event in own if event["event"] == "compact"]
    soon = compacted and generated - compacted[-1] <= SOON
    return "just compacted" if soon else "decode"


def conversations(model: Path, folder: Path, findings: Findings) -> None:
    """L8: 40 conversations of 6 turns with branches, in both modes and with every policy, into a
    quarter of the KV tokens that their last turns need. A retraction every 10 steps; 4 pauses with
    retract, one of them with a flush and one with new weights; chunks of 64; now and then n = 3; an
    abort or a request without a budget beside every turn. Then the latter on an idle server without
    the plugin, one at a time."""
    talks = [Talk(i, 6, 100 + 20 * (i % 11)) for i in range(findings.count(40, 12))]
    need_tokens = sum(talk.need_tokens for talk in talks)
    pool_tokens = need_tokens // 4
    shape: dict[str, Any] = {"retract_every": 10, "poison": True, "chunk": 64}
    with LoadServer(model, folder / "ours", pool_tokens=pool_tokens, **shape) as ours:
        ours.ready(findings)
        start, crowd = time.perf_counter(), Crowd(ours, model, talks, pool_tokens)
        crowd.run()
        findings.at_most("seconds", time.perf_counter() - start, 900)
        report_outcomes(findings, crowd.outcomes)
        report_trace(findings, ours.trace_counts(), 500)
        ours.report_clean(findings)
    findings.note("KV tokens that the last turns need", need_tokens)
    findings.at_most("of them in the pool", pool_tokens / need_tokens, 0.25)
    report_crowd(findings, crowd)
    gaps = crowd.judge(MaskingOracle(model))
    findings.exactly(
        "turns that the masking oracle explains", len(gaps) - gaps.count(None), len(gaps)
    )
    largest = max(gap for gap in gaps if gap is not None)
    findings.at_most("difference of log-probabilities from it", largest, LOGPROB_TOLERANCE)
    calls = [outcome.call for outcome in crowd.plain]
    expected = without_plugin(model, folder, findings, calls, 1, pool_tokens=need_tokens)
    compare(findings, "without a budget, beside conversations", expected, crowd.plain)


def report_crowd(findings: Findings, crowd: Crowd) -> None:
    """That all of it happened."""
    done = crowd.done
    findings.note("turns", len(crowd.turns))
    findings.happened("turns that continued a history", done["continued"], 100)
    findings.happened("histories lost", done["lost"], 20)
    findings.happened("turns restored", done["restore"], 50)
    findings.happened("turns recomputed", done["recompute"], 10)
    findings.happened("turns of 3 samples", done["n = 3"], 20)
    for phase in PHASES:
        if phase == "prefill":  # over in a moment: on some machines none comes within one
            findings.note("aborts, prefill", done["aborted, prefill"])
        else:
            findings.happened(f"aborts, {phase}", done[f"aborted, {phase}"], 5)
    for what in dict.fromkeys(DISTURBANCES):
        findings.exactly(f"{what}, in the middle", done[what], DISTURBANCES.count(what))

"""Clients of a load: requests that finish, are aborted or hang up, so many of them at a time."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import numpy as np

from sgl_skipkv.cli.progress import progress

TIMEOUT_S = 900
# An abort that overtakes its own call is lost: SGLang knows no such call yet. So it is repeated.
ABORT_AGAIN_S = 0.25


@dataclass(frozen=True)
class Call:
    """One ``POST /generate``, greedy, of exactly ``tokens`` tokens, unless ``keys`` say otherwise.

    Attributes:
        keys: further sampling parameters, ours among them.
        ending: what its client does in the end.
        abort_after_s: for ``abort``.
        abort_after_chunks: of the stream, for ``abort`` instead of seconds.
        leave_after_chunks: of the stream, for ``disconnect``.
    """

    input_ids: tuple[int, ...]
    tokens: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    ending: Literal["finish", "abort", "disconnect"] = "finish"
    abort_after_s: float = 0.0
    abort_after_chunks: int = 0
    leave_after_chunks: int = 1
    logprobs: bool = False

    def body(self, rid: str) -> dict[str, Any]:
        """As ``/generate`` wants it."""
        params = {"max_new_tokens": self.tokens, "temperature": 0, "ignore_eos": True, **self.keys}
        return {
            **{"rid": rid, "input_ids": list(self.input_ids), "sampling_params": params},
            **{"return_logprob": self.logprobs, "stream": self.streams},
        }

    @property
    def may_stop(self) -> bool:
        """Whether it may end before ``tokens`` tokens."""
        return bool({"stop", "regex"} & self.keys.keys())

    @property
    def streams(self) -> bool:
        return self.ending == "disconnect" or self.abort_after_chunks > 0


@dataclass
class Outcome:
    """What became of a request; ``status`` 0 is a connection that broke.

    Attributes:
        ended: ``left`` is a client that hung up before the answer was complete.
        answer: of a stream its last chunk, of ``n`` samples the first.
        samples: all answers.
    """

    call: Call
    ended: Literal["finished", "aborted", "left", "failed"]
    seconds: float = 0.0
    status: int = 200
    answer: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def wanted(self) -> bool:
        """Whether it ended in one of the ways that its client asked for."""
        ways = {"finish": ("finished",), "abort": ("finished", "aborted")}
        return self.ended in ways.get(self.call.ending, ("finished", "left"))

    @property
    def output_ids(self) -> list[int]:
        return list(self.answer["output_ids"])

    @property
    def logprobs(self) -> list[float]:
        return [entry[0] for entry in self.answer["meta_info"]["output_token_logprobs"]]

    def info(self, name: str) -> int:
        """A count of ``meta_info``; 0 where there was no complete answer."""
        return int(self.answer.get("meta_info", {}).get(name, 0))


async def send(session: aiohttp.ClientSession, call: Call) -> Outcome:
    """One call to its end."""
    rid, start = f"load-{uuid.uuid4().hex}", time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_ask(session, call, rid))
            if call.ending == "abort" and not call.abort_after_chunks:
                group.create_task(_abort(session, rid, call.abort_after_s, asking))
        outcome = asking.result()
    except* (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as errors:
        outcome = Outcome(call, "failed", status=0, error=repr(errors.exceptions[0]))
    outcome.seconds = time.perf_counter() - start
    return outcome


async def _ask(session: aiohttp.ClientSession, call: Call, rid: str) -> Outcome:
    async with session.post("/generate", json=call.body(rid)) as response:
        if response.status != 200:
            text = await response.text()
            return Outcome(call, "failed", status=response.status, error=text[:500])
        if call.streams:
            answer, chunks = {}, 0
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                answer, chunks = json.loads(line.removeprefix(b"data: ")), chunks + 1
                if call.ending == "disconnect" and chunks == call.leave_after_chunks:
                    response.close()
                    return Outcome(call, "left")
                if call.ending == "abort" and chunks == call.abort_after_chunks:
                    await _abort_now(session, rid)
            if "meta_info" not in answer:
                return Outcome(call, "failed", error=str(answer))
            samples = [answer]
        else:
            answers = await response.json()
            samples = answers if isinstance(answers, list) else [answers]
    reasons = [answer["meta_info"]["finish_reason"] for answer in samples]
    outcome = Outcome(call, "finished", answer=samples[0], samples=samples, error=str(reasons))
    if any(reason["type"] == "abort" for reason in reasons):
        outcome.ended = "aborted"
    elif not call.streams and any(
        len(one["output_ids"]) != call.tokens for one in samples if not call.may_stop
    ):
        outcome.ended = "failed"
    return outcome


async def _abort(
    session: aiohttp.ClientSession, rid: str, after_s: float, asking: asyncio.Task[Outcome]
) -> None:
    await asyncio.wait([asking], timeout=after_s)
    while not asking.done():
        await _abort_now(session, rid)
        await asyncio.wait([asking], timeout=ABORT_AGAIN_S)


async def _abort_now(session: aiohttp.ClientSession, rid: str) -> None:
    async with session.post("/abort_request", json={"rid": rid}):
        pass


def session_of(url: str) -> aiohttp.ClientSession:
    """As many connections as there are requests."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(
        url, connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
    )


async def _send_all(url: str, calls: Sequence[Call], parallel: int, label: str) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    waiting = iter(enumerate(calls))

    with progress() as bar:
        task = bar.add_task(label, total=len(calls))

        async def client(session: aiohttp.ClientSession) -> None:
            for number, call in waiting:
                outcomes[number] = await send(session, call)
                bar.advance(task)

        async with session_of(url) as session:
            async with asyncio.TaskGroup() as group:
                for _ in range(parallel):
                    group.create_task(client(session))
    return [outcomes[number] for number in range(len(calls))]


def run_load(url: str, calls: Sequence[Call], parallel: int, label: str) -> list[Outcome]:
    """All requests, ``parallel`` at a time; outcomes in the requests' order."""
    return asyncio.run(_send_all(url, calls, parallel, label))


def percentile_99(outcomes: Sequence[Outcome]) -> float:
    """Seconds that 99% of the requests take at most."""
    return float(np.quantile([outcome.seconds for outcome in outcomes], 0.99))

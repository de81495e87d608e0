"""Sending drawn bodies, and what is wrong with an answer."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import requests
from hostile_bodies import PROMPT, Body, Verdict, bodies, echoes
from hypothesis import Phase, given, settings
from pool_machine import MACHINE, own_draws
from servers import HTTPFailure, Server

_mine = threading.local()


class Answer(NamedTuple):
    """What came back, and how long it took."""

    status: int
    text: str
    seconds: float


def send(server: Server, body: Body) -> Answer:
    """Over this thread's own connections, which are kept."""
    if not hasattr(_mine, "session"):
        _mine.session = requests.Session()
    headers, start = {"Content-Type": "application/json"}, time.perf_counter()
    try:
        response = _mine.session.post(
            server.url + body.path, body.text, headers=headers, timeout=60
        )
    except requests.exceptions.ChunkedEncodingError:
        return Answer(0, "the answer broke off", time.perf_counter() - start)
    response.encoding = "utf-8"
    return Answer(response.status_code, response.text, time.perf_counter() - start)


def complaint(body: Body, verdict: Verdict, answer: Answer) -> str | None:
    """What is wrong with an answer, or None."""
    shown = f"{body.path} {body.text[:600]!r}\n-> {answer.status} {answer.text[:600]}"
    status, text = answer.status, answer.text
    if status == 200 and text.startswith("data: {") and '"error"' in text[:20]:
        # A stream that has begun; what the prompt's length alone decides is found out late.
        status, text = 400, text[len("data: ") :].partition("\n")[0]
    if status != (400 if verdict.names else 200):
        return f"expected {verdict.names or 200}: {shown}"
    if status == 400:
        message = error_of(HTTPFailure(status, text))
        if not message.startswith(verdict.names):
            return f"expected {verdict.names}: {shown}"
        ours = re.match(r"\w*[\w.]*: expected ", message)
        if ours and (echoes(message, body.text) or len(message) > 700):
            return f"echoes too much: {shown}"
    elif body.path == "/generate" and not text.startswith("data: "):
        parsed = json.loads(text)
        first, settings = parsed[0] if isinstance(parsed, list) else parsed, verdict.settings
        summary = first["meta_info"].get("skipkv")
        told = summary and (summary.get("policy"), summary.get("kv_budget"))
        if told != (settings and (settings.policy.name, settings.kv_budget)):
            return f"expected {verdict.settings}: {shown}"
    return None


def wrongly_answered(
    server: Server, sent: Sequence[Body], verdicts: Sequence[Verdict]
) -> list[str]:
    """What is wrong with the answers to these bodies, eight of them at once."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: send(server, body), sent))
    return [text for one in zip(sent, verdicts, answers, strict=True) if (text := complaint(*one))]


def answers_to_values(server: Server, values: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Sampling parameters, one request after the other."""
    server.wait_idle()
    bodies = [{"text": PROMPT, "sampling_params": {"max_new_tokens": 1, **one}} for one in values]
    return [send(server, Body("/generate", json.dumps(body).encode())) for body in bodies]


def p99_ms(answers: Sequence[Answer]) -> float:
    return 1000 * float(np.quantile([answer.seconds for answer in answers], 0.99))


def error_of(failure: HTTPFailure) -> str:
    """The message of a refusal, in SGLang's shape or OpenAI's."""
    error = json.loads(failure.body)
    error = error.get("error", error)
    return str(error["message"] if isinstance(error, dict) else error)


def refusal(server: Server, path: str, body: Mapping[str, Any]) -> str:
    """The message of a 400."""
    with pytest.raises(HTTPFailure) as caught:
        server.post(path, body)
    assert caught.value.status == 400, (body, caught.value.body)
    return error_of(caught.value)


def drawn(number: int) -> list[Body]:
    """So many bodies, the same ones every time."""
    found: list[Body] = []

    @settings(MACHINE, max_examples=number, phases=[Phase.generate])
    @given(bodies())
    def collect(body: Body) -> None:
        found.append(body)

    with own_draws():
        collect()
    return found

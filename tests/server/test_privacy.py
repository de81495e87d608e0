"""What callers wrote stays out of metrics and logs: no text, no token ids, whatever came of a
request.

The trace is the one file with token ids. An operator has to ask for it, as the session's server
was; it is also what shows that the search below would find something.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hostile_bodies import plain_body
from servers import HTTPFailure, Server
from tiny_models import prompt_ids

from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.config import METRIC_PREFIX, ServerConfig
from sgl_skipkv.metrics import METRICS

pytestmark = pytest.mark.server

KEYS: dict[str, Any] = {"kv_budget": 24, "kv_policy": "skipkv", "kv_params": {"interval": 8}}
SECRET = "zqxjkvbpyg"  # of letters that are tokens of the tiny models


def told(text: str, ids: Sequence[int], run: int = 5) -> bool:
    """Whether a text has so many of these ids one after the other, however they are set apart."""
    windows = (ids[i : i + run] for i in range(len(ids) - run + 1))
    # \D{1,3}: "5, 6", "5,6", "5 6", "5\n 6"
    patterns = (r"(?<!\d)" + r"\D{1,3}".join(map(str, window)) + r"(?!\d)" for window in windows)
    return any(re.search(pattern, text) for pattern in patterns)


@pytest.fixture(scope="module")
def after_calls(server: Server) -> Iterator[tuple[str, str, list[list[int]], list[str]]]:
    """What the server logged and counts after all kinds of requests; their ids and texts."""
    at, ids, texts = len(server.log), [], []

    def finish(number: int, **keys: Any) -> None:
        prompt = prompt_ids(f"privacy {number}", 40)
        answer = server.generate(prompt, 60, rid=f"private-{number}", **keys)
        ids.extend((prompt, answer["output_ids"]))
        texts.append(answer["text"])

    for number, keys in enumerate(({}, KEYS, {**KEYS, "kv_policy": "rkv"}, {"steering": 0.5})):
        finish(number, **keys)
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        for keys in (KEYS, {**KEYS, "kv_budget": 0}):
            send_text(server, path, keys)
    refuse_a_long_prompt(server, ids)
    abort(server, ids)
    server.wait_idle()
    yield server.log[at:], server.get("/metrics"), ids, [SECRET, *texts]


def send_text(server: Server, path: str, keys: dict[str, Any]) -> None:
    try:
        server.post(path, plain_body(path, keys, prompt=SECRET, tokens=40))
    except HTTPFailure as failure:
        assert failure.status == 400 and SECRET not in failure.body


def refuse_a_long_prompt(server: Server, ids: list[list[int]]) -> None:
    """Refused for what its prompt is, so the prompt is at hand when the message is written."""
    ids.append(prompt_ids("privacy 100", 50))
    parameters = {"count_prompt": True}
    with pytest.raises(HTTPFailure) as caught:
        server.generate(ids[-1], 4, kv_budget=40, kv_params=parameters)
    assert caught.value.status == 400 and not told(caught.value.body, ids[-1])


def abort(server: Server, ids: list[list[int]]) -> None:
    """In the middle of its compactions."""
    ids.append(prompt_ids("privacy 200", 40))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, ids[-1], 4000, rid="private-abort", **KEYS)
        while not server.events("private-abort"):
            time.sleep(0.05)
        server.post("/abort_request", {"rid": "private-abort"})
        failure = running.exception(timeout=60)
    assert failure is None or not told(failure.body, ids[-1])


def test_nothing_of_a_call_is_logged_or_counted(after_calls: Any) -> None:
    log, metrics, ids, texts = after_calls
    assert len(log.splitlines()) > 100 and "skipkv_compactions_total" in metrics
    for text in (log, metrics):
        assert not any(told(text, one) for one in ids)
        assert not [one for one in texts if len(one) >= 8 and one[:8] in text]


def test_every_label_is_one_of_the_table(after_calls: Any) -> None:
    """What a caller wrote is no label: that would also be a leak of memory."""
    scrape = Scrape(after_calls[1])
    of_sglang = {"model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank", "moe_ep_rank", "le"}
    known = {metric.full_name: metric.labels for metric in METRICS}
    ours = [name for name in scrape.names if name.startswith(METRIC_PREFIX)]
    assert len(ours) >= len(METRICS)
    for sample in (sample for name in ours for sample in scrape.samples(name)):
        name = re.sub("_(bucket|sum|count)$", "", sample.name)
        labels = {k: v for k, v in sample.labels.items() if k not in of_sglang}
        assert labels.keys() == known[name].keys(), sample
        assert all(value in known[name][label] for label, value in labels.items()), sample


def test_the_trace_is_where_token_ids_are(server: Server, after_calls: Any) -> None:
    """So the search finds what is there; and no server writes a trace unless it was told to."""
    _, _, ids, _ = after_calls
    trace = server.trace_path.read_text()
    assert told(trace, ids[3]) and not told(trace, ids[2])  # what it generated, not its prompt
    assert SECRET not in trace
    assert ServerConfig().trace is None
    finished = [event for event in map(json.loads, trace.splitlines()) if "output_ids" in event]
    assert finished


@pytest.mark.parametrize("path", ["/skipkv", "/skipkv/trace?since=0"])
def test_a_trace_is_not_served_unless_asked_for(server: Server, path: str) -> None:
    """The session's server writes a trace, and was started without ``--skipkv-explorer``."""
    with pytest.raises(HTTPFailure) as caught:
        server.get(path)
    assert caught.value.status == 404


def test_the_search_finds_what_is_there() -> None:
    ids = [3, 14, 15, 92, 65]
    assert told("[7, 3, 14, 15, 92, 65]", ids) and told("x 3,14,15,92,65", ids)
    assert not told("3, 14, 15, 92, 655", ids) and not told("13, 14, 15, 92, 65", ids)

"""Metrics of a real server against its trace and what was refused, and ``skipkv top``."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hostile_bodies import plain_body
from hostile_client import refusal
from metric_counts import counts_of_metrics, counts_of_trace, differences
from servers import HTTPFailure, Server
from tiny_models import VOCAB_SIZE, prompt_ids

from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.config import METRIC_PREFIX

pytestmark = pytest.mark.server

BUDGET, INTERVAL = 24, 8
KEYS: dict[str, Any] = {"kv_budget": BUDGET, "kv_params": {"interval": INTERVAL}}
KEYS |= {"kv_policy": "streaming"}


def scraped(server: Server) -> Scrape:
    return Scrape(server.get("/metrics"))


def running(server: Server) -> dict[str, float]:
    """Gauges of requests with this policy."""
    now = scraped(server)
    names = "running_requests", "kv_tokens", "full_kv_tokens", "kv_budget_tokens"
    return {name: now.total(METRIC_PREFIX + name, policy="streaming") for name in names}


def test_they_count_what_the_trace_does(server: Server) -> None:
    """Whatever other tests have sent to this server, and what these requests do."""
    before = counts_of_metrics(scraped(server))
    prompt = prompt_ids("metrics", 40)
    for policy in ("streaming", "skipkv", "full"):
        keys = {**KEYS, "kv_policy": policy} if policy != "full" else {"kv_policy": policy}
        server.generate(prompt, 90, **keys)
    first = server.generate(prompt, 60, **KEYS, kv_reuse="keep")
    turn = [*prompt, *first["output_ids"], *prompt_ids("next", 20)]
    server.generate(turn, 40, **KEYS, kv_reuse="keep", rid="metrics-turn")
    server.generate([*turn[:60], 5, 6, 7], 40, **KEYS, kv_reuse="keep")  # no history begins so
    server.wait_idle()
    metrics = counts_of_metrics(scraped(server))
    assert differences(counts_of_trace([server.trace_path]), metrics) == []
    grown = metrics - before
    assert grown["compactions_total", "skipkv"] == (89 - BUDGET) // INTERVAL
    assert grown["evicted_sentences_total", "skipkv"] > 0
    assert grown["requests_total", "full", "length"] == 1
    (finish,) = [e for e in server.events("metrics-turn") if e["event"] == "finish"]
    assert grown[("reused_tokens_total",)] == finish["reused_tokens"] > 0
    assert grown["reuse_misses_total", "diverged"] == 1
    seconds = scraped(server)
    steps = seconds.total(f"{METRIC_PREFIX}compaction_seconds_count")
    assert 0 < steps <= sum(n for (name, *_), n in metrics.items() if name == "compactions_total")
    assert seconds.total(f"{METRIC_PREFIX}compaction_seconds_sum") > 0


def test_gauges_of_running_requests(server: Server) -> None:
    """Within a second they say what a request holds; when none is left they are 0 at once."""
    seen = Counter[str]()
    with ThreadPoolExecutor(1) as pool:
        keys = {**KEYS, "rid": "metrics-gauges"}
        request = pool.submit(server.generate, prompt_ids("gauges", 40), 4000, **keys)
        deadline = time.monotonic() + 60
        while seen["full_kv_tokens"] <= BUDGET + INTERVAL and time.monotonic() < deadline:
            seen = Counter(running(server))
            time.sleep(0.1)
        server.post("/abort_request", {"rid": "metrics-gauges"})
        failure = request.exception(timeout=60)
    assert failure is None or isinstance(failure, HTTPFailure)
    assert seen["running_requests"] == 1 and seen["kv_budget_tokens"] == BUDGET
    assert 0 < seen["kv_tokens"] <= BUDGET + INTERVAL + 1 < seen["full_kv_tokens"]
    server.wait_idle()
    assert set(running(server).values()) == {0}


def test_refusals_count_once_and_by_reason(server: Server) -> None:
    """In every API, streamed or not, in the main process and in the scheduler."""
    expected: Counter[str] = Counter()

    def counted() -> Counter[str]:
        found = scraped(server).by(f"{METRIC_PREFIX}refusals_total", "reason")
        return Counter({reason: int(value) for reason, value in found.items()})

    def refuse(reason: str, path: str, body: dict[str, Any]) -> None:
        refusal(server, path, body)
        expected[reason] += 1
        assert counted() - before == expected, (reason, path, body)

    before = counted()
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"):
        for stream in (False, True):
            refuse("kv_budget", path, plain_body(path, {"kv_budget": 0}, stream=stream))
    for path in ("/api/chat", "/api/generate"):
        refuse("kv_policy", path, plain_body(path, {"kv_budget": 64, "kv_policy": "h3o"}))
    response = {"model": "m", "input": "1", "max_output_tokens": 16, "stream": False}
    refuse("kv_params", "/v1/responses", {**response, "kv_params": {"tua": 1}})
    chat = "/v1/chat/completions"
    refuse("steering", chat, plain_body(chat, {"metadata": {"steering": "on"}}))
    refuse("unknown_key", "/generate", plain_body("/generate", {"kv_bugdet": 64}))
    for path in (chat, "/v1/completions", "/v1/messages"):
        refuse("unknown_key", path, plain_body(path, {"extra_body": {"kv_budget": 64}}))
    refuse("kv_budget", "/generate", {**plain_body("/generate", {}), "kv_budget": 64})
    ids = plain_body("/generate", KEYS, prompt=[VOCAB_SIZE])
    refuse("token_ids", "/generate", ids)
    # The scheduler alone knows that a request is of a kind that cannot be compacted.
    refuse("kv_budget", "/generate", plain_body("/generate", {**KEYS, "beam_width": 2}))


def test_top(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.generate(prompt_ids("top", 40), 60, **KEYS)
    command = ["top", "--url", server.url + "/", "--interval", "0.3", "--once"]
    assert main([*command, "--json"]) == 0
    look = json.loads(capsys.readouterr().out)
    assert look["states"] == {"ready": 1} and look["pool_tokens"] > 0
    assert look["running_requests"] == 0 and look["compaction_ms"] is None
    (row,) = [row for row in look["policies"] if row["policy"] == "streaming"]
    assert row["running_requests"] == row["compactions_per_s"] == 0
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "streaming" in shown and "ready" in shown and "KV pool" in shown

"""The life of a request around compactions: cache hits, chunked prompts, stops, grammars,
aborts."""

from __future__ import annotations

import http.client
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers import HTTPFailure, Server, logprob_gap, output_logprobs
from tiny_models import PIECES, prompt_ids

pytestmark = pytest.mark.server

KEYS: dict[str, Any] = {"kv_budget": 24, "kv_policy": "skipkv", "kv_params": {"interval": 8}}


# -- radix cache (invariant 4)


def test_a_second_turn_hits_the_prompt(server: Server) -> None:
    prompt = prompt_ids(1, 90)
    first = server.generate(prompt, 100, **KEYS)
    assert first["meta_info"]["skipkv"]["compactions"] > 0
    second = server.generate([*prompt, 5, 6, 7], 4)
    assert second["meta_info"]["cached_tokens"] == len(prompt)


def test_a_second_turn_on_an_evicted_answer_is_as_cold(server: Server, oracle: Any) -> None:
    """Nothing of a compacted row may be found: only the prompt hits, and the logits are cold."""
    prompt = prompt_ids(2, 70)
    first = server.generate(prompt, 120, **KEYS)
    follow_up = [*prompt, *first["output_ids"], 9, 8, 7]
    second = server.generate(follow_up, 40)
    assert second["meta_info"]["cached_tokens"] == len(prompt)
    verdict = oracle("qwen2").judge(follow_up, second["output_ids"], [])
    assert verdict.wrong == []
    assert logprob_gap(second, verdict.logprobs.tolist()) <= 2e-3


def test_an_answer_below_its_budget_is_cached_whole(server: Server) -> None:
    prompt = prompt_ids(3, 60)
    plain = server.generate(prompt, 30)
    server.post("/flush_cache")
    budgeted = server.generate(prompt, 30, kv_budget=1000)
    assert budgeted["output_ids"] == plain["output_ids"]
    assert budgeted["meta_info"]["skipkv"]["evicted_tokens"] == 0
    second = server.generate([*prompt, *budgeted["output_ids"], 4], 4)
    assert second["meta_info"]["cached_tokens"] == len(prompt) + 29  # the last token was never fed


# -- the papers' setting


@pytest.mark.parametrize("kv_budget", [32, 200])
def test_prompts_can_be_counted_and_evicted(server: Server, oracle: Any, kv_budget: int) -> None:
    server.post("/flush_cache")
    prompt, rid = prompt_ids(4, 130), f"papers-{kv_budget}"
    parameters = {"interval": 16, "protect_prompt": False, "count_prompt": True}
    answer = server.generate(prompt, 150, rid=rid, kv_budget=kv_budget, kv_params=parameters)
    events = server.events(rid)
    compactions = [event for event in events if event["event"] == "compact"]
    assert all(event["after"] == kv_budget for event in compactions) and len(compactions) >= 4
    assert any(event["kept"][:130] != list(range(130)) for event in compactions)
    assert oracle("qwen2").judge(prompt, answer["output_ids"], events).wrong == []
    peak = answer["meta_info"]["skipkv"]["peak_kv_tokens"]
    assert peak <= max(kv_budget + 17, 131)  # the prompt itself is prefilled whole
    again = server.generate(prompt, 4)
    assert again["meta_info"]["cached_tokens"] == 0  # such a prompt is nobody else's


# -- SGLang's own accounting


def test_the_peak_holds_in_sglangs_own_accounting(server: Server) -> None:
    """``#token`` in SGLang's decode log, step by step, against what the request reports."""
    server.post("/flush_cache")
    prompt, at = prompt_ids(5, 50), len(server.log)
    answer = server.generate(prompt, 200, kv_budget=40, kv_params={"interval": 16})
    server.wait_idle()
    steps = [int(n) for n in re.findall(r"Decode batch, .*?#token: (\d+)", server.log[at:])]
    own = [tokens - len(prompt) for tokens in steps if tokens]
    assert len(own) >= 190
    assert max(own) <= 40 + 16 + 1
    assert max(own) == answer["meta_info"]["skipkv"]["peak_kv_tokens"] == 56
    assert min(own[60:]) <= 41  # and it falls back to the budget


# -- chunked prefill


def test_chunked_prompts_among_compactions(server: Server) -> None:
    """Prompts of five chunks arrive while others compact; everybody says what they say alone."""
    calls = [
        {"input_ids": prompt_ids(10 + i, 300 if i % 2 else 20), "tokens": 90, **KEYS}
        for i in range(8)
    ]
    together = server.generate_all(calls)
    for call, answer in zip(calls, together, strict=True):
        server.post("/flush_cache")
        assert server.generate(**call)["output_ids"] == answer["output_ids"]


# -- ways to stop


@pytest.fixture(scope="module")
def long_answer(server: Server) -> tuple[list[int], list[int], str]:
    prompt = prompt_ids(6, 40)
    answer = server.generate(prompt, 150, **KEYS)
    return prompt, answer["output_ids"], answer["text"]


def test_a_stop_token_ends_a_compacted_call(server: Server, long_answer: Any) -> None:
    prompt, ids, _ = long_answer
    at, token = next((i, x) for i, x in enumerate(ids) if i > 35 and x not in ids[:i])
    answer = server.generate(prompt, 150, **KEYS, stop_token_ids=[token], ignore_eos=False)
    assert answer["output_ids"] == ids[: at + 1]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["meta_info"]["skipkv"]["compactions"] > 0


def test_a_stop_string_ends_a_compacted_call(server: Server, long_answer: Any) -> None:
    """Within one token: SGLang cannot take back the part of a stop string that it sent before."""
    prompt, ids, text = long_answer
    pieces = ["" if token < 3 else PIECES[token] for token in ids]  # special tokens are no text
    starts = [len("".join(pieces[:i])) for i in range(len(pieces))]
    late = range(36, len(ids))
    at = next(i for i in late if pieces[i] and text.find(pieces[i]) == starts[i])
    answer = server.generate(prompt, 150, **KEYS, stop=[pieces[at]])
    assert answer["text"] == text[: starts[at]]
    assert answer["output_ids"] == ids[: at + 1]
    assert answer["meta_info"]["skipkv"]["compactions"] > 0


def test_a_grammar_holds_across_compactions(server: Server) -> None:
    """Letters in lines of at most eight: the grammar sees tokens, whatever the cache holds."""
    params = {**KEYS, "max_new_tokens": 120, "temperature": 0, "regex": r"([a-z]{2,8}\n){30}"}
    body = {"input_ids": prompt_ids(7, 40), "sampling_params": params}
    alone = server.post("/generate", body)
    assert re.fullmatch(r"([a-z]{2,8}\n)*[a-z]{0,8}", alone["text"])
    assert alone["meta_info"]["skipkv"]["compactions"] >= 10
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: server.post("/generate", body), range(3)))
    assert [answer["text"] for answer in answers] == [alone["text"]] * 3


def test_penalties_and_sampling_run_beside_a_budget(server: Server) -> None:
    params = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "min_p": 0.01}
    answer = server.generate(prompt_ids(8, 30), 100, **KEYS, **params)
    assert len(answer["output_ids"]) == len(output_logprobs(answer)) == 100
    assert answer["meta_info"]["skipkv"]["compactions"] > 0


# -- aborts


def test_aborts_leak_nothing(server: Server) -> None:
    """Twenty requests aborted at different points of their lives, some before they ever ran."""
    policies = ("skipkv", "rkv", "streaming", "random")
    with ThreadPoolExecutor(20) as pool:
        running = [
            pool.submit(
                *(server.generate, prompt_ids(100 + i, 30 + 10 * i), 4000),
                **{**KEYS, "rid": f"abort-{i}", "kv_policy": policies[i % 4]},
            )
            for i in range(20)
        ]
        for i in range(20):
            time.sleep(0.05)
            server.post("/abort_request", {"rid": f"abort-{i}"})
        server.post("/abort_request", {"abort_all": True})
        failures = [one.exception(timeout=60) for one in running]
    assert {one.status for one in failures if one is not None} <= {400, 499, 500, 503}
    server.assert_clean()
    assert server.used_tokens() == 0


def test_an_abort_of_a_waiting_request_reports_zeros(server: Server) -> None:
    """Two requests fill the pool, so a third waits."""

    def run(rid: str, **keys: Any) -> dict[str, Any]:
        return server.generate(prompt_ids(rid, 30), 4000, rid=rid, **keys)

    def wait_for(count: str, requests: int) -> None:
        while server.get("/v1/loads?include=core")["loads"][0][count] != requests:
            time.sleep(0.05)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(run, f"fills-{i}") for i in range(2)]
        wait_for("num_running_reqs", 2)
        counted = {"count_prompt": True}
        waiting = pool.submit(run, "waits", kv_budget=4000, kv_params=counted, steering=1.0)
        wait_for("num_waiting_reqs", 1)
        server.post("/abort_request", {"rid": "waits"})
        meta_info = waiting.result()["meta_info"]
        server.post("/abort_request", {"abort_all": True})
    assert meta_info["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    summary = meta_info["skipkv"]
    assert summary.pop("policy") == "distinct" and summary.pop("kv_budget") == 4000
    assert summary.pop("steering_alpha") == 1.0
    assert set(summary.values()) == {0} and summary.keys() > {"kv_tokens", "peak_kv_tokens"}
    assert server.events("waits")[-1]["finish_reason"] == "abort"
    assert all("skipkv" not in one.result()["meta_info"] for one in running)


def test_disconnects_leak_nothing(server: Server) -> None:
    for i in range(6):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        params = {"max_new_tokens": 4000, "ignore_eos": True, **KEYS}
        body = {"input_ids": prompt_ids(200 + i, 40), "sampling_params": params, "stream": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        assert connection.getresponse().read(2000)
        connection.close()
    server.assert_clean()
    assert server.used_tokens() == 0


# -- retraction of everything


@pytest.mark.slow
def test_a_call_that_cannot_come_back_ends_with_a_clear_error(server: Server) -> None:
    """Pausing with ``retract`` takes every request's KV; a trace longer than the pool is lost."""
    server.post("/flush_cache")
    parameters = {"interval": 8, "protect_prompt": False, "count_prompt": True}  # short rows
    long_prompt = prompt_ids(300, 8000)
    keys = {"kv_budget": 24, "kv_policy": "streaming", "kv_params": parameters}
    with ThreadPoolExecutor(2) as pool:
        outgrown = pool.submit(server.generate, long_prompt, 6000, rid="outgrown", **keys)
        fits = pool.submit(server.generate, prompt_ids(301, 20), 800, rid="fits", **keys)
        while not any(event["generated"] > 250 for event in server.events("outgrown")):
            time.sleep(0.1)
        server.post("/pause_generation", {"mode": "retract"})
        server.post("/continue_generation", {})
        failure = outgrown.exception(timeout=120)
        assert len(fits.result(timeout=120)["output_ids"]) == 800
    assert isinstance(failure, HTTPFailure) and failure.status == 500
    assert "pause_generation (mode retract) freed its KV" in failure.body
    assert "cannot be recomputed" in failure.body and "KV pool (8192 tokens)" in failure.body
    assert [e["event"] for e in server.events("fits")].count("recompute") == 1
    server.assert_clean()
    assert len(server.generate(prompt_ids(302, 20), 5)["output_ids"]) == 5


# -- SGLang's profiler


@pytest.mark.parametrize("by_stage", [False, True])
def test_steps_that_compact_can_be_profiled(server: Server, tmp_path: Path, by_stage: bool) -> None:
    """On the CPU platform, too."""
    prompt = prompt_ids("profiled", 20)
    stages = {"profile_by_stage": True} if by_stage else {}
    asked = {"output_dir": str(tmp_path), "num_steps": 3, "activities": ["CPU"], **stages}
    expected = server.generate(prompt, 60, **KEYS)
    server.post("/start_profile", asked)
    assert server.generate(prompt, 60, **KEYS)["output_ids"] == expected["output_ids"]
    deadline = time.monotonic() + 30
    while not [*tmp_path.rglob("*.trace.json.gz")] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [*tmp_path.rglob("*.trace.json.gz")]

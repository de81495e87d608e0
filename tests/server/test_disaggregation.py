"""PD disaggregation: one server computes prompts, the other one decodes and evicts.

Two real servers and the real Mooncake between them. Every token is that of a forward under the
masks of the decode server's trace, and every kept set the one with the best scores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from disaggregated import Disaggregated, has_mooncake
from fleet import Fleet, addition
from latent_oracle import LatentOracle
from score_oracle import SPELLED_OUT, score_tolerance
from server_specs import SPECS
from servers import HTTPFailure
from tiny_models import LINE_END_IDS, prompt_ids

from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.config import METRIC_PREFIX
from sgl_skipkv.policy import make_policy, names, policy_class

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not has_mooncake(), reason="make test-disaggregation"),
]

TOKENS, KV_BUDGET, INTERVAL = 160, 40, 16
STEERED = ("full", "streaming", "skipkv+")
PARAMETERS: dict[str, Any] = {"interval": INTERVAL, "delimiters": "any-newline"}
Answers = list[tuple[dict[str, Any], dict[str, Any]]]


def call(rid: str, policy: str, **keys: Any) -> dict[str, Any]:
    budget = {} if policy == "full" else {"kv_budget": KV_BUDGET, "kv_params": PARAMETERS}
    asked = {"rid": rid, "input_ids": prompt_ids(policy, 150), "tokens": TOKENS}
    return {**asked, "kv_policy": policy, "return_logprob": False, **budget, **keys}


@pytest.fixture(
    scope="module",
    params=[
        *("disaggregated", "disaggregated, two ranks", "disaggregated, two groups"),
        *("disaggregated, drafts", "disaggregated, two groups, drafts"),
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Disaggregated]:
    yield from fleet.lent(name)


@pytest.fixture(scope="module")
def scores(name: str, model_folder, score_oracle) -> Any:
    model = str(SPECS[name].model)
    return LatentOracle(model_folder(model)) if model == "deepseek_v3" else score_oracle(model)


@pytest.fixture(scope="module")
def answers(server: Disaggregated, name: str) -> Answers:
    evicting = [one for one in names() if one != "full"]
    if SPECS[name].model == "deepseek_v3":  # latents are refused to those that turn keys back
        evicting = [one for one in evicting if not policy_class(one).needs_rotation]
    # One budget for each, or all would be compacted in the same steps.
    calls = [call(one, one, kv_budget=KV_BUDGET + i) for i, one in enumerate(evicting)]
    if SPECS[name].steering_layer is not None:
        calls += [call(f"steered-{policy}", policy, steering=1.0) for policy in STEERED]
    return list(zip(*answered(server, calls), strict=True))


def answered(
    server: Disaggregated, calls: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The calls and their answers; those are asked again that SGLang's test switch has ended.

    It retracts although the pool is not full: one of two requests that were both compacted while
    the running step saw their rows as they were before.
    """
    with ThreadPoolExecutor(len(calls)) as pool:
        ends = [*pool.map(lambda asked: end(server, asked), calls)]
    lost = [i for i, ended in enumerate(ends) if JUST_COMPACTED in str(ended)]
    assert len(lost) <= 2
    for i in lost:
        calls[i] = {**calls[i], "rid": f"{calls[i]['rid']}-again"}
        ends[i] = end(server, calls[i])
    assert not any(isinstance(ended, HTTPFailure) for ended in ends)
    return calls, ends


JUST_COMPACTED = "no backup: it cannot be copied in this moment"


def end(server: Disaggregated, asked: dict[str, Any]) -> Any:
    """The answer, or what was said instead."""
    try:
        return server.generate(**asked)
    except HTTPFailure as failure:
        return failure


def test_every_greedy_token_is_the_argmax_under_the_trace_masks(
    server: Disaggregated, answers: Answers, oracle, name: str
) -> None:
    judge, seen = oracle(str(SPECS[name].model)).judge, 0
    for asked, answer in answers:
        prompt, ids, events = asked["input_ids"], answer["output_ids"], server.events(asked["rid"])
        assert len(ids) == TOKENS
        assert judge(prompt, ids, events, addition(name, asked, ids)).wrong == [], asked["rid"]
        seen += bool(judge(prompt, ids, []).wrong)
    assert seen >= 0.9 * len(answers)  # without masks and vector the oracle objects


def test_every_kept_set_is_the_one_with_the_best_scores(
    server: Disaggregated, answers: Answers, scores
) -> None:
    compactions = 0
    for asked, answer in answers:
        policy, events = asked["kv_policy"], server.events(asked["rid"])
        if policy not in SPELLED_OUT or "steering" in asked:
            continue
        ids, compacted = answer["output_ids"], [one for one in events if one["event"] == "compact"]
        ends = [token in LINE_END_IDS for token in ids]
        sides = asked["input_ids"], ids, compacted, ends, make_policy(policy, **PARAMETERS)
        for choice in scores.choices(*sides, kv_budget=asked["kv_budget"]):
            assert choice.inversion < score_tolerance(policy), asked["rid"]
            compactions += 1
    assert compactions >= 20


def test_what_is_retracted_comes_back_from_host_memory(
    server: Disaggregated, answers: Answers, name: str
) -> None:
    kinds = [one["event"] for asked, _ in answers for one in server.events(asked["rid"])]
    retractions = sum(answer["meta_info"]["num_retractions"] for _, answer in answers)
    assert "recompute" not in kinds and kinds.count("restore") == retractions
    if "two ranks" in name:  # the small pool: what a budgeted request can hold is reserved
        evicting = [answer for asked, answer in answers if asked["kv_policy"] != "full"]
        assert sum(answer["meta_info"]["num_retractions"] for answer in evicting) <= 2
    else:
        assert retractions >= 20


def test_what_needs_the_prompt_is_refused_by_both_servers(server: Disaggregated) -> None:
    refused = {"kv_reuse": "keep"}, *({"kv_params": one} for one in UNSERVED)
    for keys in refused:
        params = {"kv_budget": KV_BUDGET, "max_new_tokens": 2, **keys}
        body = {"input_ids": prompt_ids("refused", 20), "sampling_params": params}
        for one in (server, server.prefill):
            with pytest.raises(HTTPFailure, match=r"on this server .*PD disaggregation") as failure:
                requests_post(one.url, body)
            assert failure.value.status == 400


UNSERVED = ({"protect_prompt": False}, {"count_prompt": True})


def requests_post(url: str, body: dict[str, Any]) -> None:
    """To one server alone."""
    response = requests.post(f"{url}/generate", json=body, timeout=60)
    if response.status_code != 200:
        raise HTTPFailure(response.status_code, response.text)


def test_a_first_token_can_be_the_last(server: Disaggregated) -> None:
    answer = server.generate(**call("first", "rkv", tokens=1))
    info = answer["meta_info"]["skipkv"]
    assert len(answer["output_ids"]) == 1 and info["compactions"] == info["kv_tokens"] == 0
    assert [one["event"] for one in server.events("first")] == ["finish"]


def test_requests_that_are_aborted_free_what_they_held(server: Disaggregated) -> None:
    """Running, waiting and retracted ones, at different times of their lives."""
    calls = [call(f"aborted-{i}", "rkv", input_ids=prompt_ids(i, 60 + i)) for i in range(12)]
    with ThreadPoolExecutor(len(calls)) as pool:
        pending = [pool.submit(server.generate, **one) for one in calls]
        for asked in calls:
            time.sleep(0.1)
            for one in (server.prefill, server):
                one.post("/abort_request", {"rid": asked["rid"]})
        ended = [one.exception() or one.result() for one in pending]
    assert len(ended) == len(calls)
    server.assert_clean()
    deadline = time.monotonic() + 60  # of a broken transfer SGLang keeps the slots for a while
    while server.used_tokens() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert server.used_tokens() == 0
    assert server.generate(**call("after", "rkv"))["meta_info"]["skipkv"]["compactions"] >= 1


def test_without_a_backup_a_request_ends_and_says_why(fleet: Fleet) -> None:
    """Others go on, and so do those that wait for a track."""
    for server in fleet.lent("disaggregated, no backups"):
        calls = [call(f"lost-{i}", "rkv", kv_budget=KV_BUDGET + i) for i in range(8)]
        with ThreadPoolExecutor(len(calls)) as pool:
            pending = [pool.submit(server.generate, **asked) for asked in calls]
            ends = [str(one.exception() or "") for one in pending]
        said = "bytes do not fit beside others into retraction_backup_bytes (0)", JUST_COMPACTED
        lost = sum(any(one in ended for one in said) for ended in ends)
        assert lost >= 1 and ends.count("") == len(calls) - lost >= 1
        counts = Scrape(server.get("/metrics"))
        assert counts.total(f"{METRIC_PREFIX}requests_total", outcome="error") == lost


def test_a_pause_that_takes_kv_ends_what_evicts(server: Disaggregated) -> None:
    """The prefill server would compute it anew, and does not record what it computes."""
    calls = [call(f"paused-{policy}", policy, tokens=2000) for policy in ("rkv", "full")]
    with ThreadPoolExecutor(2) as pool:
        evicting, full = (pool.submit(server.generate, **one) for one in calls)
        while not server.events("paused-rkv"):
            time.sleep(0.05)
        server.post("/pause_generation", {"mode": "retract"})
        with pytest.raises(HTTPFailure, match="a decode server computes no prompts") as ended:
            evicting.result()
        server.post("/continue_generation", {})
        server.post("/abort_request", {"rid": "paused-full"})
        full.exception()
    assert ended.value.status == 500
    assert server.generate(**call("unpaused", "rkv"))["meta_info"]["skipkv"]["compactions"] >= 1


def test_new_weights_are_measured(server: Disaggregated, model_folder, name: str) -> None:
    """By the next request that evicts and finds the server idle: on every rank."""
    server.wait_idle()
    measured = server.log.count("new weights measured")
    path = str(model_folder(SPECS[name].model))
    assert Path(path).is_dir()
    assert server.post("/update_weights_from_disk", {"model_path": path})["success"]
    assert server.generate(**call("measured", "rkv"))["meta_info"]["skipkv"]["compactions"] >= 1
    ranks = 2 if "--tp-size" in SPECS[name].arguments else 1
    assert server.log.count("new weights measured") == measured + ranks

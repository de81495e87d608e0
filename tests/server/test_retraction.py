"""Retraction, forced every few steps by SGLang's own test switch, while requests compact.

On one server requests are recomputed from their tokens, on the other they come back from host
memory. Pools are small, settings come from a file, and the ledger is checked at every compaction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fleet import Fleet, addition
from load_turns import PHASES, Crowd, Talk
from server_parts import CROWD_POOL_TOKENS, RETRACT_POOL_TOKENS
from servers import Server, logprob_gap, output_logprobs
from tiny_models import prompt_ids

from sgl_skipkv import policy

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS = 1000
KEYS: dict[str, Any] = {"kv_params": {"interval": 16}}


@pytest.fixture(scope="module")
def small_server(fleet: Fleet) -> Iterator[Server]:
    yield from fleet.lent("recomputing")


@pytest.fixture(scope="module")
def restoring(fleet: Fleet) -> Iterator[Server]:
    yield from fleet.lent("restoring")


@pytest.mark.smoke
def test_recomputed_calls_are_exact_and_evict_anew(small_server: Server, oracle: Any) -> None:
    policies = ("skipkv", "rkv", "streaming", "random")
    calls = [
        {
            **{"rid": f"retract-{i}", "input_ids": prompt_ids(i, 60), "tokens": TOKENS},
            **{"kv_budget": 24 + i, "kv_policy": policies[i % 4], **KEYS},
            "steering": 1.0 + i / 8,
        }
        for i in range(8)
    ]
    answers = small_server.generate_all(calls)
    recomputed = compacted_after = 0
    for call, answer in zip(calls, answers, strict=True):
        events = small_server.events(call["rid"])
        sides = call["input_ids"], answer["output_ids"]
        added = addition("recomputing", call, answer["output_ids"])
        verdict = oracle("llama").judge(*sides, events, added)
        assert verdict.wrong == [], call["rid"]
        assert len(answer["output_ids"]) == TOKENS
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= 2e-3
        kinds = [event["event"] for event in events]
        recomputed += kinds.count("recompute")
        if "recompute" in kinds:
            compacted_after += kinds[kinds.index("recompute") :].count("compact")
            assert set(events[kinds.index("recompute")]) == {"event", "rid", "generated"}
        assert kinds.count("recompute") == answer["meta_info"]["num_retractions"]
        assert kinds[-1] == "finish" and events[-1]["output_ids"] == answer["output_ids"]
    assert recomputed >= 5 and compacted_after >= 5


def test_a_trace_longer_than_the_pool_finishes_in_its_budget(small_server: Server) -> None:
    """4,600 tokens through a pool of 4,096."""
    answer = small_server.generate(
        prompt_ids(50, 60), 4_600, kv_budget=64, kv_policy="streaming", kv_params={"interval": 64}
    )
    info = answer["meta_info"]["skipkv"]
    assert len(answer["output_ids"]) == info["full_kv_tokens"] + 1 == 4_600
    assert info["peak_kv_tokens"] == 128 and answer["meta_info"]["num_retractions"] == 0


LONG_PROMPT = prompt_ids(52, 3900)  # with it, a trace outgrows the pool after 193 tokens


def test_without_a_budget_sglang_cuts_the_trace_to_the_pool(small_server: Server) -> None:
    answer = small_server.generate(LONG_PROMPT, 20_000)
    assert len(LONG_PROMPT) + len(answer["output_ids"]) <= RETRACT_POOL_TOKENS


def test_who_cannot_come_back_never_gives_way(small_server: Server) -> None:
    """A request past the pool's length runs beside others; only the others are retracted."""
    keys = {"kv_budget": 48, "kv_policy": "streaming", **KEYS}
    with ThreadPoolExecutor(1) as pool:
        long_call = pool.submit(small_server.generate, LONG_PROMPT, 1500, rid="long", **keys)
        retractions, seed = 0, 60
        while not long_call.done():
            seed += 1
            other = small_server.generate(prompt_ids(seed, 10), 80)
            retractions += other["meta_info"]["num_retractions"]
        answer = long_call.result()
    assert len(answer["output_ids"]) == 1500 and retractions > 0
    events = [event for event in small_server.events("long") if event["event"] == "recompute"]
    assert all(len(LONG_PROMPT) + event["generated"] + 2 < RETRACT_POOL_TOKENS for event in events)


@pytest.mark.smoke
def test_restored_calls_go_on_as_if_nothing_had_happened(restoring: Server) -> None:
    """Every policy beside a request that is always further: SGLang retracts the shorter output.

    It never retracts its last request, so a request alone is the run without retractions.
    """
    names = [name for name in policy.names() if name != "full"]
    parameters = {"kv_params": {"interval": 8}}
    calls = [
        {
            **{"input_ids": prompt_ids(90 + i, 20 + 7 * i), "tokens": 160},
            **{"kv_budget": 24 + i, "kv_policy": name, **parameters},
            **({"steering": 1.0} if i % 2 else {}),
        }
        for i, name in enumerate(names)
    ]
    alone = [restoring.generate(**call, rid=f"alone-{i}") for i, call in enumerate(calls)]
    # A new companion now and then, so that none compacts: of two that compact in the same step, one
    # would be recomputed.
    beside, retractions, compactions = list[dict[str, Any]](), 0, 0
    for first in range(0, len(calls), 4):
        with ThreadPoolExecutor(1) as pool:
            companion = pool.submit(
                *(restoring.generate, prompt_ids(89, 30), 30_000),
                **{"rid": f"further-{first}", "kv_budget": 32, "kv_policy": "streaming"},
                **{"kv_params": {"interval": 3500}},
            )
            time.sleep(2)
            for i, call in enumerate(calls[first : first + 4], first):
                beside.append(restoring.generate(**call, rid=f"beside-{i}"))
            restoring.post("/abort_request", {"rid": f"further-{first}"})
            assert companion.result()["meta_info"]["skipkv"]["compactions"] == 0
    for i, (call, undisturbed, answer) in enumerate(zip(calls, alone, beside, strict=True)):
        assert answer["output_ids"] == undisturbed["output_ids"], call["kv_policy"]
        assert logprob_gap(answer, output_logprobs(undisturbed)) <= 1e-4
        events = restoring.events(f"beside-{i}"), restoring.events(f"alone-{i}")
        kept, expected = ([e["kept"] for e in side if e["event"] == "compact"] for side in events)
        assert kept == expected and len(kept) >= 12, call["kv_policy"]
        info = answer["meta_info"]
        # Before its first token a request has nothing to back up.
        kinds = [event["event"] for event in events[0]]
        assert kinds.count("restore") + kinds.count("recompute") == info["num_retractions"]
        assert kinds.count("restore") >= 40 and "recompute" not in kinds[1:]
        assert undisturbed["meta_info"]["num_retractions"] == 0
        retractions += info["num_retractions"]
        compactions += len(kept)
    assert retractions >= 400 and compactions >= 160


@pytest.fixture(scope="module")
def crowded(fleet: Fleet) -> Iterator[Server]:
    yield from fleet.lent("crowded")


def test_conversations_in_a_quarter_of_what_they_need(
    crowded: Server, oracle: Any, model_folder
) -> None:
    """The load job L8, small: turns and branches in both modes, retracted, paused, flushed, aborted
    in every phase, with new weights on the way. Every token is that of the masked forward, or for a
    request without a budget that of an idle server.
    """
    talks = [Talk(i, 4, 80, burst=2) for i in range(14)]
    assert sum(talk.need_tokens for talk in talks) >= 4 * CROWD_POOL_TOKENS
    crowd = Crowd(crowded, model_folder("llama"), talks, CROWD_POOL_TOKENS)
    crowd.run()
    assert [one.error for one in crowd.outcomes if not one.wanted] == []
    assert None not in crowd.judge(oracle("llama"))
    crowded.wait_idle()
    crowded.post("/flush_cache")
    assert crowded.used_tokens() == 0
    for one in crowd.plain:
        alone = crowded.generate(one.call.input_ids, one.call.tokens)
        assert alone["output_ids"] == one.output_ids
    done = crowd.done
    assert done["restore"] >= 50 and done["recompute"] >= 5
    assert done["continued"] >= 8 and done["lost"] >= 5 and done["n = 3"] >= 5
    assert sum(done[f"aborted, {phase}"] for phase in PHASES) >= 20
    assert done["flush"] == done["new weights"] == done["flush of a busy server"] == 1

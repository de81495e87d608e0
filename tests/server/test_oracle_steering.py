"""Steering against a Hugging Face forward with the same addition, on every layer of three models.

The servers of test_oracle.py, which load a vector that nothing there uses: its oracle has shown
that a loaded vector changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import STEERING_GAMMA, Fleet, addition
from server_parts import DEFAULTS_BY_FLAG
from servers import HTTPFailure, Server, logprob_gap
from tiny_models import VOCAB_SIZE, prompt_ids

from sgl_skipkv.config import ServerConfig

pytestmark = [pytest.mark.server, pytest.mark.slow]

# A tenth of what the other oracles allow, so that a sentence too few is seen.
LOGPROB_TOLERANCE = 2e-4
# As many times the default gamma as the servers have.
STRONGER = STEERING_GAMMA / ServerConfig().steering_gamma
TOKENS = 150
# server -> family; the vector sits on layer 2 (the last), 0 and 1
FAMILIES = {"qwen2, no overlap": "qwen2", "llama": "llama", "qwen3, no overlap": "qwen3"}
# name -> keys; half of the batch is steered, half of those evict
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"kv_policy": "full"},
    "steered": {"kv_policy": "full", "steering": 1.0},
    "other way": {"kv_policy": "full", "steering": -1.5},
    "from zero": {"kv_policy": "full", "steering": 0},
    "evicting": {"kv_budget": 40, "kv_policy": "skipkv", "steering": False},
    "both": {"kv_budget": 40, "kv_policy": "skipkv", "steering": 1.25},
    "both, streaming": {"kv_budget": 24, "kv_policy": "streaming", "steering": 1.0},
}


def make_calls(tag: str) -> list[dict[str, Any]]:
    rng = random.Random(5)
    draw = lambda n: [rng.randrange(3, VOCAB_SIZE) for _ in range(n)]  # noqa: E731
    prefix, parameters = draw(70), {"interval": 16, "delimiters": "any-newline"}
    return [
        {
            **{"rid": f"{tag}-{name}", "input_ids": prefix + draw(12), "tokens": TOKENS},
            **keys,
            **({"kv_params": parameters} if "kv_budget" in keys else {}),
        }
        for name, keys in CALLS.items()
    ]


@pytest.fixture(scope="module")
def steered(fleet: Fleet) -> Iterator[dict[str, Server]]:
    yield from fleet.all_lent(*FAMILIES, stop=True)


@pytest.fixture(scope="module")
def answers(steered: dict[str, Server]) -> dict[str, list[dict[str, Any]]]:
    return {name: server.generate_all(make_calls("all")) for name, server in steered.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_is_the_argmax_of_the_steered_forward(steered, answers, oracle, name) -> None:
    for call, answer in zip(make_calls("all"), answers[name], strict=True):
        events, sides = steered[name].events(call["rid"]), (call["input_ids"], answer["output_ids"])
        added = addition(name, call, answer["output_ids"])
        verdict = oracle(FAMILIES[name]).judge(*sides, events, added)
        assert verdict.wrong == [], (call["rid"], verdict.wrong[:5])
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= LOGPROB_TOLERANCE, call["rid"]
        info = answer["meta_info"]["skipkv"]
        if added is None:
            assert not {"steering_alpha", "nonexecution_sentences"} & info.keys()
            continue
        # Nor may the closing sentence be left out of N_o, at the default gamma either.
        late = addition(name, call, answer["output_ids"], closing=False)
        others = oracle(FAMILIES[name]).judge(*sides, events, late).logprobs.tolist()
        assert logprob_gap(answer, others) > STRONGER * LOGPROB_TOLERANCE, call["rid"]
        # The oracle without the addition objects: the vector is strong enough to be seen.
        assert call["steering"] == 0 or oracle(FAMILIES[name]).judge(*sides, events).wrong
        count = round((max(added.factors, key=abs) - call["steering"]) / STEERING_GAMMA)
        assert info["nonexecution_sentences"] >= count > 0 or call["steering"] < 0
        alpha = call["steering"] + STEERING_GAMMA * info["nonexecution_sentences"]
        assert info["steering_alpha"] == pytest.approx(alpha)


@pytest.mark.parametrize("name", FAMILIES)
def test_neighbours_do_not_notice(steered, answers, name) -> None:
    """Alone, each request says the same tokens as in the batch; so do the steered ones."""
    for call, together in zip(make_calls("all"), answers[name], strict=True):
        alone = steered[name].generate(**{**call, "rid": call["rid"].replace("all", "alone")})
        assert alone["output_ids"] == together["output_ids"], call["rid"]


def test_steered_kv_is_never_found_by_an_unsteered_call(steered, oracle) -> None:
    """Two turns: the second one finds the prompt of the first and computes its answer anew."""
    server, prompt = steered["llama"], prompt_ids(9, 90)
    first = server.generate(prompt, 40, steering=1.5)
    turn = [*prompt, *first["output_ids"], 5, 6, 7]
    second = server.generate(turn, 40, rid="second")
    assert second["meta_info"]["cached_tokens"] == len(prompt)
    verdict = oracle("llama").judge(turn, second["output_ids"], [])
    assert verdict.wrong == []
    assert logprob_gap(second, verdict.logprobs.tolist()) <= LOGPROB_TOLERANCE
    # What nobody steered is shared with steered requests: prompts are the same KV for all.
    third = server.generate(turn, 40, rid="third", steering=1.5)
    assert third["meta_info"]["cached_tokens"] == len(turn) - 1
    assert third["output_ids"] != second["output_ids"]


def test_flags_say_how_strongly_and_calls_within_the_limit(steered) -> None:
    server = steered["qwen3, no overlap"]
    assert DEFAULTS_BY_FLAG[0] == "--kv-budget"  # steering is no default there
    info = server.generate([5] * 20, 20)["meta_info"]["skipkv"]
    assert "steering_alpha" not in info
    for value in (10.5, True, "1", [1.0]):
        with pytest.raises(HTTPFailure, match=r"steering: expected false or a number in \[-10, 10"):
            server.generate([5] * 20, 4, steering=value)

"""Models that read images: a rotary embedding with three axes, and prompts that are longer than
they were sent. In pages of 16, and some requests are retracted and restored.

``tests/load/models.py`` does the same with longer outputs, for ``make reliability``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet, addition
from pictures import image_data, with_picture
from servers import HTTPFailure, Server, logprob_gap
from tiny_models import VISION_START, prompt_ids
from turns import Turn

from sgl_skipkv.policy import names, policy_class

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS = 90
LOGPROB_TOLERANCE = 2e-4
TURNING_BACK = [name for name in names() if policy_class(name).needs_rotation]
POLICIES = [name for name in names() if name not in ("full", *TURNING_BACK)]
PARAMETERS: dict[str, Any] = {"interval": 16, "delimiters": "any-newline"}


def call(rid: str, policy: str, prompt: list[int], **keys: Any) -> dict[str, Any]:
    images = {"image_data": image_data(prompt)} if VISION_START in prompt else {}
    named = {"rid": rid, "input_ids": prompt, "tokens": TOKENS, "kv_policy": policy}
    budget = {"kv_budget": 40, "kv_params": PARAMETERS | keys.pop("kv_params", {})}
    return {**named, **budget, **images, **keys}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def family(request) -> str:
    """The second also adds features of the images behind its first layer."""
    return request.param


@pytest.fixture(scope="module")
def server(fleet: Fleet, family: str) -> Iterator[Server]:
    yield from fleet.lent(family)


def test_every_greedy_token_is_the_argmax_under_the_trace_masks(family, server, oracle) -> None:
    calls = [call(name, name, with_picture(name, 40)) for name in POLICIES]
    # A row that is shorter than its prompt: where it ends, the prompt has an image.
    unprotected = {"kv_params": {"protect_prompt": False, "count_prompt": True}}
    calls += [
        call("text", "distinct", prompt_ids("text", 40)),
        call("steered", "distinct", with_picture("d", 40), steering=1.25),
        call("unprotected", "rkv", with_picture("unprotected", 80), **unprotected),
    ]
    seen = restored = 0
    for asked, answer in zip(calls, server.generate_all(calls), strict=True):
        rid, ids, events = asked["rid"], answer["output_ids"], server.events(asked["rid"])
        prompt = oracle(family).expanded(asked["input_ids"])
        assert answer["meta_info"]["prompt_tokens"] == len(prompt), rid
        verdict = oracle(family).judge(prompt, ids, events, addition(family, asked, ids))
        assert verdict.wrong == [], rid
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= LOGPROB_TOLERANCE, rid
        seen += bool(oracle(family).judge(prompt, ids, []).wrong)
        restored += rid == "unprotected" and "restore" in [event["event"] for event in events]
    assert seen >= 0.9 * len(calls)  # without masks the oracle objects
    assert restored >= 1  # "unprotected", which came last


@pytest.mark.parametrize("mode", ["keep", "budget"])
def test_a_conversation_continues_up_to_its_next_image(family, server, oracle, mode) -> None:
    turns: list[Turn] = []
    sent: list[int] = []
    for number, new in enumerate(
        (with_picture("first", 40), prompt_ids("second", 20), with_picture("third", 20))
    ):
        sent = [*sent, *new]
        answer = server.generate(**call(f"{mode}-{number}", "rkv", sent, kv_reuse=mode))
        turn = Turn(oracle(family).expanded(sent), answer, turns[-1:])
        turn.events = server.events(turn.rid)
        gap = turn.judge(oracle(family))
        assert gap is not None and gap <= LOGPROB_TOLERANCE, (mode, number)
        turns.append(turn)
        sent = [*sent, *turn.output_ids]
    _, text, image = turns
    assert text.info["kv_reuse_miss"] == "none" and text.info["reused_tokens"] > 100
    # SGLang would look for the image where the row has other tokens.
    assert image.info["kv_reuse_miss"] == "media" and image.info["reused_tokens"] == 0


@pytest.mark.parametrize("policy", TURNING_BACK)
def test_policies_that_turn_queries_back_are_refused(server, policy) -> None:
    with pytest.raises(HTTPFailure, match=f"MRotaryEmbedding: its turn.*got '{policy}'"):
        server.generate(prompt_ids(0, 30), 5, kv_budget=40, kv_policy=policy)

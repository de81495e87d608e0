"""Four policies under the oracle, alone and in one batch: the core of the smoke suite.

``pytest -m smoke`` also runs a few tests of other files: ``make canary`` runs it on other versions
of SGLang. What every version must do is marked; what finds rare mistakes of ours is not.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from servers import Server, logprob_gap
from tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.server, pytest.mark.smoke]

# One that needs queries, one that needs sentences, one that needs values, one that needs nothing.
POLICIES = ("rkv", "skipkv", "distinct", "streaming")
LOGPROB_TOLERANCE = 2e-3


def calls(tag: str) -> list[dict[str, Any]]:
    rng = random.Random(3)
    prefix = [rng.randrange(3, VOCAB_SIZE) for _ in range(90)]
    keys = {"kv_budget": 40, "kv_params": {"interval": 16}, "tokens": 120}
    return [
        {
            **{"rid": f"{tag}-{name}", "kv_policy": name, **keys},
            "input_ids": prefix + [rng.randrange(3, VOCAB_SIZE) for _ in range(20 + i)],
        }
        for i, name in enumerate(POLICIES)
    ]


def test_every_token_is_the_argmax_alone_and_in_a_batch(server: Server, oracle: Any) -> None:
    together = server.generate_all(calls("smoke-batch"))
    for call, in_batch in zip(calls("smoke-alone"), together, strict=True):
        answer = server.generate(**call)
        events = server.events(call["rid"])
        verdict = oracle("qwen2").judge(call["input_ids"], answer["output_ids"], events)
        assert verdict.wrong == [], (call["rid"], verdict.wrong[:5])
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= LOGPROB_TOLERANCE
        assert answer["output_ids"] == in_batch["output_ids"], call["rid"]
        assert answer["meta_info"]["skipkv"]["compactions"] == (119 - 40) // 16

"""LoRA adapters: every request has its own weights, and its history belongs to them. In pages of
16, and some requests are retracted and restored.

The oracles read the model merged with an adapter. What the plugin measures at start, ``centres``
for ``triattention`` and ``reach`` for ``distinct``, is of the model without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from fleet import Fleet, addition
from oracle import MaskingOracle
from score_oracle import SPELLED_OUT, ScoreOracle, score_tolerance
from server_specs import SPECS
from servers import Server, logprob_gap
from tiny_models import LINE_END_IDS, merged, prompt_ids
from turns import Turn

from sgl_skipkv.policy import make_policy, names

pytestmark = [pytest.mark.server, pytest.mark.slow]

NAME, FAMILY = "adapters", str(SPECS["adapters"].model)
ADAPTERS = SPECS[NAME].adapters
OTHER = {None: "a", "a": "b", "b": None}
TOKENS, LOGPROB_TOLERANCE = 120, 2e-4
POLICIES = [name for name in names() if name != "full"]
PARAMETERS: dict[str, Any] = {"interval": 16, "delimiters": "any-newline"}
#: whose scores depend on what is measured at start
MEASURED = ("triattention", "distinct")


def call(rid: str, adapter: str | None, policy: str, **keys: Any) -> dict[str, Any]:
    """All prompts begin alike, so adapters could share them in the radix cache if that let them."""
    prompt = prompt_ids("shared", 32) + prompt_ids(rid, 10)
    named = {"rid": rid, "input_ids": prompt, "tokens": TOKENS, "lora_path": adapter}
    budget = {"kv_budget": 40, "kv_policy": policy, "kv_params": PARAMETERS}
    return {**named, **budget, **keys}


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Iterator[Server]:
    yield from fleet.lent(NAME)


@pytest.fixture(scope="module")
def judge(server, model_folder, oracle) -> Callable[[str | None], MaskingOracle]:
    """adapter -> masking oracle; of none, the model's."""
    model = model_folder(FAMILY)
    return cache(lambda one: MaskingOracle(merged(model, one)) if one else oracle(FAMILY))


def test_every_token_and_every_kept_set(server, model_folder, judge, score_oracle) -> None:
    calls = [call(f"{p}-{ADAPTERS[i % 2]}", ADAPTERS[i % 2], p) for i, p in enumerate(POLICIES)]
    calls += [call(f"{p}-model", None, p) for p in POLICIES[::3]]
    calls += [call(f"steered-{one}", one, "distinct", steering=1.25) for one in (*ADAPTERS, None)]
    base = score_oracle(FAMILY)
    scored = {one: ScoreOracle(merged(model_folder(FAMILY), one)) for one in ADAPTERS}
    unmasked = of_another = chosen = restored = 0
    for asked, answer in zip(calls, server.generate_all(calls), strict=True):
        rid, adapter, prompt = asked["rid"], asked["lora_path"], asked["input_ids"]
        ids, events = answer["output_ids"], server.events(rid)
        added = addition(NAME, asked, ids)
        verdict = judge(adapter).judge(prompt, ids, events, added)
        gap = logprob_gap(answer, verdict.logprobs.tolist())
        assert verdict.wrong == [] and gap <= LOGPROB_TOLERANCE, (rid, verdict.wrong, gap)
        unmasked += bool(judge(adapter).judge(prompt, ids, [], added).wrong)
        of_another += bool(judge(OTHER[adapter]).judge(prompt, ids, events, added).wrong)
        kinds = [event["event"] for event in events]
        restored += kinds.count("restore")
        policy = make_policy(asked["kv_policy"], **PARAMETERS)
        if policy.name not in SPELLED_OUT or "recompute" in kinds or added or not adapter:
            continue
        compactions = [event for event in events if event["event"] == "compact"]
        sides = prompt, ids, compactions, [token in LINE_END_IDS for token in ids], policy
        judged, wrong = scored[adapter], score_tolerance(policy.name)
        if policy.name in MEASURED:
            if policy.name == "triattention":  # what ``distinct`` measures changes no set here
                own = judged.choices(*sides)
                assert max(one.inversion for one in own) > 10 * wrong, "measured with the adapter"
            judged = ScoreOracle(judged.path)
            judged.centres, judged.reach = base.centres, base.reach
        choices = judged.choices(*sides)
        assert not any(one.kept.all() for one in choices), rid
        assert max(one.inversion for one in choices) < wrong, rid
        chosen += len(choices)
    assert min(unmasked, of_another) >= 0.9 * len(calls), (unmasked, of_another)
    assert chosen >= 3 * len(SPELLED_OUT)
    assert restored >= 1


@pytest.mark.parametrize("mode", ["keep", "budget"])
def test_a_history_belongs_to_its_adapter(server, judge, mode) -> None:
    asked = call(f"first-{mode}", "a", "rkv", kv_reuse=mode)
    first = Turn(asked["input_ids"], server.generate(**asked))
    first.events = server.events(first.rid)
    assert (first.judge(judge("a")) or 0.0) <= LOGPROB_TOLERANCE
    prompt = first.tokens + prompt_ids(mode, 20)
    calls = [
        {**call(f"second-{mode}-{one}", one, "rkv", kv_reuse=mode), "input_ids": prompt}
        for one in ("a", "b", None)
    ]
    for asked, answer in zip(calls, server.generate_all(calls), strict=True):
        turn = Turn(prompt, answer, [first], server.events(asked["rid"]))
        gap = turn.judge(judge(asked["lora_path"]))
        assert gap is not None and gap <= LOGPROB_TOLERANCE, asked["rid"]
        continued = len(first.tokens) - 1 if asked["lora_path"] == "a" else 0
        assert turn.info["reused_tokens"] == continued, asked["rid"]
        assert turn.info["kv_reuse_miss"] == "none"  # the others know of no history


@pytest.mark.parametrize("mode", ["keep", "budget"])
def test_a_name_with_other_weights_continues_nothing(server, model_folder, judge, mode) -> None:
    """The adapter of that name is unloaded, and another one loaded."""
    model = model_folder(FAMILY)
    folders = {one: model / "adapters" / one for one in ADAPTERS}
    turns: list[Turn] = []
    for adapter, folder in folders.items():
        load = {"lora_name": "reloaded", "lora_path": str(folder)}
        assert server.post("/load_lora_adapter", load)["success"]
        prompt = turns[0].tokens + prompt_ids(mode, 20) if turns else prompt_ids(mode, 42)
        asked = call(f"{mode}-{adapter}", "reloaded", "rkv", kv_reuse=mode, input_ids=prompt)
        turn = Turn(prompt, server.generate(**asked), turns[:], server.events(asked["rid"]))
        gap = turn.judge(judge(adapter))
        assert gap is not None and gap <= LOGPROB_TOLERANCE, asked["rid"]
        assert turn.info["reused_tokens"] == 0 and turn.info["kv_reuse_miss"] == "none"
        turns.append(turn)
        assert server.post("/unload_lora_adapter", {"lora_name": "reloaded"})["success"]

"""A model with windows: the last tokens stay, and its layers without a window choose the others.
In pages of 16 but where two pools have pages of one, and some requests are retracted and restored.

``tests/load/models.py`` does the same with longer outputs, for ``make reliability``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet
from oracle import MaskingOracle
from score_oracle import SPELLED_OUT, score_tolerance
from server_specs import SPECS
from servers import HTTPFailure, Server, logprob_gap
from tiny_models import LINE_END_IDS, WINDOW, prompt_ids
from turns import Turn

from sgl_skipkv.policy import make_policy, names

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS, BUDGET, LEAST = 120, 56, 4 + WINDOW + 1
LOGPROB_TOLERANCE = 2e-4
POLICIES = [name for name in names() if name != "full"]
TWO_POOLS = ("gpt_oss, two pools", "gpt_oss, two pools in pages")
SHARES: dict[str, dict[str, Any]] = {
    "rkv": {"fraction": 0.25},
    "snapkv": {"coverage": 0.3},
    "keydiff": {"quotas": True},
    "streaming": {"protect_prompt": False},
    "skipkv+": {"recent": 20},
}


def parameters(policy: str) -> dict[str, Any]:
    return {"interval": 16, "delimiters": "any-newline", **SHARES.get(policy, {})}


def call(rid: str, policy: str, kv_budget: int = BUDGET, **keys: Any) -> dict[str, Any]:
    budget = {"kv_budget": kv_budget, "kv_policy": policy, "kv_params": parameters(policy)}
    return {"rid": rid, "input_ids": prompt_ids(policy, 30), "tokens": TOKENS} | budget | keys


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss", *TWO_POOLS])
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(name: str) -> str:
    """The second has attention sinks."""
    return str(SPECS[name].model)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Server]:
    yield from fleet.lent(name)


def test_every_token_and_every_kept_set(name, family, server, oracle, score_oracle) -> None:
    unprotected = call("unprotected", "snapkv", 40, kv_params={"interval": 16, "kernel": 1})
    calls = [*(call(policy, policy) for policy in POLICIES), call("least", "h2o", LEAST)]
    if name not in TWO_POOLS:  # what is taken from a window has a slot in the window pool
        calls.insert(0, unprotected)
    judge, objected, chosen, restored = oracle(family).judge, 0, 0, 0
    for asked, answer in zip(calls, server.generate_all(calls), strict=True):
        rid, prompt, ids = asked["rid"], asked["input_ids"], answer["output_ids"]
        events = server.events(rid)
        verdict = judge(prompt, ids, events)
        gap = logprob_gap(answer, verdict.logprobs.tolist())
        if rid == "unprotected":
            assert verdict.wrong and gap > 10 * LOGPROB_TOLERANCE
            continue
        assert verdict.wrong == [] and gap <= LOGPROB_TOLERANCE, (rid, verdict.wrong, gap)
        objected += bool(judge(prompt, ids, []).wrong)
        kinds = [event["event"] for event in events]
        restored += kinds.count("restore")
        compactions = [event for event in events if event["event"] == "compact"]
        for event in compactions:
            now = len(prompt) + event["generated"]
            assert event["kept"][-WINDOW:] == [*range(now - WINDOW, now)], rid
        if asked["kv_policy"] in SPELLED_OUT and "recompute" not in kinds:
            policy = make_policy(asked["kv_policy"], **asked["kv_params"])
            delimiters = [token in LINE_END_IDS for token in ids]
            sides = prompt, ids, compactions, delimiters, policy
            choices = score_oracle(family).choices(*sides)
            assert not any(one.kept.all() for one in choices), rid
            assert max(one.inversion for one in choices) < score_tolerance(policy.name), rid
            chosen += len(choices)
    assert objected >= 0.9 * (len(POLICIES) + 1)  # without masks the oracle objects
    assert chosen >= 3 * len(SPELLED_OUT)
    assert restored >= 1  # the last one is retracted first
    kept = [one["after"] - 30 for one in server.events("rkv") if one["event"] == "compact"]
    assert kept[0] == LEAST  # a quarter of what was generated would be less


def test_sinks_matter(family, server, model_folder) -> None:
    """A forward without them takes other tokens, so the oracle above held the server to them."""
    if family != "gpt_oss":
        pytest.skip("it has no sinks")
    asked = {"rid": "sinks", "input_ids": prompt_ids("sinks", 30), "tokens": TOKENS}
    ids = server.generate(**asked)["output_ids"]
    without = MaskingOracle(model_folder(family))
    assert without.judge(asked["input_ids"], ids, []).wrong == []
    for layer in without.model.model.layers:
        layer.self_attn.sinks.data.fill_(-100.0)
    assert len(without.judge(asked["input_ids"], ids, []).wrong) > TOKENS // 4


@pytest.mark.parametrize("mode", ["keep", "budget"])
def test_a_history_ends_with_the_window(name, family, server, oracle, mode) -> None:
    """Cut as early as it may be: behind its last compaction, where no other token is left over."""
    if name in TWO_POOLS and mode == "budget":
        with pytest.raises(HTTPFailure, match="window layers in a pool of their own") as refused:
            server.generate(**call(f"first-{mode}", "rkv", kv_reuse=mode))
        assert refused.value.status == 400
        return
    keys = {"kv_reuse": mode, "kv_params": {"interval": 16}}
    asked = call(f"first-{mode}", "rkv", **keys)
    first = Turn(asked["input_ids"], server.generate(**asked))
    first.events = server.events(first.rid)
    assert first.judge(oracle(family)) <= LOGPROB_TOLERANCE
    evicted_at = 30 + first.compactions[-1]["generated"]
    if name in TWO_POOLS:  # only its end has a whole window
        prompt = [*first.tokens[:evicted_at], *prompt_ids("early", 20)]
        early = server.generate(**{**call("early", "rkv", **keys), "input_ids": prompt})
        assert early["meta_info"]["skipkv"]["kv_reuse_miss"] == "evicted"
        evicted_at = len(first.tokens) - 1
    prompt = [*first.tokens[:evicted_at], *prompt_ids("next", 20)]
    asked = {**call(f"second-{mode}", "rkv", **keys), "input_ids": prompt}
    second = Turn(prompt, server.generate(**asked), [first])
    second.events = server.events(second.rid)
    assert second.judge(oracle(family)) <= LOGPROB_TOLERANCE
    assert second.info["reused_tokens"] == evicted_at and second.info["compactions"] > 0
    assert second.compactions[: len(first.compactions)] == first.compactions


def test_a_history_stays_when_one_that_goes_on_from_it_has_lost_its_end(name, server) -> None:
    """The tree matches the other one up to where it has a whole window, which may be nowhere."""
    if name not in TWO_POOLS:
        pytest.skip("windows are kept as long as the rest")

    def asked(rid: str, prompt: list[int], tokens: int, **keys: Any) -> tuple[list[int], Any]:
        answer = server.generate(rid=rid, input_ids=prompt, tokens=tokens, **keys)
        return [*prompt, *answer["output_ids"]], answer["meta_info"].get("skipkv")

    def others(count: int) -> None:
        """Windows of their prompts take the place of older ones."""
        for _ in range(count):
            asked(f"other-{next(numbers)}", prompt_ids(f"other-{next(numbers)}", 33), 1)

    numbers = itertools.count()
    budget = {"kv_budget": BUDGET, "kv_policy": "rkv", "kv_reuse": "keep"}
    keys = {**budget, "kv_params": {"interval": 16}}
    server.wait_idle()
    server.post("/flush_cache")
    talk, _ = asked("talk", prompt_ids("talk", 60), 120, **keys)
    compacted = [one for one in server.events("talk") if one["event"] == "compact"]
    cut = 60 + compacted[-1]["generated"] + 2
    branch, info = asked("branch", talk[:cut] + prompt_ids("branch", 10), 110, **keys)
    assert info["kv_reuse_miss"] == "evicted"
    before, behind = (24, 10) if "pages" in name else (28, 6)  # in pages a prompt leaves less
    others(before)
    _, info = asked("refreshed", talk + prompt_ids("refreshed", 10), 20, **keys)
    assert info["reused_tokens"] == len(talk) - 1
    others(behind)
    _, info = asked("lost", branch + prompt_ids("lost", 10), 8, **keys)
    assert info["kv_reuse_miss"] == "evicted" and not info["reused_tokens"]
    _, info = asked("stayed", talk + prompt_ids("stayed", 10), 8, **keys)
    assert info["reused_tokens"] >= len(talk) - 1


def test_what_a_window_would_break_is_refused(name, server) -> None:
    reason = f"sink 4 + {WINDOW}, the model's window of so many tokens, + 1"
    dropping = {"drop_thoughts": True}
    for kv_budget, keys, said in (
        (LEAST - 1, {}, f"kv_budget: expected an integer in [{LEAST}, "),
        (LEAST - 1, {}, reason),
        (BUDGET, {"kv_reuse": "keep", "kv_params": dropping}, "kv_params.drop_thoughts: expected"),
    )[: 2 if name in TWO_POOLS else 3]:
        with pytest.raises(HTTPFailure) as refused:
            server.generate(**call("refused", "streaming", kv_budget, **keys))
        assert refused.value.status == 400 and said in str(refused.value)

"""What every registered policy promises; their formulas are in test_policy_scores.py."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import budget_at
from score_inputs import all_keys, all_values, score_input, with_statistics
from score_oracle import NOT_SCORED, SPELLED_OUT
from synthetic import BUDGET, DELIMITER, INTERVAL, WORD, Call, SyntheticServer, served, words
from torch import Tensor

import sgl_skipkv.policy
from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.policy import Policy, make_policy, names, policy_class
from sgl_skipkv.policy.inputs.score_input import ScoreInput

# name, parameters
POLICIES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in names()),
    ("skipkv", {"tau": 0.0, "window": 3, "sink": 0}),
    ("skipkv+", {"tau": 0.0, "ending": 1, "recent": 0}),
    ("rkv", {"sigma": 0.9, "kernel": 1, "threshold": 0.0, "window": 16}),
    ("snapkv", {"kernel": 1}),
    ("h2o", {"window": 20, "sink": 0}),
    ("raas", {"alpha": 0.02}),
    ("lazy", {"alpha": 0.02}),
    ("gkv", {"decay": 0.0, "sigma": 1.0}),
    ("crystal", {"alpha": 0.3, "decay": 0.9}),
    ("rpc", {"ratio": 2, "kernel": 1}),
    ("streaming", {"sink": 0, "window": 1}),
    ("random", {"seed": 5}),
    ("vase", {"large": 1.0}),
    ("vase", {"large": 0.0, "kernel": 31, "window": 1, "sink": 0}),
]
#: files whose tests derive scores anew
FORMULAS = ("policy_scores", "value_scores", "attention_statistics")
EVICTING = [case for case in POLICIES if policy_class(case[0]).evicts]


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    return case[0] + "".join(f"-{name}={value}" for name, value in case[1].items())


def serve(server: SyntheticServer, case: tuple[str, dict[str, Any]], **call: Any) -> Call:
    return served(server, kv_policy=case[0], kv_params=case[1], **call)


# -- the registry


def test_every_file_is_registered_and_the_first_is_the_default() -> None:
    assert names()[0] == ServerConfig().kv_policy == "distinct"
    folder = Path(sgl_skipkv.policy.__file__).parent
    others = {"__init__", "base", "installed", "sentence_quotas"}
    files = {path.stem for path in folder.glob("*.py")} - others
    assert files == {name.replace("+", "_plus") for name in names()}


def test_every_policy_has_its_formula_in_the_tests() -> None:
    files = (Path(__file__).with_name(f"test_{one}.py") for one in FORMULAS)
    tests = "".join(file.read_text() for file in files)
    assert all(f'"{name}"' in tests for name in names() if policy_class(name).evicts)


def test_servers_are_judged_by_every_policys_formula() -> None:
    assert {*SPELLED_OUT, *NOT_SCORED} == {*names()} and not {*SPELLED_OUT} & {*NOT_SCORED}


@pytest.mark.parametrize(
    "wrong", [lambda s: s[1:], lambda s: s[None], lambda s: s.double(), lambda s: s.half()]
)
def test_scores_of_another_shape_or_type_fail_their_request(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what a policy that is being written returned."""
    scores = policy_class("streaming").scores
    monkeypatch.setattr(
        policy_class("streaming"), "scores", lambda self, inputs: wrong(scores(self, inputs))
    )
    server = SyntheticServer()
    call = served(server, kv_policy="streaming")
    server.run(call, 60)
    assert "ValueError" in str(call.state.failure)
    assert re.search(r"policy streaming: expected float32 \[\d+\] on cpu, got torch", caplog.text)


@pytest.mark.parametrize("name", names())
def test_a_policy_knows_its_name_and_what_it_needs(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, Policy) and policy.name == name
    assert policy.min_budget_tokens == policy.params.sink + policy.params.window + 1 == 13
    assert not policy.needs_sentences or policy.needs_queries
    with pytest.raises(SettingError, match="a known name"):
        make_policy(name, no_such_parameter=1)


@pytest.mark.parametrize("name", ["", "SKIPKV", "nope", None, 3, ["rkv"]])
def test_unknown_policy(name: Any) -> None:
    with pytest.raises(SettingError, match=re.escape(", ".join(names()))):
        make_policy(name)


# -- properties of all


def repeat(call: Call) -> None:
    """Overwrite the request's content: every key, query and hidden state the same."""
    call.keys[:] = call.keys[:, :1].clone()
    call.values[:] = call.values[:, :1].clone()
    call.queries[:] = call.queries[:, :1].clone()
    call.hidden[:] = call.hidden[:1].clone()


def zero(call: Call) -> None:
    for table in (call.keys, call.values, call.queries, call.hidden):
        table.zero_()


def zero_every_third(call: Call) -> None:
    call.keys[:, ::3] = call.values[:, ::3] = 0.0
    call.hidden[::3] = 0.0


def huge(call: Call) -> None:
    call.keys.mul_(1e4)
    call.values.mul_(1e3)
    call.hidden.mul_(1e15)


SCENES: dict[str, tuple[list[int], Any]] = {
    "sentences": (words(5, 3, 7, 4, 9) * 10, lambda call: None),
    "one giant sentence": ([WORD] * 260, lambda call: None),
    "delimiters only": ([DELIMITER] * 260, lambda call: None),
    "one-token sentences": (words(1, 2) * 90, lambda call: None),
    "all equal": (words(5, 3, 7, 4, 9) * 10, repeat),
    "all zero": (words(5, 3, 7, 4, 9) * 10, zero),
    "some zero": (words(5, 3, 7, 4, 9) * 10, zero_every_third),
    "huge": (words(5, 3, 7, 4, 9) * 10, huge),
}
PROMPTS: dict[str, dict[str, Any]] = {
    "pinned": {},
    "short prompt": {"prompt": [3]},
    "evictable": {"protect_prompt": False},
    "counted": {"protect_prompt": False, "count_prompt": True},
    "half": {"fraction": 0.5},
    "half, counted": {"fraction": 0.5, "protect_prompt": False, "count_prompt": True},
    "half, counted and pinned": {"fraction": 0.5, "count_prompt": True},
}


#: ordinary sentences after every kind of prompt, all else after one that stays and one that may go
QUICK = [*(("sentences", prompt) for prompt in PROMPTS), *((scene, "pinned") for scene in SCENES)]
LIVES = [
    *dict.fromkeys(QUICK),
    *(
        pytest.param(scene, "counted", marks=pytest.mark.slow)
        for scene in SCENES
        if scene != "sentences"
    ),
]


@pytest.mark.parametrize(("scene", "prompt"), LIVES)
@pytest.mark.parametrize("case", EVICTING, ids=case_id)
def test_every_compaction_keeps_its_promises(
    case: tuple[str, dict[str, Any]], scene: str, prompt: str
) -> None:
    """Bound and count are exact, pinned tokens stay, order stays, scores are finite, nothing is
    lost."""
    tokens, change = SCENES[scene]
    parameters = {name: value for name, value in PROMPTS[prompt].items() if name != "prompt"}
    if case[0] == "rpc" and "count_prompt" in parameters:
        pytest.skip("its budget counts generated tokens only")
    server = SyntheticServer()
    opening = {"prompt": PROMPTS[prompt].get("prompt", [3] * 10), "prefill": False}
    call = served(server, tokens, kv_policy=case[0], kv_params={**case[1], **parameters}, **opening)
    change(call)
    server.prefill(call)
    policy, settings = call.state.settings.policy, call.state.settings
    params, evicted = policy.params, 0
    for _ in range(120):
        before, compactions = call.positions.copy(), len(call.compactions)
        server.decode(call)
        budget = partial(budget_at, policy, BUDGET, len(call.compactions))
        held = settings.budgeted_tokens(len(call.slots), call.prompt_tokens)
        assert held <= budget(call.generated, call.prompt_tokens) + INTERVAL + 1
        if len(call.compactions) == compactions:
            continue
        kept = call.compactions[-1]
        keep = budget(call.generated - 1, call.prompt_tokens)
        keep += 0 if params.count_prompt else call.prompt_tokens
        evicted += len(before) - len(kept)
        assert len(kept) == keep and kept == sorted(set(kept)) and set(kept) <= set(before)
        pinned = set(before[-params.window :]) | set(range(params.sink)) & set(before)
        if params.protect_prompt:
            pinned |= set(range(call.prompt_tokens))
        assert pinned <= set(kept)
    assert len(call.compactions) >= 5 and call.state.failure is None
    summary = server.finish(call)
    assert summary["evicted_tokens"] == evicted
    server.assert_idle()


def tables(inputs: ScoreInput) -> list[Tensor]:
    return [inputs.positions, inputs.queries(), all_keys(inputs), all_values(inputs)]


@pytest.mark.parametrize("case", EVICTING, ids=case_id)
def test_scores_depend_on_the_input_alone(case: tuple[str, dict[str, Any]]) -> None:
    """Twice the same, and nothing that was handed in is changed."""
    policy = make_policy(case[0], **case[1])
    inputs = with_statistics(policy, score_input(seed=3, window=policy.params.window))
    before = [table.clone() for table in tables(inputs)]
    first = policy.scores(inputs)
    assert torch.equal(first, policy.scores(inputs))
    assert first.dtype == torch.float32 and first.shape == inputs.positions.shape
    assert all(map(torch.equal, tables(inputs), before))


def test_full_evicts_nothing_and_needs_nothing() -> None:
    server = SyntheticServer()
    call = serve(server, ("full", {}))
    server.run(call, 120)
    assert call.compactions == [] and call.state.held.track_id == 0
    assert server.finish(call)["kv_tokens"] == 120


# -- what single policies keep


def test_streaming_keeps_the_sinks_and_the_most_recent() -> None:
    server = SyntheticServer()
    call = serve(server, ("streaming", {"protect_prompt": False, "count_prompt": True}))
    server.run(call, 100)
    for kept in call.compactions:
        assert kept == [0, 1, 2, 3, *range(kept[-1] + 1 - (BUDGET - 4), kept[-1] + 1)]
    assert len(call.compactions) >= 4


@pytest.mark.parametrize(
    ("kv_budget", "recent", "kept"),
    [
        *((75, None, 45), (150, None, 64), (194, None, 64), (195, None, 65), (1024, None, 341)),
        *((75, 64, 45), (1024, 64, 64), (1024, 1000, 614), (1024, 0, 8)),
    ],
)
def test_distinct_keeps_a_third_of_the_budget_for_recent_tokens(
    kv_budget: int, recent: int | None, kept: int
) -> None:
    """At least 64 and the window, at most three fifths; what was given in place of the third."""
    assert make_policy("distinct", recent=recent).protected_tail(kv_budget) == kept
    if recent is None:
        assert make_policy("distinct").protected_tail(kv_budget) == kept


def test_random_keeps_the_same_set_for_the_same_prompt_whoever_asks() -> None:
    server = SyntheticServer()
    same = [serve(server, ("random", {}), rid=rid, seed=seed) for rid, seed in (("a", 1), ("b", 2))]
    other = serve(server, ("random", {}), prompt=[3] * 9 + [2])
    for call in (*same, other):
        server.run(call, 80)
    assert same[0].compactions == same[1].compactions != other.compactions


def test_random_draws_anew_at_every_compaction() -> None:
    server = SyntheticServer()
    call = serve(server, ("random", {}))
    drawn = []  # row entries, which the same draw would choose again
    for before in server.compacting(call, 100):
        drawn.append(tuple(before.index(p) for p in call.compactions[-1]))
    assert len(set(drawn)) == len(drawn) == 4

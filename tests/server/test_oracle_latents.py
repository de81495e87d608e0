"""MLA on a server, of one rank, of two, and of two attention groups: latents are evicted, scored by
absorbed queries, backed up and carried on; in pages of 16.

``tests/load/models.py`` has more requests; ``tests/policies/test_latent_scores.py`` the formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet
from latent_oracle import LatentOracle
from metric_counts import counts_of_metrics, counts_of_trace, differences
from score_oracle import SPELLED_OUT, Choice, score_tolerance
from servers import HTTPFailure, Server, logprob_gap
from talks import BUDGET, Asked, assert_judged, choices_of, draw, keys, say
from tiny_models import LINE_END_IDS, prompt_ids

from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.policy import make_policy, names, policy_class

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS = 90
POLICIES = [name for name in names() if name != "full"]
TURNING_BACK = [name for name in POLICIES if policy_class(name).needs_rotation]
RUN = [name for name in POLICIES if name not in TURNING_BACK]
PARAMETERS: dict[str, Any] = {"interval": 16, "delimiters": "any-newline"}


def call(policy: str) -> dict[str, Any]:
    named = {"rid": policy, "input_ids": prompt_ids(policy, 30), "tokens": TOKENS}
    return {**named, "kv_policy": policy, "kv_budget": 40, "kv_params": PARAMETERS}


@pytest.fixture(scope="module", params=["latents", "latents on two ranks", "latents in two groups"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(kind: str) -> int:
    """That share a request."""
    return 2 if kind == "latents on two ranks" else 1


@pytest.fixture(scope="module")
def server(fleet: Fleet, kind: str) -> Iterator[Server]:
    yield from fleet.lent(kind)


@pytest.fixture(scope="module")
def scores(model_folder, ranks: int) -> LatentOracle:
    return LatentOracle(model_folder("deepseek_v3"), ranks)


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, dict[str, Any]]:
    return dict(zip(RUN, server.generate_all([*map(call, RUN)]), strict=True))


def test_every_greedy_token_is_the_argmax_under_the_trace_masks(server, answers, oracle) -> None:
    judge, seen, restored = oracle("deepseek_v3").judge, 0, 0
    for name, answer in answers.items():
        sides, events = (prompt_ids(name, 30), answer["output_ids"]), server.events(name)
        verdict = judge(*sides, events)
        assert verdict.wrong == [], name
        assert logprob_gap(answer, verdict.logprobs.tolist()) <= 2e-3, name
        seen += bool(judge(*sides, []).wrong)
        restored += [event["event"] for event in events].count("restore")
    assert seen >= 0.9 * len(RUN)  # without masks the oracle objects
    assert restored >= 1


def test_every_kept_set_is_the_one_with_the_best_scores(server, answers, scores) -> None:
    compactions = 0
    for name in {*RUN} & {*SPELLED_OUT}:
        for choice in choices_in(scores, server, name, answers[name]):
            assert choice.inversion < score_tolerance(name), name
            compactions += 1
    assert compactions >= 20


def test_the_heads_of_a_rank_are_the_group(server, answers, model_folder, ranks: int) -> None:
    """By the formula of another number of ranks other tokens would be the best."""
    other = LatentOracle(model_folder("deepseek_v3"), 3 - ranks)
    found = [choices_in(other, server, name, answers[name]) for name in ("snapkv", "rkv")]
    inversions = [choice.inversion for each in found for choice in each]
    assert len(inversions) >= 3 and max(inversions) > 1e-4


def choices_in(
    oracle: LatentOracle, server: Server, name: str, answer: dict[str, Any]
) -> list[Choice]:
    """None of a request that was computed again."""
    events, output = server.events(name), answer["output_ids"]
    if "recompute" in [event["event"] for event in events]:
        return []
    compacted = [event for event in events if event["event"] == "compact"]
    ends = [token in LINE_END_IDS for token in output]
    sides = prompt_ids(name, 30), output, compacted, ends, make_policy(name, **PARAMETERS)
    return oracle.choices(*sides, kv_budget=40)


def test_a_conversation_goes_on_from_the_latents_that_it_kept(server, oracle, scores) -> None:
    turns = []
    for number in range(3):
        text, after = draw(("latents", number), 60 if turns else 90), turns[-1] if turns else None
        # A history is known to the group that has left it.
        sampling = {**keys("budget", "rkv"), "routed_dp_rank": 0}
        turns += say(server, Asked(f"turn-{number}", text, sampling, after))
    assert_judged(oracle("deepseek_v3"), *turns)
    assert all(turn.info["copied_kv_tokens"] > 0 for turn in turns[1:])
    choices = choices_of(scores, turns, kv_budget=BUDGET)
    assert max(choice.inversion for _, choice in choices) < score_tolerance("rkv")


def test_metrics_count_what_the_traces_have(server, answers, kind: str) -> None:
    server.wait_idle()
    text = server.get("/metrics")
    counts = counts_of_metrics(Scrape(text))
    assert differences(counts_of_trace(server.trace_files), counts) == [] and counts
    assert ('dp_rank="1"' in text) == (kind == "latents in two groups")


@pytest.mark.parametrize("name", TURNING_BACK)
def test_policies_that_turn_queries_back_are_refused(server: Server, name: str) -> None:
    with pytest.raises(HTTPFailure, match=f"MLA: queries are turned in part.*got '{name}'"):
        server.generate(prompt_ids(0, 30), 5, kv_budget=40, kv_policy=name)

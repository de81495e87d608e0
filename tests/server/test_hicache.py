"""HiCache: prompts and histories that the device has no room for are loaded from host memory.

Every token is that of a forward under the trace's masks, wherever its KV has been.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet
from latent_oracle import LatentOracle
from score_oracle import SPELLED_OUT, score_tolerance
from server_parts import REASONER
from server_specs import SPECS
from servers import HTTPFailure, Server
from talks import (
    BUDGET,
    MODES,
    TEXT,
    Asked,
    Case,
    Turn,
    assert_judged,
    choices_of,
    converse,
    draw,
    keys,
    say,
    verdict,
)

from sgl_skipkv.policy import names, policy_class

pytestmark = [pytest.mark.server, pytest.mark.slow]

POLICIES = [name for name in names() if name != "full"]
TURNS = 3


SERVERS = ["hicache", "hicache on two ranks", "hicache with drafts", "hicache with eagle"]


@pytest.fixture(scope="module", params=SERVERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Server]:
    yield from fleet.lent(name)


@pytest.fixture(scope="module")
def scores(name: str, model_folder, score_oracle) -> Any:
    model = str(SPECS[name].model)
    latents = model == "deepseek_v3"
    return LatentOracle(model_folder("deepseek_v3"), 2) if latents else score_oracle(model)


@pytest.fixture(scope="module")
def policies(name: str) -> list[str]:
    """Latents are refused to those that turn keys back."""
    latents = SPECS[name].model == "deepseek_v3"
    return [one for one in POLICIES if not (latents and policy_class(one).needs_rotation)]


def from_host(turn: Turn) -> int:
    """KV tokens that were loaded."""
    return int(turn.answer["meta_info"]["cached_tokens_details"]["host"])


@pytest.fixture(scope="module")
def talks(server: Server, policies: list[str]) -> dict[Case, tuple[list[Turn], list[Turn]]]:
    """More conversations than the device has room for."""

    def asked(case: Case, number: object, after: Turn | None) -> Asked:
        text = draw((*case, number), TEXT if after else 90 + TEXT)
        return Asked(f"host-{'-'.join(case)}-{number}", text, keys(*case), after)

    return converse(server, [(mode, p) for mode in MODES for p in policies], asked, TURNS)


@pytest.fixture(scope="module")
def again(name: str) -> int:
    """Tokens of a history that the next turn computes again."""
    return int("EAGLE" in SPECS[name].arguments)


def test_histories_are_loaded_and_continued(talks, again: int) -> None:
    later = [turn for talk, branches in talks.values() for turn in (*talk[1:], *branches)]
    for turn in later:
        assert turn.info["kv_reuse_miss"] == "none", turn.asked.rid
        assert len(turn.prompt) - turn.info["reused_tokens"] <= TEXT + 1 + again, turn.asked.rid
    assert sum(from_host(turn) > 0 for turn in later) >= 0.3 * len(later)


def test_every_turn_is_the_whole_conversation_under_its_masks(talks, oracle, name: str) -> None:
    judge = oracle(str(SPECS[name].model))
    for talk, branches in talks.values():
        assert_judged(judge, *talk, *branches)
    loaded = [turn for _, branches in talks.values() for turn in branches if from_host(turn)]
    objected = [bool(verdict(judge, turn, turn.own).wrong) for turn in loaded]
    assert sum(objected) >= 0.8 * len(loaded)  # or the oracle would prove nothing


def test_every_kept_set_is_the_one_with_the_best_scores(talks, scores, again: int) -> None:
    """Keys that were away are the ones that are scored."""
    compactions = 0
    for (_, policy), (talk, _) in talks.items():
        if policy in SPELLED_OUT and from_host(talk[-1]):
            for _, choice in choices_of(scores, talk, computed_again=again, kv_budget=BUDGET):
                assert choice.inversion < score_tolerance(policy), policy
                compactions += 1
    assert compactions >= 10


def test_prompts_are_loaded(server: Server, policies: list[str], oracle, name: str) -> None:
    prompts = {policy: draw(("prompt", policy), 200) for policy in policies}
    for prompt in prompts.values():
        server.generate(prompt, 1)
    turns = say(
        server,
        *(
            Asked(f"loads-{policy}", prompt + draw("its own", 5), keys(False, policy))
            for policy, prompt in prompts.items()
        ),
    )
    assert sum(from_host(turn) >= 190 for turn in turns) >= 0.5 * len(turns)
    assert all(turn.info["compactions"] for turn in turns)
    retractions = sum(turn.answer["meta_info"]["num_retractions"] for turn in turns)
    assert bool(retractions) == ("env" in SPECS[name].options)
    assert_judged(oracle(str(SPECS[name].model)), *turns)


def test_drafts_stay_right_behind_a_load(fleet: Fleet) -> None:
    """The draft model's KV comes back, too: without it a draft would be another one."""
    for server in fleet.lent("hicache, drafts mostly right"):
        line = (REASONER / "heldout.jsonl").read_text().splitlines()[0]
        prompt = server.post("/tokenize", {"prompt": json.loads(line)["prompt"]})["tokens"]
        for mode in MODES:
            asked = {**keys(mode, "distinct"), "kv_budget": 128}
            text = [*prompt, *server.generate(prompt, 300, **asked)["output_ids"], 5]
            near = server.generate(text, 150, **asked)
            for i in range(8):  # more than the device has room for
                server.generate(draw((mode, i), 600), 1)
            far = server.generate(text, 150, **asked)
            hosts = [one["meta_info"]["cached_tokens_details"]["host"] for one in (near, far)]
            assert hosts[0] == 0 and hosts[1] >= 200
            accepted = [one["meta_info"]["spec_accept_length"] for one in (near, far)]
            assert accepted[0] == accepted[1] > 3.5 and near["output_ids"] == far["output_ids"]


def test_prompts_come_from_a_storage(fleet: Fleet, oracle) -> None:
    """Which refuses ``kv_reuse`` and nothing else."""
    for server in fleet.lent("hicache with a storage"):
        prompts = {policy: draw(("stored", policy), 300) for policy in POLICIES}
        for prompt in prompts.values():
            server.generate(prompt, 1)
        server.wait_idle()
        # Of the first two levels, and not before the third is written.
        server.post("/flush_cache?timeout=60")
        asked = [
            Asked(f"stored-{policy}", prompt + draw("its own", 5), keys(False, policy))
            for policy, prompt in prompts.items()
        ]
        turns = [turn for i in range(0, len(asked), 4) for turn in say(server, *asked[i : i + 4])]
        details = [turn.answer["meta_info"]["cached_tokens_details"] or {} for turn in turns]
        assert sum(one.get("storage", 0) >= 250 for one in details) >= 0.5 * len(turns)
        assert all(turn.info["compactions"] for turn in turns)
        assert_judged(oracle("llama"), *turns)
        with pytest.raises(HTTPFailure, match="kv_reuse with a HiCache storage"):
            server.generate([5, 6, 7], 1, **keys("keep"))


def test_a_history_that_the_host_has_lost_is_computed(server: Server, oracle, name: str) -> None:
    """As one that the device has lost, where there is no HiCache."""
    (first,) = say(server, Asked(f"{name} gone", draw("gone", 100), keys("budget")))
    for number in range(170):
        server.generate(draw(("filler", number), 240), 1)
    (second,) = say(server, Asked(f"{name} again", draw("more", TEXT), keys("budget"), first))
    assert (second.info["kv_reuse_miss"], second.info["reused_tokens"]) == ("evicted", 0)
    assert_judged(oracle(str(SPECS[name].model)), second)

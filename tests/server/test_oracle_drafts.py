"""Speculative decoding: a step adds several tokens, and a compaction may come while one runs.

A draft is right or wrong; what is written is what the model itself would have written of what is
kept. Some requests are retracted, and restored.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fleet import Fleet
from latent_oracle import LatentOracle
from score_oracle import SPELLED_OUT, ScoreOracle, score_tolerance
from server_parts import REASONER
from server_specs import SPECS
from servers import HTTPFailure, Server, judged
from talks import MODES, Asked, Turn, assert_judged, choices_of, converse, keys
from tiny_models import LINE_END_IDS, prompt_ids

from sgl_skipkv.policy import make_policy, names

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS, BUDGET, INTERVAL, ROUNDS = 120, 40, 16, 3
CHAIN = 4  # the most tokens of a step
SHARES: dict[str, dict[str, Any]] = {
    "keydiff": {"fraction": 0.25},
    "streaming": {"protect_prompt": False},
}


def call(rid: str, policy: str, prompt: list[int], **keys: Any) -> dict[str, Any]:
    parameters = {"interval": INTERVAL, "delimiters": "any-newline", **SHARES.get(policy, {})}
    budget = {"kv_budget": BUDGET, "kv_policy": policy, "kv_params": parameters}
    return {"rid": rid, "input_ids": prompt, "tokens": TOKENS} | budget | keys


def is_without_backups(name: str) -> bool:
    return (SPECS[name].config or {}).get("retraction_backup_bytes") == 0


def policies(family: str) -> list[str]:
    """All that evict; with latents without the rotation of queries."""
    served = [make_policy(name) for name in names() if name != "full"]
    return [one.name for one in served if family != "deepseek_v3" or not one.needs_rotation]


@pytest.fixture(
    scope="module",
    params=[
        "drafts",
        "drafts in pages",
        "drafts, no overlap",
        "eagle",
        "eagle on two ranks",
        "latents in two groups of two, with drafts",
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family(name: str) -> str:
    return str(SPECS[name].model)


@pytest.fixture(scope="module")
def server(fleet: Fleet, name: str) -> Iterator[Server]:
    yield from fleet.lent(name)


@pytest.fixture(scope="module")
def said(server: Server, family: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Calls with the answers, of prompts that begin alike."""
    shared = prompt_ids("shared", 100)
    calls = [
        call(f"{policy} {i}", policy, shared + prompt_ids(f"{policy} {i}", 30))
        for policy in policies(family)
        for i in range(2)
    ]
    return list(zip(calls, server.generate_all(calls), strict=True))


@pytest.fixture(scope="module")
def scores(family: str, score_oracle: Any, model_folder: Any) -> ScoreOracle:
    """With latents each of two ranks has some of the query heads."""
    if family == "deepseek_v3":
        return LatentOracle(model_folder(family), 2)
    return score_oracle(family)


def test_every_token_and_every_kept_set(said, server, name, family, oracle, scores) -> None:
    judge, objected, chosen, kinds, running = oracle(family).judge, 0, 0, Counter[str](), set()
    for asked, answer in said:
        kinds.update(judged(judge, server, asked, answer))
        objected += bool(judge(asked["input_ids"], answer["output_ids"], []).wrong)
        events, ids = server.events(asked["rid"]), answer["output_ids"]
        running |= {one.get("running") for one in events if one["event"] == "compact"}
        policy, prompt = make_policy(asked["kv_policy"], **asked["kv_params"]), asked["input_ids"]
        again = [i for i, one in enumerate(events) if one["event"] == "recompute"]
        # Of what a prefill computed again there is no attention of steps; vase counts draws.
        prefilled = len(prompt) + events[again[-1]]["generated"] if again else len(prompt)
        if policy.name not in SPELLED_OUT or (again and policy.name == "vase"):
            continue
        behind = events[again[-1] :] if again else events
        compactions = [one for one in behind if one["event"] == "compact"]
        delimiters = [token in LINE_END_IDS for token in ids]
        uncounted = [(len(prompt), prefilled)]
        sides = prompt, ids, compactions, delimiters, policy
        choices = scores.choices(*sides, uncounted=uncounted if again else ())
        assert not any(one.kept.all() for one in choices), asked["rid"]
        inversions = [one.inversion for one in choices]
        assert max(inversions, default=-1.0) < score_tolerance(policy.name), asked["rid"]
        chosen += len(choices)
    assert objected >= 0.9 * len(said)  # without masks the oracle objects
    assert chosen >= 3 * len(SPELLED_OUT)
    if is_without_backups(name):
        assert kinds["recompute"] and not kinds["restore"]
    else:  # computed again are those whose prefill was running
        assert kinds["restore"] > 2 * kinds["recompute"]
    # With overlap most compactions come while a step runs that does not know of them.
    overlaps = "no overlap" not in name
    assert running - {0} == {1, 2, 3, 4} & running if overlaps else running == {None}


def test_a_budget_is_a_bound(said, name) -> None:
    """A step may add several tokens before a compaction comes; with overlap two steps may."""
    chains = 1 if "no overlap" in name else 2
    for asked, answer in said:
        summary, policy = answer["meta_info"]["skipkv"], asked["kv_policy"]
        prompt = len(asked["input_ids"]) if policy == "streaming" else 0
        if summary["recomputations"] if "recomputations" in summary else policy == "streaming":
            continue  # until its first compaction a recomputed request has its whole text
        assert summary["peak_kv_tokens"] <= BUDGET + INTERVAL - 1 + chains * CHAIN + prompt, asked[
            "rid"
        ]


def test_requests_come_and_go(said, server, name, family, oracle) -> None:
    """In a small pool, with and without budgets, of texts that begin like others."""
    rng, judge = random.Random(3), oracle(family).judge
    texts = [asked["input_ids"] + answer["output_ids"] for asked, answer in said]
    cached, kinds = 0, Counter[str]()
    for number in range(ROUNDS):
        calls = []
        for i in range(24):
            text, new = rng.choice(texts), prompt_ids(f"{number} {i}", rng.randrange(1, 40))
            prompt = text[: rng.randrange(10, min(len(text), 300))] + new
            tokens = rng.choice((1, 2, 30, 90, 200))
            policy = rng.choice(policies(family))
            calls.append(call(f"{number}-{i}", policy, prompt, tokens=tokens))
            if i % 4 == 0:  # an answer without a budget may begin with what others left
                for key in ("kv_policy", "kv_budget", "kv_params"):
                    del calls[-1][key]
        for asked, answer in zip(calls, server.generate_all(calls), strict=True):
            kinds.update(judged(judge, server, asked, answer))
            cached += answer["meta_info"]["cached_tokens"]
            texts.append(asked["input_ids"] + answer["output_ids"])
    assert cached > 20 * 24 * ROUNDS
    assert kinds["recompute" if is_without_backups(name) else "restore"] >= 5


def test_what_is_not_made_to_work_is_refused(server, name) -> None:
    prompt = prompt_ids("refused", 30)
    if not refuses_reuse(name):
        return
    for mode in ("keep", "budget"):
        with pytest.raises(HTTPFailure, match="kv_reuse with EAGLE in pages of 16") as refused:
            server.generate(**call("refused", "distinct", prompt, kv_reuse=mode))
        assert refused.value.status == 400


def refuses_reuse(name: str) -> bool:
    arguments = SPECS[name].arguments
    return "EAGLE" in arguments and "--page-size" in arguments


def turn_asked(case: tuple[str, str, bool], number: object, after: Turn | None) -> Asked:
    """Of two attention groups the second one: a history is known to the group that has left it."""
    mode, policy, of_groups = case
    text = prompt_ids(f"{case} {number}", 30 if after else 90)
    sampling = keys(mode, policy) | ({"routed_dp_rank": 1} if of_groups else {})
    return Asked(f"talk {mode} {policy} {number}", text, sampling, after)


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_goes_on_from_what_was_kept(
    server, name, family, oracle, scores, mode
) -> None:
    """The next turn reads the KV of both models. With EAGLE it computes the last token again."""
    if refuses_reuse(name):
        pytest.skip("refused there")
    chosen, of_spelled_out, served = 0, 0, policies(family)
    boundary, of_groups = (
        "EAGLE" in SPECS[name].arguments,
        "--attn-dp-size" in SPECS[name].arguments,
    )
    # At once as many as the pool has room for. Four ranks take their time.
    for some in (served[i::6] for i in range(2 if of_groups else 6)):
        talks = converse(server, [(mode, policy, of_groups) for policy in some], turn_asked, 3)
        for (_, policy, _), (talk, branches) in talks.items():
            assert_judged(oracle(family), *talk, *branches)
            for turn in (*talk[1:], *branches):
                info, computed = turn.info, len(turn.prompt) - turn.info["reused_tokens"]
                assert info["kv_reuse_miss"] == "none", turn.asked.rid
                assert computed <= 30 + 1 + boundary, turn.asked.rid
            if policy in SPELLED_OUT:
                choices = choices_of(scores, talk, computed_again=boundary, kv_budget=40)
                inversions = [one.inversion for _, one in choices]
                assert max(inversions, default=-1.0) < score_tolerance(policy), (mode, policy)
                chosen, of_spelled_out = chosen + len(inversions), of_spelled_out + 1
    assert chosen >= of_spelled_out * (2 if mode == "budget" else 1) >= 4


def problems(server: Server) -> list[list[int]]:
    lines = (REASONER / "heldout.jsonl").read_text().splitlines()[:4]
    asked = [{"prompt": json.loads(line)["prompt"]} for line in lines]
    return [server.post("/tokenize", one)["tokens"] for one in asked]


@pytest.mark.parametrize("name", ["drafts, mostly right", "drafts, mostly right, in pages"])
def test_drafts_stay_right(fleet: Fleet, name: str) -> None:
    """The draft model sees what the other sees, at the same positions. It is the same model, so
    nearly all of its drafts are right, whatever was evicted."""
    for server in fleet.lent(name):
        prompt, sizes = problems(server)[0], {"tokens": 400, "kv_budget": 128}
        calls = [call(policy, policy, prompt, **sizes) for policy in policies("")]
        full = server.generate(input_ids=prompt, tokens=400)
        print(f"{name}, full: {full['meta_info']['spec_accept_length']:.2f} tokens per step")
        for asked, answer in zip(calls, server.generate_all(calls), strict=True):
            summary, accepted = (
                answer["meta_info"][key] for key in ("skipkv", "spec_accept_length")
            )
            print(f"{name}, {asked['rid']}: {accepted:.2f} tokens per step")
            assert summary["compactions"] >= 8 and summary["evicted_tokens"] >= 128
            assert accepted > 3.5, asked["rid"]
        alone_and_in_a_crowd(server)


def alone_and_in_a_crowd(server: Server) -> None:
    """When a compaction comes and what it keeps does not depend on other requests, whose prefills
    let results of steps arrive earlier."""
    found = []
    for crowded in (False, True):
        server.wait_idle()
        server.post("/flush_cache")  # where a cached prefix ends, a draft may be another one
        calls = [
            call(f"{crowded} {i}", "keydiff", prompt, tokens=200, kv_budget=48)
            for i, prompt in enumerate(problems(server))
        ]
        with others(server) if crowded else contextlib.nullcontext():
            answers = server.generate_all(calls)
        events = [server.events(asked["rid"])[:-1] for asked in calls]
        names = "generated", "kept", "running"
        found.append([[[one[name] for name in names] for one in of_one] for of_one in events])
        found[-1].append([answer["output_ids"] for answer in answers])
    assert found[0] == found[1] and all(len(one) >= 4 for one in found[0])


@contextlib.contextmanager
def others(server: Server) -> Iterator[None]:
    """Short requests without a budget, one after the other, meanwhile."""
    is_over = threading.Event()

    def ask() -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            server.generate(input_ids=prompt_ids(number, 50), tokens=1 + number % 4)

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            is_over.set()
            asking.result()

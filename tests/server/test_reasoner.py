"""The bundled model is what its card says: files, problems, and answers through the real server.

A sample here; ``python -m bench.accuracy`` measures all 200 problems of each level.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from servers import Server
from transformers import AutoTokenizer

from bench.reasoner import problems as generator

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "reasoner"
SAMPLE = 5
HELDOUT = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]


def heldout(level: str) -> list[dict[str, Any]]:
    return [problem for problem in HELDOUT if problem["level"] == level]


def test_weights_are_small_and_the_log_belongs_to_them() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 10_000_000
    rows = list(csv.DictReader((MODEL / "training_log.csv").open()))
    command = (MODEL / "README.md").read_text()
    assert f"{int(rows[-1]['step']):,} steps" in command and "--seed 1" in command
    assert float(rows[-1]["seconds"]) < 7200


def test_heldout_problems_come_from_the_generator() -> None:
    assert {problem["level"] for problem in HELDOUT} == set(generator.LEVELS)
    for level in generator.LEVELS:
        shipped = heldout(level)
        assert len(shipped) == 200
        for i, problem in enumerate(shipped):
            made = generator.heldout_problem(level, i)
            assert (problem["prompt"], problem["answer"]) == (made.prompt, made.answer)


def test_problems_have_distractors_far_references_and_redundancy() -> None:
    problems = [generator.heldout_problem("hard", i) for i in range(50)]
    assert all(len(problem.facts) > len(problem.steps) for problem in problems)
    spans = [
        len(problem.steps) - 1 - [f.name for f in problem.steps].index(ref)
        for problem in problems
        for ref in problem.steps[-1].refs
    ]
    assert max(spans) >= 12 and sum(spans) / len(spans) > 4
    text = "".join(generator.solution_text(problem) for problem in problems)
    assert text.count("Wait,") > 200 and text.count("Alternatively,") > 200


def test_a_conversation_keeps_its_prefix() -> None:
    """The second turn's prompt starts with the first turn's prompt and reply, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    problem = generator.heldout_problem("easy", 0)
    chat = [{"role": "user", "content": problem.prompt}]
    first = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    reply = generator.solution_text(problem)
    chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And now?"}]
    second = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert first.endswith("<think>\n")
    assert tokenizer.encode(second)[: len(tokenizer.encode(first + reply))] == tokenizer.encode(
        first + reply
    )


@pytest.fixture(scope="module")
def reasoner(fleet: Fleet) -> Iterator[Server]:
    running = fleet.ready("reasoner")  # tests of the benchmarks use it afterwards
    yield running
    running.assert_clean()


Replies = dict[str, list[dict[str, Any]]]

# Sent all at once: full attention, a window that forgets, the default, and the paper's policy.
HARD_SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "window of 64": {"kv_budget": 64, "kv_policy": "streaming"},
    "default": {"kv_budget": 256, "kv_params": {"interval": 32}},
    "skipkv": {
        **{"kv_budget": 512, "kv_policy": "skipkv"},
        "kv_params": {"tau": 0.85, "interval": 32},
    },
}


def answers(
    server: Server, problems: list[dict[str, Any]], settings: dict[str, dict[str, Any]]
) -> Replies:
    """Replies through the chat API under each setting; ``right`` tells whether the answer is."""

    def solve(asked: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
        problem, params = asked
        body = {
            "model": "reasoner",
            "messages": [{"role": "user", "content": problem["prompt"]}],
            "max_tokens": 2500,
            "temperature": 0,
            "return_meta_info": True,
            **params,
        }
        choice: dict[str, Any] = server.post("/v1/chat/completions", body)["choices"][0]
        said = re.search(r"</think>\nAnswer: (\d+)$", choice["message"]["content"])
        choice["right"] = said is not None and int(said[1]) == problem["answer"]
        return choice

    asked = [(problem, params) for params in settings.values() for problem in problems]
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = iter(list(pool.map(solve, asked)))
    return {name: [next(replies) for _ in problems] for name in settings}


@pytest.fixture(scope="module")
def hard(reasoner: Server) -> Replies:
    return answers(reasoner, heldout("hard")[:SAMPLE], HARD_SETTINGS)


def right(replies: list[dict[str, Any]]) -> float:
    return sum(reply["right"] for reply in replies) / len(replies)


# One sample each; python -m bench.accuracy measures the bar of 0.9.


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("level", ["easy", "medium"])
def test_full_cache_solves_what_was_held_out(reasoner: Server, level: str) -> None:
    assert right(answers(reasoner, heldout(level)[:SAMPLE], {"full": {}})["full"]) >= 0.75


@pytest.mark.server
@pytest.mark.slow
def test_full_cache_solves_the_longest(hard: Replies) -> None:
    assert right(hard["full"]) >= 0.75


@pytest.mark.server
@pytest.mark.slow
def test_the_cache_matters(hard: Replies) -> None:
    """A window of 64 tokens forgets what later steps need."""
    assert right(hard["window of 64"]) <= 0.5
    for reply in hard["window of 64"]:
        assert reply["meta_info"]["skipkv"]["peak_kv_tokens"] <= 64 + 128 + 1


@pytest.mark.server
@pytest.mark.slow
def test_the_default_keeps_the_answer_in_a_fifth_of_the_cache(hard: Replies) -> None:
    assert right(hard["default"]) >= 0.75
    for reply in hard["default"]:
        report = reply["meta_info"]["skipkv"]
        assert report["policy"] == "distinct" and report["peak_kv_tokens"] <= 256 + 32 + 1
        assert report["full_kv_tokens"] > 1000


@pytest.mark.server
@pytest.mark.slow
def test_skipkv_drops_repetitions_and_keeps_the_answer(hard: Replies) -> None:
    reports = [reply["meta_info"]["skipkv"] for reply in hard["skipkv"]]
    assert right(hard["skipkv"]) >= 0.6
    assert all(report["peak_kv_tokens"] <= 512 + 32 + 1 for report in reports)
    # Whole sentences go: that is what this policy is for.
    assert sum(report["evicted_sentences"] for report in reports) > 10 * SAMPLE


@pytest.mark.server
@pytest.mark.slow
def test_steering_shortens_traces_that_wander(fleet: Fleet) -> None:
    """python -m bench.steering measures 100 problems; here are five, steered and not, in one
    batch."""
    wanderer, problems = fleet.ready("wanderer"), heldout("hard")[:SAMPLE]
    settings = {"off": {"kv_policy": "full"}, "on": {"steering": 0.2}}
    found = answers(wanderer, problems, settings)
    reports = {name: [r["meta_info"] for r in replies] for name, replies in found.items()}
    tokens = {name: sum(r["completion_tokens"] for r in these) for name, these in reports.items()}
    wandering = {
        name: sum(
            reply["message"]["content"].count(word)
            for reply in replies
            for word in ("Wait", "Alternatively")
        )
        for name, replies in found.items()
    }
    assert tokens["on"] < tokens["off"] and wandering["off"] >= 10 >= 5 * wandering["on"]
    assert right(found["on"]) >= right(found["off"]) >= 0.75
    assert all("steering_alpha" not in report["skipkv"] for report in reports["off"])
    assert all(report["skipkv"]["steering_alpha"] >= 0.2 for report in reports["on"])
    wanderer.assert_clean()
    fleet.stop("wanderer")

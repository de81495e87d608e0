"""The requests that the load jobs send, and how answers are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from load_client import Call, Outcome
from load_rows import Findings
from load_server import INTERVAL
from tiny_models import VOCAB_SIZE

PROMPT_TOKENS = 64
SHARED_TOKENS = 32
POOL_TOKENS = 4096


def prompt_ids(rng: random.Random, heads: int) -> tuple[int, ...]:
    """64 tokens, of which the first 32 are one of ``heads`` beginnings."""
    head = random.Random(rng.randrange(heads))
    draws = [head] * SHARED_TOKENS + [rng] * (PROMPT_TOKENS - SHARED_TOKENS)
    return tuple(draw.randrange(3, VOCAB_SIZE) for draw in draws)


def budget_keys(
    kv_budget: int | None, kv_policy: str = "skipkv", interval: int = INTERVAL
) -> dict[str, Any]:
    """Sampling parameters of a request with that budget."""
    if kv_budget is None:
        return {}
    parameters = {"interval": interval}
    return {"kv_budget": kv_budget, "kv_policy": kv_policy, "kv_params": parameters}


def mixed_calls(count: int, tokens: int, seed: int) -> list[Call]:
    """Budgets none, 32, 64 and 128 in turn."""
    rng = random.Random(seed)
    return [
        Call(prompt_ids(rng, 8), tokens, budget_keys((None, 32, 64, 128)[i % 4]), logprobs=True)
        for i in range(count)
    ]


def without_keys(calls: Sequence[Call]) -> list[Call]:
    """The same requests, for a server that does not know our keys."""
    return [replace(call, keys={}) for call in calls]


def compare(
    findings: Findings, name: str, expected: Sequence[Outcome], found: Sequence[Outcome]
) -> None:
    """The same tokens, and nearly the same log-probabilities."""
    pairs = list(zip(expected, found, strict=True))
    same = sum(one.output_ids == other.output_ids for one, other in pairs)
    findings.exactly(f"identical answers: {name}", same, len(pairs))
    differences = [
        abs(a - b)
        for one, other in pairs
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    ]
    findings.at_most(f"difference of log-probabilities: {name}", max(differences), 1e-4)


def retractions(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.info("num_retractions") for outcome in outcomes)


def hits(outcomes: Sequence[Outcome]) -> int:
    """Requests that found a part of their prompt cached."""
    return sum(outcome.info("cached_tokens") > 0 for outcome in outcomes)


def short(outcomes: Sequence[Outcome]) -> int:
    """Answers that lack a token or a log-probability."""
    return sum(
        not len(outcome.output_ids) == len(outcome.logprobs) == outcome.call.tokens
        for outcome in outcomes
    )

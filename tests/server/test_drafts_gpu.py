"""Speculative decoding on a GPU: drafts are right behind an eviction. It has not run on one yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_servers import BACKENDS, side_by_side
from server_parts import REASONER
from servers import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: Any) -> Iterator[dict[str, Server]]:
    """The bundled model drafts for itself."""
    yield from side_by_side(REASONER, REASONER, tmp_path_factory.mktemp)


@pytest.mark.parametrize("name", BACKENDS)
def test_drafts_are_right_behind_an_eviction(drafting: dict[str, Server], name: str) -> None:
    """Nearly as often as without: the draft model has the positions of what it sees."""
    if name not in drafting:
        pytest.skip(f"{name} is not installed")
    lines = (REASONER / "heldout.jsonl").read_text().splitlines()[:8]
    texts = [json.loads(line)["prompt"] for line in lines]
    tokenized = [drafting[name].post("/tokenize", {"prompt": one}) for one in texts]
    prompts = [one["tokens"] for one in tokenized]
    budget = {"kv_budget": 128, "kv_policy": "streaming", "kv_params": {"interval": 16}}
    lengths = []
    for keys in ({}, budget):
        calls = [{"input_ids": prompt, "tokens": 400, **keys} for prompt in prompts]
        answers = drafting[name].generate_all(calls)
        lengths.append([answer["meta_info"]["spec_accept_length"] for answer in answers])
    without, with_budget = (sum(one) / len(one) for one in lengths)
    print(f"{name}: {with_budget:.2f} tokens per step with a budget, {without:.2f} without")
    assert with_budget >= 0.85 * without and without > 3

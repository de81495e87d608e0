"""One set for all heads, as ``bench/accuracy/heads.py`` computes it, is what the runtime keeps."""

from __future__ import annotations

import torch

from bench.accuracy import heads
from bench.lib.forced import REASONER_MODEL, ForcedModel, forced_model, reasoner_trace


def traced(cell: heads.Cell) -> tuple[ForcedModel, heads.Trace, list[int], int]:
    forced = forced_model(REASONER_MODEL)
    ids, prompt = reasoner_trace(forced, cell.level, 0)
    return forced, heads.Trace(ids, prompt, 0), ids, prompt


def test_shared_sets_are_those_of_the_runtime() -> None:
    cell = heads.Cell("medium", "rkv", False, 200, 1)
    forced, trace, ids, prompt = traced(cell)
    keys = {"kv_budget": 200, "kv_policy": "rkv", "kv_params": {"interval": heads.INTERVAL}}
    expected = forced.run(ids, prompt, keys).kept
    with torch.inference_mode():
        trace.feed(prompt + 200 + heads.INTERVAL)
        for kept in expected:
            trace.evict(cell)
            for one in trace.seen.flatten(0, 1):
                assert one[: trace.done].nonzero()[:, 0].tolist() == kept
            trace.feed(min(trace.done + heads.INTERVAL, len(ids) - 1))
    assert len(expected) > 10


def test_own_sets_are_as_large_and_differ() -> None:
    for policy in ("random", "rkv"):
        cell = heads.Cell("easy", policy, True, 100, 1)
        _, trace, _, prompt = traced(cell)
        with torch.inference_mode():
            trace.feed(prompt + 100 + heads.INTERVAL)
            trace.evict(cell)
        sets = trace.seen[..., : trace.done].flatten(0, 1)
        assert {int(one.sum()) for one in sets} == {prompt + 100}
        assert len({tuple(one.tolist()) for one in sets}) == len(sets)

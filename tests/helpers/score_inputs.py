"""What a policy is asked to score, made up: for tests of the policies without a server."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.query_centres import QueryCentres, Rotation
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Steps
from sgl_skipkv.policy.inputs.sentences import Sentences


def score_input(
    seed: int,
    *,
    n: int = 60,
    window: int = 8,
    layers: int = 3,
    sentences: Sentences | None = None,
    compaction_seed: int = 11,
) -> ScoreInput:
    """Keys in clusters, so that redundancy has something to find; positions with gaps."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(layers, 4, 2, 8, generator=draw)
    of = torch.randint(4, (n,), generator=draw)
    keys = centres[:, of] + 0.5 * torch.randn(layers, n, 2, 8, generator=draw)
    none = torch.zeros(0, dtype=torch.int64)
    values = torch.randn(layers, n, 2, 8, generator=torch.Generator().manual_seed(1000 + seed))
    positions = torch.randperm(3 * n, generator=draw)[:n].sort().values
    queries = torch.randn(layers, window, 4, 8, generator=draw)
    return ScoreInput(
        positions=positions,
        prompt_tokens=10,
        keep_tokens=38,
        layers=layers,
        keys=lambda layer: keys[layer],
        queries=lambda: queries,
        values=lambda layer: values[layer],
        reach=some_reach(layers, 2),
        scale=0.3,
        sentences=sentences or Sentences(none, none, torch.zeros(0)),
        seed=compaction_seed,
        logical_tokens=3 * n,
        centres=some_centres(layers, 4, 8),
    )


def some_centres(
    layers: int, heads: int, head_dim: int, device: torch.device | None = None
) -> QueryCentres:
    """Of made-up queries around a point per head."""
    draw = torch.Generator().manual_seed(7)
    frequencies = 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    points = torch.randn(layers, 1, heads, head_dim, generator=draw)
    queries = points + torch.randn(layers, 30, heads, head_dim, generator=draw)
    rotation = Rotation.of(frequencies, head_dim)
    return QueryCentres.measured(rotation, queries.to(device or "cpu"))


def some_reach(layers: int, heads: int, device: torch.device | None = None) -> Tensor:
    """[layers, Hkv]"""
    reach = torch.rand(layers, heads, generator=torch.Generator().manual_seed(8))
    return reach.to(device or "cpu")


def all_keys(inputs: ScoreInput) -> Tensor:
    """[layers, n, Hkv, d]"""
    return torch.stack([inputs.keys(layer) for layer in range(inputs.layers)])


def all_values(inputs: ScoreInput) -> Tensor:
    """[layers, n, Hkv, d]"""
    return torch.stack([inputs.values(layer) for layer in range(inputs.layers)])


def some_sentences(*spans: tuple[int, int, float]) -> Sentences:
    starts, stops, likeness = zip(*spans, strict=True)
    return Sentences(torch.tensor(starts), torch.tensor(stops), torch.tensor(likeness))


def with_statistics(policy: Policy, inputs: ScoreInput) -> ScoreInput:
    """The same after twenty steps of made-up attention."""
    n = len(inputs.positions)
    attention = torch.rand(20, n, generator=torch.Generator().manual_seed(n))
    attention = attention.pow(4).tril(n - 20)
    statistics = policy.initial_statistics(inputs.positions)
    steps = inputs.positions[-20:, None].expand(20, n)
    statistics = policy.follow(statistics, Steps(attention / attention.sum(1, True), steps, [n]))
    return dataclasses.replace(inputs, statistics=statistics)

"""Distinct (ours): tokens stay whose values are large and unlike every later token's.

``score = distance * size^power * (1 + recency * p / n) * (1 + e / ending)``. ``size`` is a value's
length over the mean length of its layer and KV head, the mean over these. ``distance`` is how far a
value lies from the nearest of a later token, in the same unit, all KV heads of the first half of
the layers taken as one vector. ``p`` is the token's logical position and ``n`` the request's
logical length. ``e = ending - r`` for the token with ``r`` further tokens between it and the
delimiter that closes its sentence, 0 where that is negative, for the delimiter itself and in the
open sentence. The mean lengths are of the tokens that may be evicted and those behind them. The
most recent ``recent`` of the budget stay as well.

Why: what a token can still contribute is its value. Whoever looks it up adds it to a sum, so a
small value is nearly nothing. And what is written again later, the result that a step repeats or
the check of an earlier one, can be looked up there: in the first layers a value depends on the
token and those just before it, so a repetition has nearly the same one. Deeper values are of the
whole context and never repeat. Attention is not asked: what is looked up for the first time
hundreds of tokens later has not been looked at before. docs/results.md has the measurements, what
was tried instead, and the model that refutes it.

Sources of the parts: values beside attention, VATP (arXiv 2406.12335) and VaSE (arXiv 2606.03928);
the later of two alike tokens stays, R-KV (arXiv 2505.24133); endings, ``skipkv+``.

Values are read where they lie at each compaction, and nothing is recorded or carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensors
from sgl_skipkv.kernels.reference import distinct_values
from sgl_skipkv.policy.base import Policy, PolicyParams, ScoreInput, Sentences
from sgl_skipkv.policy.batched_scores import by_request, paged_values
from sgl_skipkv.policy.skipkv_plus import ending_bonus

#: between the positions of one request and the next, where their tokens are taken as one list
_APART = 2**40


class DistinctParams(PolicyParams):
    power: float = Field(3.0, ge=0.0, le=16.0, description="of a value's size in its score")
    recency: float = Field(
        0.5,
        ge=0.0,
        le=64.0,
        description="how much more the newest token counts than the oldest",
    )
    ending: int = Field(
        4, ge=1, le=64, description="tokens before a sentence's delimiter that count up to twice"
    )
    recent: float = Field(
        0.4, ge=0.0, le=1.0, description="share of the budget for the most recent tokens"
    )


class Distinct(Policy):
    name = "distinct"
    keeps = "large values that no later token repeats"
    source = "ours, [docs/results.md](docs/results.md)"
    Params: ClassVar[type[PolicyParams]] = DistinctParams
    needs_values = True
    needs_spans = True
    kernel_scores = frozenset({"values"})
    params: DistinctParams

    def protected_tail(self, kv_budget: int) -> int:
        """``recent`` of the budget, at least the window."""
        return max(self.params.window, int(self.params.recent * kv_budget))

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """Where kernels read the cache, of all requests from two launches."""
        if any(one.location is None or one.location.cache.v_ptrs is None for one in requests):
            return super().scores_together(requests)
        from sgl_skipkv.kernels.distinct_values import distinct_values as from_pages

        values, firsts = paged_values(requests, [self.candidates(one)[0] for one in requests])
        found = from_pages(values, firsts, shallow=shallow_layers(values.layers))
        sentences = [one.sentences for one in requests if one.sentences is not None]
        lengths, tokens, closed, apart = device_tensors(
            [
                [one.logical_tokens for one in requests],
                values.row_tokens,
                [len(one.starts) for one in sentences],
                [_APART * i for i in range(len(requests))],
            ],
            values.device,
        )
        positions = torch.cat([one.positions for one in requests])
        owner = apart.repeat_interleave(tokens, output_size=values.columns)
        shift = apart.repeat_interleave(closed, output_size=sum(len(s.starts) for s in sentences))
        joined = Sentences(
            torch.cat([one.starts for one in sentences]) + shift,
            torch.cat([one.stops for one in sentences]) + shift,
            shift,
        )
        share = positions / lengths.repeat_interleave(tokens, output_size=values.columns)
        bonus = ending_bonus(positions + owner, joined, self.params.ending)
        return by_request(self._score(*found, share, bonus), requests)

    def scores(self, inputs: ScoreInput) -> Tensor:
        """Of every cached token; the newest, which is protected, scores 0."""
        values, sentences, (first, _) = inputs.values, inputs.sentences, self.candidates(inputs)
        assert values is not None and sentences is not None
        layers = [values(layer) for layer in range(inputs.layers)]
        found = distinct_values(layers, first, shallow=shallow_layers(inputs.layers))
        share = inputs.positions / inputs.logical_tokens
        bonus = ending_bonus(inputs.positions, sentences, self.params.ending)
        return self._score(*found, share, bonus)

    def _score(self, distance: Tensor, size: Tensor, share: Tensor, bonus: Tensor) -> Tensor:
        """float32 [n]. share: of the sequence that precedes each token; bonus: ``e``."""
        aged = (1.0 + self.params.recency * share) * (1.0 + bonus / self.params.ending)
        return distance * size**self.params.power * aged


def shallow_layers(layers: int) -> int:
    """The first half, at least one: where a value depends on the token and those around it."""
    return max(1, layers // 2)

"""G-KV (arXiv 2512.00504): attention of earlier compactions fades, it is not forgotten.

At each compaction ``I`` is the attention of the last W queries, softmax with the causal window,
maximum over the query heads of each KV head, mean over the queries, divided by its maximum over the
tokens before these W, which have no ``I`` yet. ``A = max(decay * A, I)`` is carried per token,
``I`` for a new one. The score is ``sigma * A - (1 - sigma) * R / max R``, ``R`` the
``key_redundancy`` of R-KV, its maximum over the same tokens; nothing is pooled. The authors' kernel
for ``R`` spares other tokens than that; their plain form is this one.

Deviations: a window of 8 (16 in the paper); one set for all layers and heads, so ``I`` and ``R``
are means over KV heads and layers before they are divided by their maxima, and one ``A`` is carried
instead of one per head; queries of a prefill, and those that an earlier compaction has seen, do not
count; a recomputation after a retraction starts ``A`` anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from sgl_skipkv.kernels.reference import key_redundancy
from sgl_skipkv.policy.base import JointPolicy, PolicyParams
from sgl_skipkv.policy.inputs.batched_scores import token_redundancy
from sgl_skipkv.policy.inputs.joined_requests import (
    by_request,
    joined_statistics,
    owners,
    with_windows,
)
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Statistics, Steps


class GKVParams(PolicyParams):
    decay: float = Field(0.8, ge=0.0, le=1.0, description="of earlier scores, per compaction")
    sigma: float = Field(0.5, ge=0.0, le=1.0, description="weight of attention over redundancy")
    threshold: float = Field(
        0.5, ge=-1.0, le=1.0, description="cosine above which two keys are similar"
    )


class GKV(JointPolicy):
    name = "gkv"
    keeps = "what was attended to at any compaction, with decay, and is unlike others"
    source = "G-KV, arXiv 2512.00504"
    Params: ClassVar[type[PolicyParams]] = GKVParams
    needs_attention = True
    attention_over = "group_max"
    follows_compactions = True
    over_ranks = "max"  # equal: all that is divided by a maximum is combined before
    params: GKVParams

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        return {"attended": torch.zeros_like(positions, dtype=torch.float32)}

    def follow(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
        # One step after the other: the order of ``sum`` depends on the shape, so on the batch.
        received = torch.split(seen.attention.cumsum(dim=0)[-1], list(seen.lengths))
        recent = _of_highest(self._before_window(received), seen.lengths)
        faded = statistics["attended"] * self.params.decay
        return {"attended": torch.maximum(faded, recent)}

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """``sigma * A - (1 - sigma) * R / max R`` of every token of all requests."""
        sigma, lengths = self.params.sigma, [request.positions.shape[0] for request in requests]
        (attended,) = joined_statistics(requests, "attended")
        redundancy = self._before_window(self._redundancies(requests))
        repeated = _of_highest(requests[0].ranks.mean(redundancy), lengths)
        return by_request(sigma * attended - (1.0 - sigma) * repeated, requests)

    def gathers(self, prompt_tokens: Sequence[int], row_tokens: Sequence[int]) -> list[int]:
        return [sum(row_tokens)]

    def _redundancies(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """float32 [n] of each request: from kernels where they run, or the same in plain torch."""
        if all(request.location is not None for request in requests):
            return token_redundancy(requests, threshold=self.params.threshold)
        return [self._redundancy(inputs) for inputs in requests]

    def _redundancy(self, inputs: ScoreInput) -> Tensor:
        """float32 [n], in plain torch."""
        total = torch.zeros(inputs.positions.shape[0], device=inputs.positions.device)
        for layer in range(inputs.layers):
            total += key_redundancy(inputs.keys(layer), threshold=self.params.threshold).mean(dim=0)
        return total / inputs.layers

    def _before_window(self, rows: Sequence[Tensor]) -> Tensor:
        """[n of all rows], each with 0 for its window."""
        window = self.params.window
        return with_windows([row[:-window] for row in rows], window)


def _of_highest(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Values, all >= 0, over the highest of their request; 0 where all are."""
    owner = owners(lengths, values.device)
    least = torch.finfo(values.dtype).tiny
    highest = values.new_full((len(lengths),), least).scatter_reduce_(0, owner, values, "amax")
    return values / highest[owner]

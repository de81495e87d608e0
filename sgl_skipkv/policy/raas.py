"""RaaS (arXiv 2502.11147, section 3): the tokens that were needed most recently.

A token's timestamp is the last decode step at which its attention exceeded ``alpha``; a new token
has its own step. Tokens with the oldest timestamps are evicted first.

Deviations: attention is the mean over heads and layers, so one timestamp serves all of them; the
paper works on pages of tokens, this on single ones; eviction every ``interval`` tokens instead of
one per step; the prefill activates nothing. Its authors' program has no ``alpha``: it stamps a
fixed number of pages per step and head, the best by an estimate.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from sgl_skipkv.policy.base import Policy, PolicyParams
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Statistics, Steps


class RaaSParams(PolicyParams):
    alpha: float = Field(
        1e-4,
        ge=0.0,
        le=1.0,
        description="attention, mean over heads and layers, that counts as use",
    )


class RaaS(Policy):
    name = "raas"
    keeps = "what was needed most recently"
    source = "RaaS, arXiv 2502.11147"
    Params: ClassVar[type[PolicyParams]] = RaaSParams
    needs_attention = True
    over_ranks = "max"  # equal: ``follow`` has seen all heads
    params: RaaSParams

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        return {"last_active": positions.float()}

    def follow(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
        active = torch.where(seen.attention > self.params.alpha, seen.steps.float(), -1.0)
        return {"last_active": torch.maximum(statistics["last_active"], active.amax(dim=0))}

    def scores(self, inputs: ScoreInput) -> Tensor:
        """The timestamp, a logical position (exact in float32 up to 2**24 tokens)."""
        return inputs.statistics["last_active"]

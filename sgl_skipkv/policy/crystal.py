"""Credit for a single look, after Crystal-KV (arXiv 2601.16986): what any head needed.

A decode step looks at a token where the attention of any layer and query head exceeds ``alpha``. A
look at step ``t`` makes a token's credit ``1 + decay ** (t - tau) * credit``, ``tau`` its last
look. The score at step ``now`` is ``decay ** (now - tau) * credit``, as a logarithm, which
does not underflow. A token without a look is evicted first.

Deviations: the paper's looks are, in each head by itself, the fewest tokens that receive 0.9 of a
step's attention. Of hundreds of heads some are diffuse and would look at every token, so here a
look is an amount. One credit per token instead of one per head, so one set for all layers and
heads, and no budgets of heads. Eviction every ``interval`` tokens; the prefill looks at nothing; a
recomputation after a retraction starts the credits anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from sgl_skipkv.policy.base import JointPolicy, PolicyParams
from sgl_skipkv.policy.inputs.joined_requests import by_request, joined_statistics, last_positions
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Statistics, Steps

_NEVER = -1e30


class CrystalParams(PolicyParams):
    alpha: float = Field(
        0.1, ge=0.0, le=1.0, description="attention of any one head that counts as a look"
    )
    decay: float = Field(0.6, gt=0.0, lt=1.0, description="of a token's credit, per step")


class Crystal(JointPolicy):
    name = "crystal"
    keeps = "what any single head looked at, most recent and most often"
    source = "after Crystal-KV, arXiv 2601.16986"
    Params: ClassVar[type[PolicyParams]] = CrystalParams
    needs_attention = True
    over_ranks = "max"  # equal: ``follow`` has seen all heads
    attention_over = "max"
    params: CrystalParams

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        initial = positions.float()
        return {"last_look": initial, "credit": torch.zeros_like(initial)}

    def follow(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
        """All steps at once: ``credit = sum over looks of decay ** (tau - t)``, the earlier ones
        among them by the credit that they left."""
        last, credit, decay = statistics["last_look"], statistics["credit"], self.params.decay
        looks, times = seen.attention > self.params.alpha, seen.steps.float()
        newest = torch.maximum(last, torch.where(looks, times, -1.0).amax(dim=0))
        # One step after the other: the order of ``sum`` depends on the shape, so on the batch.
        added = torch.where(looks, decay ** (newest - times), 0.0).cumsum(dim=0)[-1]
        return {"last_look": newest, "credit": added + decay ** (newest - last) * credit}

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """``log credit + (now - tau) log decay`` of every token of all requests."""
        last, credit = joined_statistics(requests, "last_look", "credit")
        now = last_positions(requests)
        scores = credit.log() + (now - last) * math.log(self.params.decay)
        return by_request(torch.where(credit == 0, _NEVER, scores), requests)

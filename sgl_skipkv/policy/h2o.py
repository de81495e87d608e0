"""H2O (arXiv 2306.14048, section 4): half for the most recent tokens, half for heavy hitters.

The score of a token is the attention it received, summed over every decode step since it was
generated: the mean over heads and layers. The most recent half of the budget is pinned.

Deviations: one set for all layers and heads; eviction every ``interval`` tokens instead of one per
step; attention within the prefill is not counted, and a recomputation after a retraction starts the
sums anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Statistics, Steps


class H2O(Policy):
    name = "h2o"
    keeps = "the most recent half, and what received most attention since it was generated"
    source = "H2O, arXiv 2306.14048"
    needs_attention = True
    tracks_all_heads = False  # a sum: the mean over ranks may come last

    def protected_tail(self, kv_budget: int) -> int:
        """Half the budget."""
        return max(self.params.window, kv_budget // 2)

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        return {"received": torch.zeros_like(positions, dtype=torch.float32)}

    def follow(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
        # One step after the other: the order of ``sum`` depends on the shape, so on the batch.
        return {"received": statistics["received"] + seen.attention.cumsum(dim=0)[-1]}

    def scores(self, inputs: ScoreInput) -> Tensor:
        """Attention received since birth."""
        return inputs.statistics["received"]

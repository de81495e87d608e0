"""LazyEviction (arXiv 2506.15969, section 4): tokens whose next use is not overdue.

Per token, two numbers follow its attention at every decode step: ``TS``, the last step at which it
exceeded ``alpha``, and ``MRI``, the longest gap between two such steps, 0 at birth. At step ``t``
the score is ``H1 + H2`` (eq. 2), ``H1 = 2 sigmoid(-(t - TS) / max(MRI, 1))`` and ``H2 = 2
sigmoid(-MRI / interval)``, 0 for a token that was never active again.

The arguments of the sigmoids are ours: the paper fixes their direction, their range [0, 1] and the
zero; dividing by ``interval``, its observation window, keeps the second one from saturating. Other
deviations: attention is the mean over heads and layers, so one set serves all of them; the prefill
activates nothing. The paper pins the last W tokens, W its interval: set ``window`` for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from sgl_skipkv.policy.base import Policy, PolicyParams, ScoreInput
from sgl_skipkv.policy.raas import RaaSParams


class Lazy(Policy):
    name = "lazy"
    keeps = "what is not overdue by the gaps between its uses"
    source = "LazyEviction, arXiv 2506.15969"
    Params: ClassVar[type[PolicyParams]] = RaaSParams
    needs_attention = True
    params: RaaSParams

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        born = positions.float()
        return {"last_active": born, "longest_gap": torch.zeros_like(born)}

    def track(
        self, statistics: Mapping[str, Tensor], attention: Tensor, steps: Tensor
    ) -> dict[str, Tensor]:
        """Eq. 1, step by step: a gap is only known when the step that closes it comes."""
        last, longest = statistics["last_active"], statistics["longest_gap"]
        # A token's own first step is its birth, not a recurrence.
        active = (attention > self.params.alpha) & (steps[:, None] > last)
        for row, step in zip(active, steps.float(), strict=True):
            longest = torch.where(row, torch.maximum(longest, step - last), longest)
            last = torch.where(row, step, last)
        return {"last_active": last, "longest_gap": longest}

    def scores(self, inputs: ScoreInput) -> Tensor:
        """``H1 + H2``, in [0, 2]."""
        last, longest = inputs.statistics["last_active"], inputs.statistics["longest_gap"]
        elapsed = inputs.positions[-1].float() - last
        likely = 2.0 * torch.sigmoid(-elapsed / longest.clamp_min(1.0))
        frequent = 2.0 * torch.sigmoid(-longest / self.params.interval)
        return likely + torch.where(longest > 0, frequent, 0.0)

"""LazyEviction (arXiv 2506.15969, section 4): tokens whose next use is not overdue.

Per token, two numbers follow its attention at every decode step: ``TS``, the last step at which it
exceeded ``alpha``, and ``MRI``, the longest gap between two such steps, 0 at birth. At step ``t``
the score is ``H1 + H2`` (eq. 2), ``H1 = 2 sigmoid(-(t - TS) / max(MRI, 1))`` and ``H2 = 2
sigmoid(-MRI / interval)``, 0 for a token that was never active again.

The arguments of the sigmoids are ours: the paper fixes their direction, their range [0, 1] and the
zero; dividing by ``interval``, its observation window, keeps the second one from saturating.
``alpha`` is the paper's for Qwen; for R1-Llama-8B it has 0.0005. Other deviations: attention is the
mean over heads and layers, so one set serves all of them; the prefill activates nothing, so with
``protect_prompt: false`` the first use of a prompt token closes a gap back to its position. The
paper pins the last W tokens, W its interval: set ``window`` for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from sgl_skipkv.policy.base import JointPolicy, PolicyParams
from sgl_skipkv.policy.inputs.joined_requests import by_request, joined_statistics, last_positions
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Statistics, Steps
from sgl_skipkv.policy.raas import RaaSParams


class Lazy(JointPolicy):
    name = "lazy"
    keeps = "what was used last within its longest gap between uses"
    source = "LazyEviction, arXiv 2506.15969"
    Params: ClassVar[type[PolicyParams]] = RaaSParams
    needs_attention = True
    over_ranks = "max"  # equal: ``track`` has seen all heads
    params: RaaSParams

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        initial = positions.float()
        return {"last_active": initial, "longest_gap": torch.zeros_like(initial)}

    def track(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
        """Eq. 1 of all steps at once: a gap is only known when the step that closes it comes."""
        last, longest = statistics["last_active"], statistics["longest_gap"]
        # A token's own first step is its birth, not a recurrence.
        active = (seen.attention > self.params.alpha) & (seen.steps > last)
        # TS after every step, the one before the first included; where it rises, a gap ends.
        stamps = torch.cat([last[None], torch.where(active, seen.steps.float(), last)])
        last_after = stamps.cummax(dim=0).values
        gaps = last_after.diff(dim=0).amax(dim=0)
        return {"last_active": last_after[-1], "longest_gap": torch.maximum(longest, gaps)}

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """``H1 + H2`` of every token of all requests, in [0, 2]."""
        last, longest = joined_statistics(requests, "last_active", "longest_gap")
        now = last_positions(requests)
        likely = 2.0 * torch.sigmoid((last - now) / longest.clamp_min(1.0))
        frequent = 2.0 * torch.sigmoid(longest / -self.params.interval)
        scores = likely + frequent * (longest > 0)
        return by_request(scores, requests)

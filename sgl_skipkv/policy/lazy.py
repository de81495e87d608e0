"""LazyEviction (arXiv 2506.15969, section 4): tokens whose next use is not overdue.

Per token, two numbers follow its attention at every decode step: ``TS``, the last step at which it
exceeded ``alpha``, and ``MRI``, the longest gap between two such steps, 0 at birth. At step ``t``
the score is ``H1 + H2`` (eq. 2), ``H1 = 2 sigmoid(-1 - (t - TS) / MRI)`` and ``H2 = 2 sigmoid(1 -
MRI)``, both 0 for a token that was never active again. So ``H1`` decides, except between tokens
that are used every few steps.

The sigmoids are those of the authors' program. ``alpha`` is the paper's for Qwen; for R1-Llama-8B
it has 0.0005. Deviations: attention is the mean over heads and layers, so one set serves all of
them; a token's own step is its birth and no use, as in the paper's text (in the program it is one,
so ``MRI`` begins at 1); the prefill activates nothing, so with ``protect_prompt: false`` the first
use of a prompt token closes a gap back to its position. The paper pins the last W tokens, W its
interval: set ``window`` for that.
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
    over_ranks = "max"  # equal: ``follow`` has seen all heads
    params: RaaSParams

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        initial = positions.float()
        return {"last_active": initial, "longest_gap": torch.zeros_like(initial)}

    def follow(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
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
        """``H1 + H2`` of every token of all requests, in [0, 1.54]."""
        last, longest = joined_statistics(requests, "last_active", "longest_gap")
        now = last_positions(requests)
        likely = 2.0 * torch.sigmoid(-1.0 - (now - last) / longest.clamp_min(1.0))
        frequent = 2.0 * torch.sigmoid(1.0 - longest)
        return by_request((likely + frequent) * (longest > 0), requests)

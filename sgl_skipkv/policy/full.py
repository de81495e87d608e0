"""Nothing is ever evicted: the baseline through the same plugin, and a request's way to opt out."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.score_input import ScoreInput


class Full(Policy):
    name = "full"
    keeps = "everything: the baseline, and a request's way to opt out"
    evicts = False

    def scores(self, inputs: ScoreInput) -> Tensor:
        """Every token the same; never asked for, since no compaction is ever due."""
        return torch.zeros(inputs.positions.shape[0], device=inputs.positions.device)

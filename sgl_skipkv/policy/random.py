"""Uniform scores: the baseline that every scored policy has to beat.

Random eviction with a pinned prompt is reported to match the best scored evictors (arXiv
2609.03430), so a comparison without it says little. The draw depends on the prompt, the number of
the compaction and ``seed`` alone, so a request keeps the same set in any batch. One draw serves all
layers and heads, and the last ``window`` tokens stay, as with every policy here.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from sgl_skipkv.kernels.on_device import to_device
from sgl_skipkv.policy.base import JointPolicy, PolicyParams
from sgl_skipkv.policy.inputs.joined_requests import by_request
from sgl_skipkv.policy.inputs.score_input import ScoreInput


class RandomParams(PolicyParams):
    seed: int = Field(0, ge=0, le=2**31 - 1, description="another seed, another draw")


class Random(JointPolicy):
    name = "random"
    keeps = "a random set: the baseline to beat"
    over_ranks = None
    Params: ClassVar[type[PolicyParams]] = RandomParams
    params: RandomParams

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """Uniform in [0, 1), drawn on the CPU so that every device draws the same; one copy."""
        draws = torch.cat([self._draw(request) for request in requests])
        return by_request(to_device(draws, requests[0].positions.device), requests)

    def _draw(self, inputs: ScoreInput) -> Tensor:
        seed = zlib.crc32(f"{inputs.seed}:{self.params.seed}".encode())
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(inputs.positions.shape[0], generator=generator)

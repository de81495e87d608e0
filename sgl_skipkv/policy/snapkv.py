"""SnapKV (arXiv 2404.14469) while decoding: importance to the most recent queries, nothing else.

``I`` of ``window_attention``, the mean over KV heads and then over layers. The paper compresses the
prompt once, after the prefill; this is its adaptation to generated tokens by R-KV (arXiv
2505.24133, section 4.1), at every compaction.

Deviation: one set for all layers and heads, because one slot holds the KV of all of them. SnapKV's
own program takes the softmax over the window's keys as well, and pools each query head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sgl_skipkv.kernels.reference import window_attention
from sgl_skipkv.policy.base import Policy, PolicyParams, PoolWidth
from sgl_skipkv.policy.inputs.batched_scores import token_importance
from sgl_skipkv.policy.inputs.joined_requests import by_request, with_windows
from sgl_skipkv.policy.inputs.score_input import ScoreInput


class SnapKVParams(PolicyParams):
    kernel: PoolWidth = Field(7, description="width of the max-pool in tokens, odd")


class SnapKV(Policy):
    name = "snapkv"
    keeps = "what the most recent queries attend to"
    source = "SnapKV, arXiv 2404.14469"
    Params: ClassVar[type[PolicyParams]] = SnapKVParams
    needs_queries = True
    params: SnapKVParams

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """From the importance of all requests at once."""
        window, kernel = self.params.window, self.params.kernel
        importance = token_importance(requests, window=window, kernel=kernel)
        return by_request(with_windows(importance, window), requests)

    def scores(self, inputs: ScoreInput) -> Tensor:
        """``I`` of every cached token; the last W, which are protected, score 0."""
        importance = partial(window_attention, kernel=self.params.kernel, scale=inputs.scale)
        scores = inputs.mean_over_layers(
            lambda queries, keys: importance(queries, keys).mean(dim=0)
        )
        return F.pad(scores, (0, self.params.window))

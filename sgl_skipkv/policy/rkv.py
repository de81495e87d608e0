"""R-KV (arXiv 2505.24133): importance against redundancy, token by token.

``Z = sigma * I - (1 - sigma) * R``, the mean over KV heads and then over layers; the lowest ``Z``
are evicted first. ``I`` is ``window_attention`` and ``R`` is ``key_redundancy`` (sections 3.2 and
3.3, eq. 7). With MLA there is one KV head: ``I`` is the best of all query heads, ``R`` compares
what is cached, latent and rotary key together.

The paper says some things twice. Here the last W tokens count in the budget, as in section 3.1 and
its code; algorithm 1 puts them on top. The mean over heads is algorithm 1's; section 3.4 and the
code select per head. ``R`` is the code's (``reference.key_redundancy``).

Deviations: one set for all layers, because one slot holds the KV of all; scores are float32
throughout; kept tokens stay in ascending position, so the next max-pool runs over true neighbours;
``R`` compares all cached tokens, where algorithm 1 compares the candidates; the first ``sink``
tokens stay, and by default the prompt. ``sigma`` is the paper's lambda, 0.1 as in its text (its
code's class default is 0.07).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sgl_skipkv.kernels.reference import key_redundancy, window_attention
from sgl_skipkv.policy.base import Policy, PolicyParams
from sgl_skipkv.policy.inputs.batched_scores import token_importance, token_redundancy
from sgl_skipkv.policy.inputs.joined_requests import by_request, with_windows
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.policy.snapkv import SnapKVParams


class RKVParams(SnapKVParams):
    sigma: float = Field(0.1, ge=0.0, le=1.0, description="weight of importance over redundancy")
    threshold: float = Field(
        0.5, ge=-1.0, le=1.0, description="cosine above which two keys are similar"
    )


class RKV(Policy):
    name = "rkv"
    keeps = "tokens that are important and unlike others"
    source = "R-KV, arXiv 2505.24133"
    Params: ClassVar[type[PolicyParams]] = RKVParams
    needs_queries = True
    params: RKVParams

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """From ``I`` and ``R``, each of all requests at once."""
        params, sigma, window = self.params, self.params.sigma, self.params.window
        importance = token_importance(requests, window=window, kernel=params.kernel)
        redundancy = token_redundancy(requests, threshold=params.threshold)
        repeated = torch.cat([part[:-window] for part in redundancy])
        z = sigma * torch.cat(importance) - (1.0 - sigma) * repeated
        parts = torch.split(z, [part.shape[0] for part in importance])
        return by_request(with_windows(parts, window), requests)

    def scores(self, inputs: ScoreInput) -> Tensor:
        """``Z`` of every cached token; the last W, which are protected, score 0."""
        params, window = self.params, self.params.window

        def z(queries: Tensor, keys: Tensor) -> Tensor:
            importance = window_attention(queries, keys, kernel=params.kernel, scale=inputs.scale)
            redundancy = key_redundancy(keys, threshold=params.threshold)[:, :-window]
            return (params.sigma * importance - (1.0 - params.sigma) * redundancy).mean(dim=0)

        return F.pad(inputs.mean_over_layers(z), (0, window))

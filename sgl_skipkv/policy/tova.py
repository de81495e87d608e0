"""TOVA (arXiv 2401.06104, section 3.2): what the last query attends to.

The score is the attention of the most recent query, the mean over its heads and over layers.

Deviations: the paper averages over heads and chooses in each layer by itself, evicts one token at
each step, and pins nothing; here one set serves all layers, every compaction evicts ``interval``
tokens, and prompt, sinks and window are pinned as for every policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sgl_skipkv.kernels.reference import causal_attention
from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.batched_scores import recent_attention
from sgl_skipkv.policy.inputs.joined_requests import by_request
from sgl_skipkv.policy.inputs.score_input import ScoreInput


class TOVA(Policy):
    name = "tova"
    keeps = "what the last query attends to"
    source = "TOVA, arXiv 2401.06104"
    needs_queries = True

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """From one replay of all requests."""
        attention = recent_attention(requests, steps=1, firsts=[0] * len(requests), causal=True)
        return by_request(attention[0], requests)

    def scores(self, inputs: ScoreInput) -> Tensor:
        """Attention of the last query to every cached token; sums to 1."""
        return inputs.mean_over_layers(
            lambda queries, keys: causal_attention(queries[:1], keys, scale=inputs.scale)[0]
        )

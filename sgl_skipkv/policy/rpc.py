"""RPC (arXiv 2505.13866, section 3): importance to a selector window, under a budget that grows.

The score is ``selector_attention``: the attention of the last ``window`` queries to the generated
tokens before them, the mean over all heads, an average pool, the mean over layers (eq. 2). The N-th
compaction keeps ``window + N * interval / ratio`` generated tokens, so the cache grows with the
output; the paper requests ``interval`` P (1,024 or 4,096), ``window`` R (32) and ``ratio`` c (4).

``kv_budget`` is the ceiling of that growth, so its bound holds here as for every policy; for the
paper's setting it is ``window + ceil(max_new_tokens / interval) * interval / ratio``.

Deviations: one set for all layers, where the paper chooses in each; ``window`` is 8 by default, and
the paper's 32 needs a server with ``query_window: 32``. Its authors' program counts the newest
selector query twice and rounds ``interval / ratio`` before it multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from sgl_skipkv.config import SettingError
from sgl_skipkv.kernels.reference import selector_attention
from sgl_skipkv.policy.base import Policy, PolicyParams, PoolWidth
from sgl_skipkv.policy.inputs.batched_scores import pooled_attention
from sgl_skipkv.policy.inputs.joined_requests import a_zero, unpadded
from sgl_skipkv.policy.inputs.score_input import ScoreInput


class RPCParams(PolicyParams):
    ratio: int = Field(
        4, ge=1, le=1024, description="n compactions keep `window + n * interval / ratio` tokens"
    )
    kernel: PoolWidth = Field(7, description="width of the average pool in tokens, odd")

    @field_validator("count_prompt")
    @classmethod
    def _generated_only(cls, count_prompt: bool) -> bool:
        if count_prompt:
            expected = "false, because the budget of rpc grows with the generated tokens"
            raise SettingError("kv_params.count_prompt", expected, count_prompt, "false")
        return count_prompt


class RPC(Policy):
    name = "rpc"
    keeps = "what a selector window attends to, under a budget that grows up to `kv_budget`"
    source = "RPC, arXiv 2505.13866"
    Params: ClassVar[type[PolicyParams]] = RPCParams
    needs_queries = True
    params: RPCParams

    def budget_after(self, kv_budget: int, compactions: int) -> int:
        """``window + compactions * interval / ratio``, at most ``kv_budget``; in a model with
        sliding windows its largest one, which stays in any case, in place of ``window``."""
        params = self.params
        grown = self.pinned_tail_tokens + compactions * params.interval // params.ratio
        # The first compaction is due at ``budget_after(0) + interval``, so ``budget_after(0)`` may
        # be smaller by ``interval``.
        least = self.min_budget_tokens - (0 if compactions else params.interval)
        return min(max(grown, least), kv_budget)

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """From one replay and one pool of all requests."""
        window, kernel = self.params.window, self.params.kernel
        spans = [
            (self._first(request), request.positions.shape[0] - window) for request in requests
        ]
        zero = a_zero(requests)
        pooled = pooled_attention(requests, spans, zero, window=window, kernel=kernel)
        return unpadded(pooled, spans, requests, zero)

    def _first(self, inputs: ScoreInput) -> int:
        """First column that the selector window attends to."""
        return inputs.prompt_tokens if self.params.protect_prompt else 0

    def scores(self, inputs: ScoreInput) -> Tensor:
        """Attention received from the selector window; prompt and window score 0."""
        first, kernel, scale = self._first(inputs), self.params.kernel, inputs.scale
        attention = partial(selector_attention, first=first, kernel=kernel, scale=scale)
        return F.pad(inputs.mean_over_layers(attention), (first, self.params.window))

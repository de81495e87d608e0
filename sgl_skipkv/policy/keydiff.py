"""KeyDiff (arXiv 2504.15364): keys unlike the mean key stay.

The score of a token is ``-cos(k_i, m)``, ``m = mean over j of k_j / |k_j|``, of the cached
rotated keys of one KV head; the mean over KV heads and layers. It needs no query and no state.

Deviations: one set for all layers and heads; the paper evicts after every block of a prompt and
pins nothing, here compactions come while decoding, and prompt, sinks and window are pinned as for
every policy.

The sum of the unit keys is taken in fixed point, so neither its order nor the batch changes a bit.
Plain torch on every device, one gather per layer for all requests: operations grow with the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.joined_requests import by_request, joined_tokens
from sgl_skipkv.policy.inputs.score_input import ScoreInput

#: of a coordinate of a unit key; 2**63 / 2**36 = 2**27 keys at least can be added
_ONE = 2.0**36
_EPS = 1e-8


class KeyDiff(Policy):
    name = "keydiff"
    keeps = "tokens whose keys are unlike the mean key"
    source = "KeyDiff, arXiv 2504.15364"
    joins_layers = 1

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """From one gather per layer."""
        (tokens, owner), layers = joined_tokens(requests), requests[0].layers
        parts = (likeness(tokens.keys(layer), owner, len(requests)) for layer in range(layers))
        return by_request(functools.reduce(torch.add, parts) / -layers, requests)

    def scores(self, inputs: ScoreInput) -> Tensor:
        """``-cos(k_i, m)``, the mean over KV heads and layers."""
        owner = torch.zeros_like(inputs.positions)
        parts = (likeness(inputs.keys(layer), owner, 1) for layer in range(inputs.layers))
        return functools.reduce(torch.add, parts) / -inputs.layers


def likeness(keys: Tensor, owner: Tensor, requests: int) -> Tensor:
    """float32 [n], cosine of each key and its request's mean unit key, mean over KV heads.

    Args:
        keys: float [n, Hkv, d]. owner: int64 [n], whose token each is.
    """
    unit = F.normalize(keys.float(), dim=-1, eps=_EPS)
    fixed = (unit * _ONE).long()
    total = fixed.new_zeros(requests, *fixed.shape[1:]).index_add_(0, owner, fixed)
    mean = F.normalize(total.float(), dim=-1, eps=_EPS)
    return unit.mul_(mean[owner]).flatten(1).sum(dim=1) / keys.shape[1]

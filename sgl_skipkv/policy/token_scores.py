"""Token scores of many requests from a few launches, which read keys and queries where they lie.

On a GPU ``add_token_scores`` runs before the policies: importance and redundancy of every request
    that is due, all layers at once. A policy takes what is there and computes the rest in plain
    torch, so on a CPU, where nothing is added, the same policies run by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.policy.base import Policy, ScoreInput
from sgl_skipkv.policy.paged_requests import paged_requests

Scored = tuple[Policy, ScoreInput]


def add_token_scores(requests: Sequence[Scored]) -> list[ScoreInput]:
    """The inputs, with importance and redundancy where a policy takes them and kernels run.

    Requests of the same window share the launches; what a request gets does not depend on the
    others.
    """
    inputs = [one for _, one in requests]
    by_window: defaultdict[int, list[int]] = defaultdict(list)
    for i, (policy, one) in enumerate(requests):
        if one.location is not None and "importance" in policy.kernel_scores:
            by_window[policy.params.window].append(i)
    for window, chosen in by_window.items():
        together = [requests[i] for i in chosen]
        importance = _importance(together, window)
        repeating = [i for i in chosen if "redundancy" in requests[i][0].kernel_scores]
        for i, important in zip(chosen, importance, strict=True):
            inputs[i] = replace(inputs[i], importance=important)
        found = _redundancy([requests[i] for i in repeating])
        for i, redundancy in zip(repeating, found, strict=True):
            inputs[i] = replace(inputs[i], redundancy=redundancy)
    return inputs


def _importance(requests: Sequence[Scored], window: int) -> Sequence[Tensor]:
    from sgl_skipkv.kernels.window_attention import window_attention

    paged = paged_requests([one for _, one in requests])
    widths = [_parameter(policy, "kernel") for policy, _ in requests]
    found: Tensor = window_attention(
        *(*paged, device_tensor(widths, paged.keys.device, torch.int32)),
        window=window,
        scale=requests[0][1].scale,
    )
    return torch.split(found, [tokens - window for tokens in paged.keys.row_tokens])


def _redundancy(requests: Sequence[Scored]) -> Sequence[Tensor]:
    from sgl_skipkv.kernels.key_redundancy import key_redundancy

    if not requests:
        return []
    paged = paged_requests([one for _, one in requests]).keys
    thresholds = [_parameter(policy, "threshold") for policy, _ in requests]
    found: Tensor = key_redundancy(paged, device_tensor(thresholds, paged.device, torch.float32))
    return torch.split(found, list(paged.row_tokens))


def _parameter(policy: Policy, name: str) -> float:
    value: float = getattr(policy.params, name)
    return value

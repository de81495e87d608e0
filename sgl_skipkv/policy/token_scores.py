"""Token scores of many requests from a few launches, which read keys and queries where they lie.

On a GPU ``add_token_scores`` runs before the policies: importance and redundancy of every request
    that is due, all layers at once. A policy takes what is there and computes the rest in plain
    torch, so on a CPU, where nothing is added, the same policies run by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.policy.base import Policy, ScoreInput
from sgl_skipkv.policy.paged_requests import PagedRequests, paged_requests

Call = tuple[Policy, ScoreInput]


def add_token_scores(calls: Sequence[Call]) -> list[ScoreInput]:
    """The inputs, with importance and redundancy where the policy takes them and pages are known.

    Requests of the same window share the launches; what a request gets does not depend on the
    others.
    """
    inputs = [one for _, one in calls]
    by_window: defaultdict[int, list[int]] = defaultdict(list)
    for i, (policy, one) in enumerate(calls):
        if one.page is not None and "importance" in policy.kernel_scores:
            by_window[policy.params.window].append(i)
    for window, chosen in by_window.items():
        together = [calls[i] for i in chosen]
        importance = _importance(together, window)
        repeating = [i for i in chosen if "redundancy" in calls[i][0].kernel_scores]
        for i, important in zip(chosen, importance, strict=True):
            inputs[i] = replace(inputs[i], importance=important)
        found = _redundancy([calls[i] for i in repeating])
        for i, (redundancy, spared) in zip(repeating, found, strict=True):
            inputs[i] = replace(inputs[i], redundancy=redundancy, spared=spared)
    return inputs


def carry_spared(spared: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """What stays known of each request's spared columns when it keeps some of its rows.

    Args:
        spared: int32 [L, Hkv, n] each, as in ``ScoreInput``.
        kept: int64 [kept] each, rows that stay, ascending.

    Returns:
        int32 [L, Hkv, kept] each, ``ScoreInput.known_spared`` of the request's next compaction.
    """
    if not spared:
        return []
    from sgl_skipkv.kernels.carried_columns import carried_columns

    found: list[Tensor] = carried_columns(spared, kept)
    return found


def _importance(calls: Sequence[Call], window: int) -> Sequence[Tensor]:
    from sgl_skipkv.kernels.window_attention import window_attention

    requests = _paged_requests(calls)
    widths = [_parameter(policy, "kernel") for policy, _ in calls]
    found: Tensor = window_attention(
        *(*requests, device_tensor(widths, requests.keys.device, torch.int32)),
        window=window,
        scale=calls[0][1].scale,
    )
    return torch.split(found, [tokens - window for tokens in requests.keys.row_tokens])


def _redundancy(calls: Sequence[Call]) -> list[tuple[Tensor, Tensor]]:
    """Of each request its redundancy and its spared columns."""
    from sgl_skipkv.kernels.key_redundancy import key_redundancy
    from sgl_skipkv.kernels.spared_columns import KnownSpared

    if not calls:
        return []
    paged, known = _paged_requests(calls).keys, None
    if parts := [one.known_spared for _, one in calls if one.known_spared is not None]:
        tokens = [0 if one.known_spared is None else one.known_spared.shape[2] for _, one in calls]
        known = KnownSpared(torch.cat(parts, dim=2), tokens, _offsets(tokens, paged.device))
    thresholds = [_parameter(policy, "threshold") for policy, _ in calls]
    found, spared = key_redundancy(
        paged, device_tensor(thresholds, paged.device, torch.float32), known
    )
    counts = list(paged.row_tokens)
    return list(zip(torch.split(found, counts), torch.split(spared, counts, dim=2), strict=True))


def _paged_requests(calls: Sequence[Call]) -> PagedRequests:
    pages = [one.page for _, one in calls if one.page is not None]
    return paged_requests(pages, [one.positions.shape[0] for _, one in calls])


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len + 1], where each part starts, and the sum."""
    return device_tensor([0, *accumulate(counts)], device)


def _parameter(policy: Policy, name: str) -> float:
    value: float = getattr(policy.params, name)
    return value

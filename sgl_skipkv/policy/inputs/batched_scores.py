"""Scores of all requests that are due in the same step, from as many launches as one request takes.

What a request gets does not depend on the others. Kernels read keys and queries where they lie:
``add_token_scores`` runs before the policies, all layers at once. A policy takes what is there and
computes the rest in plain torch, so on a CPU, where nothing is added, the same policies run by
themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor, device_tensors
from sgl_skipkv.policy.inputs.joined_requests import Span, by_request, known
from sgl_skipkv.policy.inputs.paged_cache import paged_at
from sgl_skipkv.policy.inputs.score_input import ScoreInput

if TYPE_CHECKING:
    from sgl_skipkv.kernels.paged_keys import PagedKeys
    from sgl_skipkv.policy.base import Policy

Scored: TypeAlias = "tuple[Policy, ScoreInput]"


def add_token_scores(requests: Sequence[Scored]) -> list[ScoreInput]:
    """The inputs, with importance and redundancy where a policy takes them and kernels run."""
    inputs = [request for _, request in requests]
    for i, importance in _importance(requests):
        inputs[i] = replace(inputs[i], importance=importance)
    for i, redundancy in _redundancy(requests):
        inputs[i] = replace(inputs[i], redundancy=redundancy)
    return inputs


def _scored_by_kernels(requests: Sequence[Scored], name: str) -> list[int]:
    """Indices of the requests whose policy takes these scores, and whose location is known."""
    return [
        i
        for i, (policy, request) in enumerate(requests)
        if request.location is not None and name in policy.kernel_scores
    ]


def _importance(requests: Sequence[Scored]) -> Iterator[tuple[int, Tensor]]:
    """Index and scores of each request; those of the same window share the launches."""
    by_window: defaultdict[int, list[int]] = defaultdict(list)
    for i in _scored_by_kernels(requests, "importance"):
        by_window[requests[i][0].params.window].append(i)
    for window, chosen in by_window.items():
        from sgl_skipkv.kernels.window_attention import window_attention

        together = [requests[i] for i in chosen]
        paged, scale = _paged_requests([request for _, request in together]), together[0][1].scale
        widths = _parameters(together, "kernel", torch.int32)
        scores: Tensor = window_attention(*paged, widths, window=window, scale=scale)
        parts = torch.split(scores, [tokens - window for tokens in paged[0].row_tokens])
        yield from zip(chosen, parts, strict=True)


def _redundancy(requests: Sequence[Scored]) -> Iterator[tuple[int, Tensor]]:
    """Index and scores of each request, all from the same launches."""
    chosen = _scored_by_kernels(requests, "redundancy")
    if not chosen:
        return
    from sgl_skipkv.kernels.key_redundancy import key_redundancy

    together = [requests[i] for i in chosen]
    keys, *_ = _paged_requests([request for _, request in together])
    scores = key_redundancy(keys, _parameters(together, "threshold", torch.float32))
    yield from zip(chosen, torch.split(scores, list(keys.row_tokens)), strict=True)


def _parameters(requests: Sequence[Scored], name: str, dtype: torch.dtype) -> Tensor:
    """[B], a parameter of each request's policy."""
    values = [getattr(policy.params, name) for policy, _ in requests]
    return device_tensor(values, requests[0][1].positions.device, dtype)


def recent_attention(
    requests: Sequence[ScoreInput], *, steps: int, firsts: Sequence[int], causal: bool
) -> Tensor:
    """float32 [steps, tokens of all requests], ``step_attention`` of each request's last queries.

    Args:
        requests: whose locations are known.
        firsts: of each the first column that is attended to.
    """
    from sgl_skipkv.kernels.step_attention import step_attention

    paged, counts = _paged_requests(requests), [steps] * len(requests)
    scale = requests[0].scale
    attention: Tensor = step_attention(*(*paged, counts, firsts), causal=causal, scale=scale)
    return attention


def pooled_attention(
    requests: Sequence[ScoreInput],
    spans: Sequence[Span],
    zero: Tensor,
    *,
    window: int,
    kernel: int,
) -> list[Tensor]:
    """float32 [stop - first] of each request: ``selector_attention`` of its last ``window`` queries
    to its span, from one replay and one pool of all requests.

    Args:
        requests: whose locations are known.
        zero: of ``a_zero``.
    """
    firsts, half = [first for first, _ in spans], kernel // 2
    attention = recent_attention(requests, steps=window, firsts=firsts, causal=False)
    # One query after the other: the order of ``sum`` depends on the shape, so on the batch.
    received = by_request(attention.cumsum(dim=0)[-1], requests)
    # Half a width of zeros between two requests is what each has at its edges alone.
    apart = [
        piece
        for part, (first, stop) in zip(received, spans, strict=True)
        for piece in (part[first:stop], zero.expand(half))
    ]
    pooled = F.avg_pool1d(torch.cat(apart)[None], kernel, stride=1, padding=half)[0]
    tokens = [stop - first for first, stop in spans]
    columns = torch.split(pooled, [count + half for count in tokens])
    return [column[:count] for column, count in zip(columns, tokens, strict=True)]


def _paged_requests(requests: Sequence[ScoreInput]) -> tuple[PagedKeys, Tensor, Tensor, Tensor]:
    locations = known(request.location for request in requests)
    return paged_at(locations, [request.positions.shape[0] for request in requests])


def paged_values(requests: Sequence[ScoreInput], firsts: Sequence[int]) -> tuple[PagedKeys, Tensor]:
    """Where the values of these requests lie, whose locations are known, and int64 [B], ``firsts``,
    a row entry of each. Without the scales of a float8 cache, which ``distinct`` does not need."""
    from sgl_skipkv.kernels.paged_keys import PagedKeys

    locations = known(request.location for request in requests)
    cache, row_tokens = locations[0].cache, [request.positions.shape[0] for request in requests]
    assert cache.v_ptrs is not None
    rows, offsets, on_device = device_tensors(
        [[location.row for location in locations], [0, *accumulate(row_tokens)], firsts],
        cache.layer.device,
    )
    values = PagedKeys(cache.layer, cache.v_ptrs, cache.req_to_token, rows, row_tokens, offsets)
    return values, on_device

"""Scores of all requests of a policy that are due in the same step, from as many launches as one
request takes.

Kernels read keys and queries where they lie, all layers at once. What a request gets does not
depend on the others. Policies call these functions where the locations of all requests are known,
and compute the same in plain torch elsewhere, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor, device_tensors
from sgl_skipkv.policy.inputs.joined_requests import Span, by_request, known
from sgl_skipkv.policy.inputs.paged_cache import paged_at
from sgl_skipkv.policy.inputs.score_input import ScoreInput

if TYPE_CHECKING:
    from sgl_skipkv.kernels.paged_keys import PagedKeys


def token_importance(requests: Sequence[ScoreInput], *, window: int, kernel: int) -> list[Tensor]:
    """float32 [n - window] of each request: ``window_attention`` of its last ``window`` queries,
    the mean over layers and KV heads.

    Args:
        requests: whose locations are known.
        kernel: width of the max-pool in tokens, odd.
    """
    from sgl_skipkv.kernels.window_attention import window_attention

    paged, scale = _paged_requests(requests), requests[0].scale
    scores: Tensor = window_attention(*paged, window=window, width=kernel, scale=scale)
    return list(torch.split(scores, [tokens - window for tokens in paged[0].row_tokens]))


def token_redundancy(requests: Sequence[ScoreInput], *, threshold: float) -> list[Tensor]:
    """float32 [n] of each request: ``key_redundancy`` of its cached tokens, the mean over layers
    and KV heads.

    Args:
        requests: whose locations are known.
        threshold: cosine above which two keys are similar.
    """
    from sgl_skipkv.kernels.key_redundancy import key_redundancy

    keys, *_ = _paged_requests(requests)
    thresholds = device_tensor([threshold] * len(requests), keys.device, torch.float32)
    return by_request(key_redundancy(keys, thresholds), requests)


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

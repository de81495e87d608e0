"""Scores of all requests that are due in the same step, from as many launches as one request takes.

What a request gets does not depend on the others. Kernels read keys and queries where they lie:
``add_token_scores`` runs before the policies, all layers at once. A policy takes what is there and
computes the rest in plain torch, so on a CPU, where nothing is added, the same policies run by
themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor, device_tensors
from sgl_skipkv.policy.base import APART, KeyLocation, PagedCache, Policy, ScoreInput, Sentences

if TYPE_CHECKING:
    from sgl_skipkv.kernels.paged_keys import PagedKeys

Scored = tuple[Policy, ScoreInput]
Span = tuple[int, int]


def add_token_scores(requests: Sequence[Scored]) -> list[ScoreInput]:
    """The inputs, with importance and redundancy where a policy takes them and kernels run.

    Requests of the same window share the launches for importance.
    """
    inputs = [request for _, request in requests]
    by_window: defaultdict[int, list[int]] = defaultdict(list)
    repeating = []
    for i, (policy, request) in enumerate(requests):
        if request.location is not None and "importance" in policy.kernel_scores:
            by_window[policy.params.window].append(i)
        if request.location is not None and "redundancy" in policy.kernel_scores:
            repeating.append(i)
    if not by_window and not repeating:
        return inputs
    from sgl_skipkv.kernels.key_redundancy import key_redundancy
    from sgl_skipkv.kernels.window_attention import window_attention

    for window, chosen in by_window.items():
        together = [requests[i] for i in chosen]
        paged, scale = _paged_requests([request for _, request in together]), together[0][1].scale
        widths = _parameters(together, "kernel", torch.int32)
        scores: Tensor = window_attention(*paged, widths, window=window, scale=scale)
        parts = torch.split(scores, [tokens - window for tokens in paged[0].row_tokens])
        for i, importance in zip(chosen, parts, strict=True):
            inputs[i] = replace(inputs[i], importance=importance)
    if repeating:
        together = [requests[i] for i in repeating]
        keys, *_ = _paged_requests([request for _, request in together])
        scores = key_redundancy(keys, _parameters(together, "threshold", torch.float32))
        parts = torch.split(scores, list(keys.row_tokens))
        for i, redundancy in zip(repeating, parts, strict=True):
            inputs[i] = replace(inputs[i], redundancy=redundancy)
    return inputs


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
    zeros: Tensor,
    *,
    window: int,
    kernel: int,
) -> list[Tensor]:
    """float32 [stop - first] of each request: ``selector_attention`` of its last ``window`` queries
    to its span, from one replay and one pool of all requests.

    Args:
        requests: whose locations are known.
        zeros: float32, half of ``kernel`` or more.
    """
    firsts, half = [first for first, _ in spans], kernel // 2
    attention = recent_attention(requests, steps=window, firsts=firsts, causal=False)
    # One query after the other: the order of ``sum`` depends on the shape, so on the batch.
    received = by_request(attention.cumsum(dim=0)[-1], requests)
    # Half a width of zeros between two requests is what each has at its edges alone.
    apart = [
        piece
        for part, (first, stop) in zip(received, spans, strict=True)
        for piece in (part[first:stop], zeros[:half])
    ]
    pooled = F.avg_pool1d(torch.cat(apart)[None], kernel, stride=1, padding=half)[0]
    tokens = [stop - first for first, stop in spans]
    columns = torch.split(pooled, [count + half for count in tokens])
    return [column[:count] for column, count in zip(columns, tokens, strict=True)]


@dataclass(frozen=True)
class CachedTokens:
    """Cached tokens of several requests. A layer is gathered when it is asked for.

    Attributes:
        slots: int64 of any shape.
    """

    cache: PagedCache
    slots: Tensor

    def keys(self, layer: int) -> Tensor:
        """float [*slots, Hkv, d]; float8 keys are dequantised to float32."""
        scales = self.cache.k_scales
        return self._picked(self.cache.k_layers[layer], None if scales is None else scales[layer])

    def values(self, layer: int) -> Tensor:
        """As ``keys``, of values."""
        scales = self.cache.v_scales
        return self._picked(self.cache.v_layers[layer], None if scales is None else scales[layer])

    def _picked(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        if stored.itemsize > 1:
            picked = stored[self.slots]
        else:  # which torch cannot index on every device
            picked = stored.view(torch.uint8)[self.slots].view(stored.dtype).float()
        return picked if scale is None else picked.float() * scale


def joined_tokens(
    requests: Sequence[ScoreInput], spans: Sequence[Span] | None = None
) -> tuple[CachedTokens, Tensor]:
    """Tokens of these requests, whose locations are known, one after the other, and their owners.

    Args:
        spans: row entries of each request, half-open; None: all.
    """
    locations = [request.location for request in requests if request.location is not None]
    spans = spans or [(0, request.positions.shape[0]) for request in requests]
    tokens, cache = [stop - first for first, stop in spans], locations[0].cache
    starts = [0, *accumulate(tokens[:-1])]
    shifts = [first - start for (first, _), start in zip(spans, starts, strict=True)]
    rows, shift = device_tensors(
        [[location.row for location in locations], shifts], cache.layer.device
    )
    every, owner = torch.arange(sum(tokens), device=rows.device), owners(tokens, rows.device)
    slots = cache.req_to_token[rows[owner], every + shift[owner]].long()
    return CachedTokens(cache, slots), owner


def padded_tokens(
    requests: Sequence[ScoreInput], spans: Sequence[Span]
) -> tuple[CachedTokens, Tensor]:
    """Tokens of these requests, whose locations are known, side by side: slots [B, most tokens],
    and which of them are the request's own: bool [B, most tokens]. Any others are no numbers that
    one may rely on.

    Args:
        spans: row entries of each request, half-open.
    """
    locations = [request.location for request in requests if request.location is not None]
    cache, counts = locations[0].cache, [stop - first for first, stop in spans]
    rows, firsts, tokens = device_tensors(
        [[location.row for location in locations], [first for first, _ in spans], counts],
        cache.layer.device,
    )
    every = torch.arange(max(counts), device=rows.device)
    columns = (firsts[:, None] + every).clamp_max_(cache.req_to_token.shape[1] - 1)
    slots = cache.req_to_token[rows[:, None], columns].long()
    return CachedTokens(cache, slots), every < tokens[:, None]


def unpadded(
    scores: Mapping[int, Tensor], spans: Sequence[Span], requests: Sequence[ScoreInput]
) -> list[Tensor]:
    """float32 [row tokens] of each request; 0 outside its span.

    Args:
        scores: request -> float32 [its tokens or more].
    """
    zeros = requests[0].positions.new_zeros(1, dtype=torch.float32)
    pieces = [
        piece
        for i, (first, stop) in enumerate(spans)
        for piece in (
            zeros.expand(first),
            scores[i][: stop - first],
            zeros.expand(requests[i].positions.shape[0] - stop),
        )
    ]
    return by_request(torch.cat(pieces), requests)


def of_like_lengths(spans: Sequence[Span]) -> list[list[int]]:
    """Indices of the spans, those together of which none is twice as long as another."""
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for i, (first, stop) in enumerate(spans):
        by_length[(stop - first).bit_length()].append(i)
    return list(by_length.values())


def joined_sentences(requests: Sequence[ScoreInput]) -> tuple[Sentences, Tensor, Tensor]:
    """Sentences and positions of these requests as if they were those of one, far apart; and int64
    [tokens of all requests], whose each token is.

    Args:
        requests: whose sentences are known.
    """
    sentences = [request.sentences for request in requests if request.sentences is not None]
    tokens = [len(request.positions) for request in requests]
    closed = [len(part.starts) for part in sentences]
    numbers = [tokens, closed, range(len(requests))]
    token_counts, closed_counts, index = device_tensors(numbers, requests[0].positions.device)
    owner = index.repeat_interleave(token_counts, output_size=sum(tokens))
    shift = index.repeat_interleave(closed_counts, output_size=sum(closed)) * APART
    joined = Sentences(
        torch.cat([part.starts for part in sentences]) + shift,
        torch.cat([part.stops for part in sentences]) + shift,
        torch.cat([part.redundancy for part in sentences]),
    )
    positions = torch.cat([request.positions for request in requests]) + owner * APART
    return joined, positions, owner


def _paged_requests(requests: Sequence[ScoreInput]) -> tuple[PagedKeys, Tensor, Tensor, Tensor]:
    locations = [request.location for request in requests if request.location is not None]
    return paged_at(locations, [request.positions.shape[0] for request in requests])


def paged_at(
    locations: Sequence[KeyLocation], row_tokens: Sequence[int]
) -> tuple[PagedKeys, Tensor, Tensor, Tensor]:
    """The first arguments of every kernel that attends with recorded queries, in one copy.

    Args:
        row_tokens: cached tokens of each request.

    Returns:
        keys, ring, and int64 [B] of each request's queries: tracks and last positions.
    """
    from sgl_skipkv.kernels.paged_keys import PagedKeys

    cache = locations[0].cache
    rows, offsets, tracks, last = device_tensors(
        [
            [location.row for location in locations],
            [0, *accumulate(row_tokens)],
            [location.track_id for location in locations],
            [location.last_position for location in locations],
        ],
        cache.layer.device,
    )
    keys = PagedKeys(
        *(cache.layer, cache.k_ptrs, cache.req_to_token, rows, row_tokens, offsets, cache.k_scales)
    )
    ring = locations[0].ring
    assert ring is not None
    return keys, ring, tracks, last


def paged_values(requests: Sequence[ScoreInput], firsts: Sequence[int]) -> tuple[PagedKeys, Tensor]:
    """Where the values of these requests lie, whose locations are known, and int64 [B], ``firsts``,
    a row entry of each."""
    from sgl_skipkv.kernels.paged_keys import PagedKeys

    locations = [request.location for request in requests if request.location is not None]
    cache, row_tokens = locations[0].cache, [request.positions.shape[0] for request in requests]
    assert cache.v_ptrs is not None
    rows, offsets, on_device = device_tensors(
        [[location.row for location in locations], [0, *accumulate(row_tokens)], firsts],
        cache.layer.device,
    )
    values = PagedKeys(cache.layer, cache.v_ptrs, cache.req_to_token, rows, row_tokens, offsets)
    return values, on_device


def owners(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int64 [tokens of all requests], index of the request that each token is of."""
    requests, counts = device_tensors([range(len(lengths)), lengths], device)
    owner: Tensor = requests.repeat_interleave(counts, output_size=sum(lengths))
    return owner


def with_windows(parts: Sequence[Tensor], window: int) -> Tensor:
    """float32 [tokens of all requests]: scores of each one's candidates, then 0 for its window."""
    zeros = parts[0].new_zeros(window)
    return torch.cat([piece for part in parts for piece in (part, zeros)])


def by_request(scores: Tensor, requests: Sequence[ScoreInput]) -> list[Tensor]:
    """float32 [n] of each request, from [tokens of all requests]."""
    return list(torch.split(scores, [request.positions.shape[0] for request in requests]))

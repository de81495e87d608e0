"""Tokens, sentences and scores of several requests in one tensor, and apart again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensors
from sgl_skipkv.policy.inputs.paged_cache import PagedCache, picked
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.policy.inputs.sentences import Sentences

T = TypeVar("T")
Span = tuple[int, int]
#: between the positions of one request and the next, where their tokens are taken as one list
APART = 2**40


def known(values: Iterable[T | None]) -> list[T]:
    """One of each request. None may be missing: without it the others would be taken for those of
    other requests."""
    found = list(values)
    present = [value for value in found if value is not None]
    assert len(present) == len(found), f"{len(found)} requests, {len(present)} with what is read"
    return present


def by_request(scores: Tensor, requests: Sequence[ScoreInput]) -> list[Tensor]:
    """float32 [n] of each request, from [tokens of all requests]."""
    return list(torch.split(scores, [request.positions.shape[0] for request in requests]))


def owners(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int64 [tokens of all requests], index of the request that each token is of."""
    requests, counts = device_tensors([range(len(lengths)), lengths], device)
    owner: Tensor = requests.repeat_interleave(counts, output_size=sum(lengths))
    return owner


def joined_statistics(requests: Sequence[ScoreInput], *names: str) -> list[Tensor]:
    """float32 [tokens of all requests] of each name."""
    return [torch.cat([request.statistics[name] for request in requests]) for name in names]


def last_positions(requests: Sequence[ScoreInput]) -> Tensor:
    """int64 [tokens of all requests], the last position of the request that each token is of."""
    return torch.cat(
        [request.positions[-1:].expand(request.positions.shape) for request in requests]
    )


def with_windows(parts: Sequence[Tensor], window: int) -> Tensor:
    """float32 [tokens of all requests]: scores of each one's candidates, then 0 for its window."""
    zeros = parts[0].new_zeros(window)
    return torch.cat([piece for part in parts for piece in (part, zeros)])


def joined_sentences(requests: Sequence[ScoreInput]) -> tuple[Sentences, Tensor, Tensor]:
    """Sentences and positions of these requests as if they were those of one, far apart; and int64
    [tokens of all requests], whose each token is.

    Args:
        requests: whose sentences are known.
    """
    sentences = known(request.sentences for request in requests)
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
        scale = None if scales is None else scales[layer]
        return picked(self.cache.k_layers[layer], self.slots, scale)

    def values(self, layer: int) -> Tensor:
        """As ``keys``, of values."""
        scales = self.cache.v_scales
        scale = None if scales is None else scales[layer]
        return picked(self.cache.v_layers[layer], self.slots, scale)


def joined_tokens(
    requests: Sequence[ScoreInput], spans: Sequence[Span] | None = None
) -> tuple[CachedTokens, Tensor]:
    """Tokens of these requests, whose locations are known, one after the other, and their owners.

    Args:
        spans: row entries of each request, half-open; None: all.
    """
    locations = known(request.location for request in requests)
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
    locations = known(request.location for request in requests)
    cache, counts = locations[0].cache, [stop - first for first, stop in spans]
    rows, firsts, tokens = device_tensors(
        [[location.row for location in locations], [first for first, _ in spans], counts],
        cache.layer.device,
    )
    every = torch.arange(max(counts), device=rows.device)
    columns = (firsts[:, None] + every).clamp_max_(cache.req_to_token.shape[1] - 1)
    slots = cache.req_to_token[rows[:, None], columns].long()
    return CachedTokens(cache, slots), every < tokens[:, None]


def a_zero(requests: Sequence[ScoreInput]) -> Tensor:
    """float32 [1] on their device. It expands to any number, so that one operation makes all."""
    return requests[0].positions.new_zeros(1, dtype=torch.float32)


def unpadded(
    scores: Sequence[Tensor], spans: Sequence[Span], requests: Sequence[ScoreInput], zero: Tensor
) -> list[Tensor]:
    """float32 [row tokens] of each request; 0 outside its span.

    Args:
        scores: float32 [tokens of its span or more] of each request.
        zero: of ``a_zero``.
    """
    pieces = [
        piece
        for i, (first, stop) in enumerate(spans)
        for piece in (
            zero.expand(first),
            scores[i][: stop - first],
            zero.expand(requests[i].positions.shape[0] - stop),
        )
    ]
    return by_request(torch.cat(pieces), requests)


def scores_of_spans(
    requests: Sequence[ScoreInput],
    spans: Sequence[Span],
    scores_of: Callable[[Sequence[ScoreInput], CachedTokens, Tensor], Tensor],
) -> list[Tensor]:
    """float32 [row tokens] of each request, scored with others of like lengths; 0 outside its span.

    Args:
        requests: whose locations are known.
        scores_of: requests and the ``padded_tokens`` of their spans -> float32 [B, most tokens].
    """
    scored = dict[int, Tensor]()
    for chosen in _of_like_lengths(spans):
        together = [requests[i] for i in chosen]
        scores = scores_of(together, *padded_tokens(together, [spans[i] for i in chosen]))
        scored.update(zip(chosen, scores, strict=True))
    return unpadded([scored[i] for i in range(len(spans))], spans, requests, a_zero(requests))


def _of_like_lengths(spans: Sequence[Span]) -> list[list[int]]:
    """Indices of the spans, those together of which none is twice as long as another."""
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for i, (first, stop) in enumerate(spans):
        by_length[(stop - first).bit_length()].append(i)
    return list(by_length.values())

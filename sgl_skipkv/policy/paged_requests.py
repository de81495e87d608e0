"""What kernels are told of a batch of requests: where keys and recent queries lie, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensors
from sgl_skipkv.policy.base import KeyLocation, ScoreInput

if TYPE_CHECKING:
    from sgl_skipkv.kernels.paged_keys import PagedKeys


class PagedRequests(NamedTuple):
    """The first arguments of every kernel that attends with recorded queries.

    Attributes:
        ring: float [L, tracks, R, Hq, d].
        query_slots, last_positions: int64 [B], of each request's queries.
    """

    keys: PagedKeys
    ring: Tensor
    query_slots: Tensor
    last_positions: Tensor


def paged_requests(requests: Sequence[ScoreInput]) -> PagedRequests:
    """Of requests whose locations are known."""
    locations = [one.location for one in requests if one.location is not None]
    return paged_at(locations, [one.positions.shape[0] for one in requests])


def paged_at(locations: Sequence[KeyLocation], row_tokens: Sequence[int]) -> PagedRequests:
    """Of requests at these locations, with so many cached tokens each."""
    from sgl_skipkv.kernels.paged_keys import PagedKeys

    cache = locations[0].cache
    rows, offsets, tracks, last = device_tensors(
        [
            [one.row for one in locations],
            [0, *accumulate(row_tokens)],
            [one.track_id for one in locations],
            [one.last_position for one in locations],
        ],
        cache.layer.device,
    )
    keys = PagedKeys(
        *(cache.layer, cache.k_ptrs, cache.req_to_token, rows, row_tokens, offsets, cache.k_scales)
    )
    return PagedRequests(keys, locations[0].ring, tracks, last)


def recent_attention(
    requests: Sequence[ScoreInput], *, steps: int, firsts: Sequence[int], causal: bool
) -> Tensor:
    """float32 [steps, tokens of all requests], ``step_attention`` of each request's last queries.

    Args:
        requests: whose locations are known.
        firsts: of each the first column that is attended to.
    """
    from sgl_skipkv.kernels.step_attention import step_attention

    counts, scale = [steps] * len(requests), requests[0].scale
    attention: Tensor = step_attention(
        *(*paged_requests(requests), counts, firsts), causal=causal, scale=scale
    )
    return attention

"""Where keys, values and recent queries lie, for kernels that read them in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_skipkv.kernels import on_device

if TYPE_CHECKING:
    from sgl_skipkv.kernels.paged_keys import PagedKeys


@dataclass(frozen=True)
class PagedCache:
    """The KV cache of one server as kernels see it.

    Attributes:
        layer: float [slots, Hkv, d], any layer's keys: what all of them look like.
        k_ptrs: int64 [L], where each layer's keys are.
        req_to_token: int32 [rows, width], the page table.
        k_scales: float32 [L], what each layer's cached numbers are to be multiplied with; None: 1.
        k_layers, v_layers: every layer's keys and values, for policies that gather them.
        v_scales: as ``k_scales``, of values.
        v_ptrs: as ``k_ptrs``, of values; None where they are unknown or laid out otherwise.
    """

    layer: Tensor
    k_ptrs: Tensor
    req_to_token: Tensor
    k_scales: Tensor | None
    k_layers: Sequence[Tensor]
    v_layers: Sequence[Tensor]
    v_scales: Tensor | None
    v_ptrs: Tensor | None

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.k_ptrs.shape[0] * self.layer.shape[1]

    @classmethod
    def of(
        cls,
        layers: Sequence[Tensor],
        req_to_token: Tensor,
        k_scales: Sequence[float] | None = None,
        v_layers: Sequence[Tensor] = (),
        v_scales: Sequence[float] | None = None,
    ) -> PagedCache | None:
        """The cache whose layers have these keys; None where plain torch scores instead."""
        first = layers[0]
        if not (on_device.uses_triton(first.device) and on_device.kernels_read(first.shape[2])):
            return None
        k_ptrs, v_ptrs = (
            on_device.device_tensor([layer.data_ptr() for layer in part], first.device)
            for part in (layers, v_layers)
        )
        same_layout = [
            (v.shape, v.stride(), v.dtype) == (first.shape, first.stride(), first.dtype)
            for v in v_layers
        ]
        of_keys, of_values = (
            None if scales is None else on_device.device_tensor(scales, first.device, torch.float32)
            for scales in (k_scales, v_scales)
        )
        located = v_ptrs if same_layout and all(same_layout) else None
        return cls(first, k_ptrs, req_to_token, of_keys, layers, v_layers, of_values, located)


@dataclass(frozen=True)
class KeyLocation:
    """Where one request's keys and recent queries lie.

    Attributes:
        row: of the page table.
        ring: float [L, tracks, R, Hq, d], recent queries of every tracked request; None where the
            policy needs none.
        track_id: the request's own.
        last_position: logical position of the newest query.
    """

    cache: PagedCache
    row: int
    ring: Tensor | None
    track_id: int
    last_position: int


def picked(stored: Tensor, slots: Tensor, scale: Tensor | float | None) -> Tensor:
    """float [*slots, Hkv, d] of one layer's keys or values; float8 is dequantised to float32.

    Args:
        stored: float [all slots, Hkv, d].
        scale: what the cached numbers are to be multiplied with; None: 1.
    """
    if stored.itemsize > 1:
        found = stored[slots]
    else:  # which torch cannot index on every device
        found = stored.view(torch.uint8)[slots].view(stored.dtype).float()
    return found if scale is None else found.float() * scale


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
    rows, offsets, tracks, last = on_device.device_tensors(
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

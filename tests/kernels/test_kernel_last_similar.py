"""``kernels/last_similar.py``: the right key for every row, and how much is compared for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from paged_world import (
    PagedWorld,
    clustered,
    counted_launches,
    counted_products,
    last_similar_truth,
    paged,
    poisoned_memory,
)
from torch import Tensor
from triton_tools import FLOATS, device_fixture

from sgl_skipkv.kernels import last_similar
from sgl_skipkv.kernels.last_similar import BOUND_TOKENS, bound_columns

device = device_fixture(last_similar)
fixtures = (poisoned_memory,)  # for every test
TILE = 32  # rows and columns of a tile of float32 keys


def bounds_of(inverse: Tensor, tokens: Sequence[int]) -> Tensor:
    """The largest of every 32 from the end of each request; NaN where nobody has business."""
    bounds = torch.full((*inverse.shape[:2], bound_columns(tokens)), float("nan"))
    first = 0
    for b, n in enumerate(tokens):
        own = inverse[:, :, first : first + n].cpu()
        for g, stop in enumerate(range(n, 0, -BOUND_TOKENS)):
            part = own[:, :, max(0, stop - BOUND_TOKENS) : stop]
            bounds[:, :, first // BOUND_TOKENS + b + g] = part.amax(dim=2)
        first += n
    return bounds.to(inverse.device)


def searched(world: PagedWorld, threshold: float) -> Tensor:
    """int32 [L, Hkv, N] of the kernels."""
    told, device = world.paged, world.rows.device
    limits = torch.full((len(world.rows),), threshold, device=device)
    keys = torch.cat(world.of_request, 1).float()
    inverse = 1 / keys.norm(dim=-1).clamp_min(1e-8)  # [L, N, Hkv]
    inverse = inverse.transpose(1, 2).contiguous()
    bounds = bounds_of(inverse, told.row_tokens)
    return last_similar.last_similar_keys(told, inverse, bounds, limits)


def truth(of_request: list[Tensor], threshold: float) -> Tensor:
    return torch.cat([last_similar_truth(keys, threshold) for keys in of_request], 2)


@pytest.mark.parametrize("threshold", [0.5, -0.2, 0.97])
def test_last_similar_key_of_every_row(threshold: float, device: torch.device) -> None:
    """Requests of several lengths, alone as in the batch."""
    tokens = [90, 170, 33, 1]
    pool = clustered(tokens, [threshold] * 4, layers=2)
    of_request = [keys.to(device) for keys in pool]
    found = searched(paged(of_request), threshold)
    assert torch.equal(found, truth(of_request, threshold))
    alone = [searched(paged([keys]), threshold) for keys in of_request]
    assert torch.equal(found, torch.cat(alone, 2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_walks_of_every_length(dtype: torch.dtype, device: torch.device) -> None:
    """Each row finds its only column a different number of tiles away, some none; negative keys
    and keys of very different norms are among them."""
    n = 600
    draw = torch.Generator().manual_seed(8)
    keys = torch.randn(1, n, 1, 64, generator=draw)
    first, last = torch.arange(0, 240, 9), torch.arange(n - 1, n - 1 - 240, -9)
    keys[0, last] = keys[0, first] + 0.1 * torch.randn(len(first), 1, 64, generator=draw)
    keys[0, 300:320] *= -1.0
    keys *= torch.rand(1, n, 1, 1, generator=draw) * 10 + 0.01
    of_request = [keys.to(dtype).to(device)]
    found = searched(paged(of_request), 0.8)
    assert torch.equal(found, truth(of_request, 0.8))
    assert found[0, 0, last].tolist() == first.tolist()


# -- how much is computed


def work(function: Callable[[], object]) -> int:
    """Pairs of row and column that are compared."""
    with counted_products() as operations:
        function()
    return sum(operations) // (2 * 16)


@pytest.fixture()
def counted(device: torch.device) -> torch.device:
    if device.type != "cpu":
        pytest.skip("a GPU does not say what it computes")
    return device


def test_without_similar_keys_every_pair_is_compared_once(counted: torch.device) -> None:
    world = paged(clustered([4 * TILE], [2.0], layers=1, kv_heads=1))
    assert work(lambda: searched(world, 2.0)) == (4 * TILE) ** 2


def test_where_all_keys_are_similar_one_tile_answers(counted: torch.device) -> None:
    """The last column answers all rows but its own, which the column before answers."""
    keys = clustered([4 * TILE], [0.5], layers=1, kv_heads=1)[0] * 0.01 + 1.0
    world = paged([keys])
    assert work(lambda: searched(world, 0.5)) == 4 * TILE * TILE


def test_what_is_launched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    world = paged([one.to(device) for one in clustered([40, 20], [0.5, 0.5])])
    launched = counted_launches(monkeypatch)
    searched(world, 0.5)
    assert launched == ["_last_similar_kernel"]

"""``kernels/spared_columns.py``: what is carried over a compaction, and how much that saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from paged_world import (
    PagedWorld,
    clustered,
    counted_launches,
    counted_products,
    paged,
    poisoned_memory,
    spared_truth,
)
from torch import Tensor
from triton_tools import FLOAT8S, FLOATS, device_fixture

from sgl_skipkv.kernels import carried_columns, key_redundancy, spared_columns
from sgl_skipkv.kernels.spared_columns import BOUND_TOKENS, KnownSpared, bound_columns

device = device_fixture(carried_columns, key_redundancy, spared_columns)
fixtures = (poisoned_memory,)  # for every test
TILE = 32  # rows and columns of a tile of float32 keys
Keep = Callable[[Tensor, torch.Generator], Tensor]


def offsets_of(tokens: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *tokens], device=device).cumsum(0)


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


def searched(world: PagedWorld, threshold: float, known: KnownSpared | None = None) -> Tensor:
    """int32 [L, Hkv, N] of the kernels."""
    told, device = world.paged, world.rows.device
    limits = torch.full((len(world.rows),), threshold, device=device)
    keys = torch.cat(world.of_request, 1).float()
    inverse = 1 / keys.norm(dim=-1).clamp_min(1e-8)  # [L, N, Hkv]
    inverse = inverse.transpose(1, 2).contiguous()
    bounds = bounds_of(inverse, told.row_tokens)
    return spared_columns.spared_columns(told, inverse, bounds, limits, known)


def truth(of_request: list[Tensor], threshold: float) -> Tensor:
    return torch.cat([spared_truth(keys, threshold) for keys in of_request], 2)


def compact(spared: Tensor, tokens: list[int], kept: list[Tensor]) -> KnownSpared:
    device, counts = spared.device, [len(rows) for rows in kept]
    rows = [own.to(device) for own in kept]
    parts = carried_columns.carried_columns(spared.split(tokens, dim=2), rows)
    return KnownSpared(torch.cat(parts, dim=2), counts, offsets_of(counts, device))


def keep_most(spared: Tensor, draw: torch.Generator) -> Tensor:
    return (torch.rand(spared.shape[2], generator=draw) < 0.8).nonzero()[:, 0]


def keep_all(spared: Tensor, draw: torch.Generator) -> Tensor:
    return torch.arange(spared.shape[2])


def keep_no_spared(spared: Tensor, draw: torch.Generator) -> Tensor:
    """Every row of some head loses its column."""
    rows = torch.arange(spared.shape[2])
    return rows[~torch.isin(rows, spared[0, 0].cpu())]


def keep_spared_only(spared: Tensor, draw: torch.Generator) -> Tensor:
    rows = torch.arange(spared.shape[2])
    return rows[torch.isin(rows, spared.cpu())]


def keep_one(spared: Tensor, draw: torch.Generator) -> Tensor:
    return torch.tensor([spared.shape[2] // 2])


def keep_none(spared: Tensor, draw: torch.Generator) -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize(
    "keep", [keep_most, keep_all, keep_no_spared, keep_spared_only, keep_one, keep_none]
)
@pytest.mark.parametrize("threshold", [0.5, -0.2, 0.97])
def test_what_is_carried_over_equals_a_search_from_scratch(
    keep: Keep, threshold: float, device: torch.device
) -> None:
    """Three compactions in a row, of requests that gain different numbers of tokens, or none."""
    draw = torch.Generator().manual_seed(5)
    pool = clustered([300, 200, 120], [threshold] * 3, layers=1)
    pool = [keys.to(device) for keys in pool]
    used = [90, 40, 33]
    rows = [torch.arange(n) for n in used]
    of_request = [keys[:, own] for keys, own in zip(pool, rows, strict=True)]
    spared = searched(paged(of_request), threshold)
    assert torch.equal(spared, truth(of_request, threshold))
    for new in ([50, 1, 0], [0, 0, 0], [33, 70, 20]):
        tokens = [len(own) for own in rows]
        kept = [keep(part, draw) for part in spared.split(tokens, 2)]
        known = compact(spared, tokens, kept)
        for b, more in enumerate(new):
            rows[b] = torch.cat([rows[b][kept[b]], torch.arange(used[b], used[b] + more)])
            used[b] += more
        of_request = [keys[:, own] for keys, own in zip(pool, rows, strict=True)]
        spared = searched(paged(of_request), threshold, known)
        assert torch.equal(spared, truth(of_request, threshold))


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S], ids=str)
def test_the_redundancy_is_the_same_bit_for_bit(dtype: torch.dtype, device: torch.device) -> None:
    """Also where one request of the batch knows nothing."""
    draw = torch.Generator().manual_seed(6)
    keys = [one.to(device) for one in clustered([170, 60], [0.5, 0.5], dtype=dtype)]
    limits = torch.full((2,), 0.5, device=device)
    before = searched(paged([keys[0][:, :140]]), 0.5)
    kept = keep_most(before, draw)
    rows = torch.cat([kept, torch.arange(140, 170)])
    known = compact(before, [140], [kept])
    known = KnownSpared(
        known.spared, [len(kept), 0], torch.tensor([0, len(kept), len(kept)], device=device)
    )
    world = paged([keys[0][:, rows], keys[1]])
    incremental = key_redundancy.key_redundancy(world.paged, limits, known)
    assert all(map(torch.equal, incremental, key_redundancy.key_redundancy(world.paged, limits)))


def test_two_compactions_without_a_search_between(device: torch.device) -> None:
    draw = torch.Generator().manual_seed(7)
    (keys,) = (one.to(device) for one in clustered([130], [0.5]))
    spared = searched(paged([keys]), 0.5)
    first = keep_most(spared, draw)
    known = compact(spared, [130], [first])
    second = keep_most(known.spared, draw)
    known = compact(known.spared, [len(first)], [second])
    left = [keys[:, first[second]]]
    assert torch.equal(searched(paged(left), 0.5, known), truth(left, 0.5))


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


@pytest.mark.parametrize("threshold", [2.0, 0.9])
def test_where_nothing_is_lost_only_new_pairs_are_compared(
    threshold: float, counted: torch.device
) -> None:
    """Old rows meet new columns and new rows meet all: n^2 - o^2, exactly, at whole tiles."""
    n, old = 5 * TILE, 4 * TILE
    keys = clustered([n], [threshold], layers=1, kv_heads=1, noise=1.5)[0]
    known = compact(searched(paged([keys[:, :old]]), threshold), [old], [torch.arange(old)])
    world = paged([keys])
    compared = work(lambda: searched(world, threshold, known))
    assert compared <= spared_columns.pairs([n], [old]) == n * n - old * old
    if threshold == 2.0:
        assert compared == n * n - old * old
    assert torch.equal(searched(world, threshold, known), truth([keys], threshold))


def test_a_lost_column_costs_what_lies_below_it(counted: torch.device) -> None:
    """Two far rows lose their columns; one tile holds both, and it starts where those were."""
    n, old = 6 * TILE, 5 * TILE
    (keys,) = clustered([n + 2], [0.97], layers=1, kv_heads=1, noise=1.5)
    pair = torch.eye(16)[:2] * 50
    keys[0, [5, 3 * TILE - 1], 0] = pair  # rows 5 and 95, similar to nothing but what goes
    keys[0, [2 * TILE, 2 * TILE + 1], 0] = pair
    before = searched(paged([keys[:, : old + 2]]), 0.97)
    assert before[0, 0, [5, 3 * TILE - 1]].tolist() == [2 * TILE, 2 * TILE + 1]
    kept = torch.arange(old + 2)
    kept = kept[(kept != 2 * TILE) & (kept != 2 * TILE + 1)]
    known = compact(before, [old + 2], [kept])
    assert (known.spared < -1).sum() == 2
    left = [keys[:, torch.cat([kept, torch.arange(old + 2, n + 2)])]]
    world = paged(left)
    compared = work(lambda: searched(world, 0.97, known))
    assert compared <= n * n - old * old + TILE * 2 * TILE
    assert torch.equal(searched(world, 0.97, known), truth(left, 0.97))


def test_a_walk_jumps_over_columns_that_nobody_needs(counted: torch.device) -> None:
    """Rows of one tile: some find another column at once, one can only find it far below.

    Tiles are counted from the end, so the limits of the first lie in two of them.
    """
    n, far = 6 * TILE, 5 * TILE
    (keys,) = clustered([n], [0.97], layers=1, kv_heads=1, noise=1.5)
    keys[0, [5, far - 1, far, far + 1], 0], keys[0, [6, TILE], 0] = torch.eye(16)[:2, None] * 50
    before = searched(paged([keys]), 0.97)
    assert before[0, 0, [5, 6, far]].tolist() == [far + 1, TILE, far + 1]
    kept = torch.arange(n)
    kept = kept[(kept != far + 1) & (kept != TILE)]
    known = compact(before, [n], [kept])
    assert (known.spared < -1).sum() == 4
    world = paged([keys[:, kept]])
    assert work(lambda: searched(world, 0.97, known)) == 3 * TILE * TILE
    assert torch.equal(searched(world, 0.97, known), truth([keys[:, kept]], 0.97))


def test_what_is_launched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [one.to(device) for one in clustered([40, 20], [0.5, 0.5])]
    world = paged(keys)
    everything = [torch.arange(n) for n in (40, 20)]
    known = compact(searched(world, 0.5), [40, 20], everything)
    nothing = compact(searched(world, 0.5), [40, 20], [rows[:0] for rows in everything])
    launched = counted_launches(monkeypatch)
    searched(world, 0.5, known)
    searched(world, 0.5, nothing)
    assert launched == ["_new_columns_kernel", "_search_kernel", "_search_kernel"]


def test_what_it_refuses(device: torch.device) -> None:
    world = paged([keys.to(device) for keys in clustered([20, 10], [0.5, 0.5])])
    spared = torch.full((2, 2, 30), -1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 19, 30], device=device)
    with pytest.raises(ValueError, match="known: expected 0 to 10 rows of the request, got 11"):
        searched(world, 0.5, KnownSpared(spared, [19, 11], offsets))
    with pytest.raises(ValueError, match=r"contiguous \[2, 2, 29\], got \[2, 2, 30\]"):
        searched(world, 0.5, KnownSpared(spared, [19, 10], offsets))

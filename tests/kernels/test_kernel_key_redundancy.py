"""``kernels/key_redundancy.py`` against the reference, on paged keys."""

from __future__ import annotations

import kernel_bytes
import pytest
import torch
from paged_world import (
    Allocations,
    PagedWorld,
    clustered,
    cosines,
    counted_launches,
    counted_loads,
    far_away,
    last_similar_truth,
    nobody,
    paged,
    poisoned_memory,
)
from torch import Tensor
from triton_tools import (
    FLOAT8S,
    FLOATS,
    assert_as_close,
    device_fixture,
    forbid_launches,
)

from sgl_skipkv.kernels import key_redundancy as module
from sgl_skipkv.kernels import last_similar, reference
from sgl_skipkv.kernels.paged_keys import PagedKeys

device = device_fixture(module, last_similar)
fixtures = (poisoned_memory,)  # for every test


def scored(world: PagedWorld, thresholds: list[float]) -> list[Tensor]:
    """float32 [n] of each request, of the kernel."""
    limits = torch.tensor(thresholds, device=world.rows.device)
    redundancy = module.key_redundancy(world.paged, limits)
    assert redundancy.dtype == torch.float32
    return list(redundancy.split(world.row_tokens))


def exact(keys: Tensor, threshold: float) -> Tensor:
    """float64 [n], the mean over layers and KV heads. keys: [L, n, Hkv, d]."""
    cosine, last = cosines(keys), last_similar_truth(keys, threshold)
    columns = torch.arange(keys.shape[1], device=keys.device)
    left = cosine.masked_fill(last[..., None] == columns, 0.0)
    return left.mean(2).softmax(-1).mean((0, 1))


def referred(keys: Tensor, threshold: float) -> Tensor:
    """float32 [n], as the policies form it from the reference."""
    total = torch.zeros(keys.shape[1], device=keys.device)
    for layer in keys:
        total += reference.key_redundancy(layer, threshold=threshold).mean(0)
    return total / len(keys)


def assert_as_reference(
    of_request: list[Tensor], thresholds: list[float], device: torch.device
) -> None:
    world = paged([keys.to(device) for keys in of_request], seed=len(of_request))
    found = scored(world, thresholds)
    for keys, threshold, redundancy in zip(world.of_request, thresholds, found, strict=True):
        assert_as_close(redundancy, referred(keys, threshold), exact(keys, threshold))


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_equals_the_reference(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Odd lengths, several tiles, one token and two, scrambled slots and rows."""
    tokens, thresholds = [71, 1, 2, 150] if head_dim == 64 else [41, 1, 2, 70], [0.5] * 4
    keys = clustered(tokens, thresholds, dtype=dtype, head_dim=head_dim, noise=0.9)
    assert (last_similar_truth(keys[3], 0.5) == -1).any(), "every row has a similar column"
    assert_as_reference(keys, thresholds, device)


def test_more_tokens_than_one_block_of_the_normaliser(device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    of = torch.randint(12, (1100,), generator=draw)
    keys = torch.eye(16)[of] + 0.02 * torch.randn(1100, 16, generator=draw)
    assert_as_reference([keys[None, :, None]], [0.5], device)


def test_more_heads_than_the_mean_takes_at_once(device: torch.device) -> None:
    thresholds = [0.5, 0.5]
    assert_as_reference(clustered([20, 35], thresholds, layers=3, kv_heads=7), thresholds, device)


def test_each_request_has_its_own_threshold(device: torch.device) -> None:
    """Below 0 the diagonal, which is 0, counts as similar too."""
    thresholds = [-1.0, -0.3, 0.0, 0.5, 0.9, 1.0]
    assert_as_reference(clustered([40, 33, 20, 70, 65, 31], thresholds), thresholds, device)


def test_zeros_and_tiny_keys(device: torch.device) -> None:
    """Norms below the floor of 1e-8 are no similarity, and no NaN."""
    (keys,) = clustered([50], [0.5])
    keys[:, [0, 7, 20, 49]] = 0.0
    keys[:, [3, 30]] *= 1e-10
    assert_as_reference([keys, 0.0 * keys[:, :5]], [0.5, 0.5], device)


def test_equal_and_opposite_keys(device: torch.device) -> None:
    (keys,) = clustered([45], [0.5])
    keys[:, 10:20] = keys[:, :10]
    keys[:, 20:30] = -keys[:, :10]
    assert_as_reference([keys, keys[:, :1].expand(-1, 40, -1, -1)], [0.5, 0.5], device)


@pytest.mark.parametrize("noise", [0.01, 0.5])
def test_keys_with_a_common_part(noise: float, device: torch.device) -> None:
    """All cosines near 1: column sums are large, their differences small."""
    keys = clustered([130], [0.5], noise=noise, seed=3)[0] * 0.1 + 2.0
    assert_as_reference([keys], [0.5], device)


def test_the_bits_depend_on_nothing_else(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the batch, nor on how many programs share the work, nor on the run."""
    thresholds = [0.5, 0.5, 0.9]
    keys = clustered([71, 150, 20], thresholds, dtype=torch.bfloat16)
    world = paged([one.to(device) for one in keys])
    together = scored(world, thresholds)
    for programs in (1, 5, world.paged.tasks):
        monkeypatch.setattr(PagedKeys, "programs", lambda *_, one=programs: one)
        for one, other in zip(together, scored(world, thresholds), strict=True):
            assert torch.equal(one, other)
    for b, redundancy in enumerate(together):
        assert torch.equal(redundancy, scored(world.alone(b), thresholds[b : b + 1])[0])


def test_only_the_requests_own_keys_are_loaded(device: torch.device) -> None:
    """The other slots hold NaN; and outside the search every key is loaded three times or less."""
    world = paged([keys.to(device) for keys in clustered([71, 40], [2.0, 2.0])])
    norms = torch.ones(2, 2, 111)
    limits = torch.full((2,), 1e9)
    bounds = torch.ones(2, 2, last_similar.bound_columns([71, 40]))
    with counted_loads(world.layers) as all_counts:
        scored(world, [2.0, 2.0])
    with counted_loads(world.layers) as search_counts:
        last_similar.last_similar_keys(world.paged, norms, bounds, limits)
    for all_loads, search_loads in zip(all_counts, search_counts, strict=True):
        own = torch.zeros(len(all_loads), dtype=torch.bool)
        for row, n in zip(world.rows, world.row_tokens, strict=True):
            own[world.req_to_token[row, :n].long()] = True
        assert not all_loads[~own].any()
        # Nothing is similar, so no row leaves a column out: its norm, and its column sum.
        assert torch.equal(
            all_loads - search_loads, own.long()[:, None, None].expand(-1, 2, 16) * 2
        )


def test_nobody_and_requests_without_tokens(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = clustered([33, 20], [0.5, 0.5])
    empty = keys[0][:, :0]
    world = paged([one.to(device) for one in (empty, keys[0], empty, keys[1])])
    found, expected = scored(world, [0.5] * 4), [scored(world.alone(b), [0.5])[0] for b in (1, 3)]
    assert [len(redundancy) for redundancy in found] == [0, 33, 0, 20]
    for one, other in zip((found[1], found[3]), expected, strict=True):
        assert torch.equal(one, other)
    forbid_launches(monkeypatch)
    assert module.key_redundancy(nobody(world), torch.zeros(0, device=device)).shape == (0,)


def test_offsets_beyond_two_to_the_31(device: torch.device) -> None:
    plain = paged([keys.to(device) for keys in clustered([50, 20], [0.5, 0.5], layers=1)])
    distant = far_away(plain)
    for one, other in zip(scored(plain, [0.5] * 2), scored(distant, [0.5] * 2), strict=True):
        assert torch.equal(one, other)


def test_launches_do_not_grow_with_the_batch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = paged([keys.to(device) for keys in clustered([20, 50, 33], [0.5] * 3, layers=4)])
    launched = counted_launches(monkeypatch)
    scored(world, [0.5] * 3)
    expected = ["_norms_kernel", "_last_similar_kernel", "_column_sums_kernel", "_mean_kernel"]
    assert launched == expected


def test_the_stated_workspace_is_what_it_takes(device: torch.device) -> None:
    """16 bytes per key, no matrix; and besides it nothing but the output."""
    tokens, thresholds = [71, 9, 130], [0.5] * 3
    world = paged([keys.to(device) for keys in clustered(tokens, thresholds)])
    limits = torch.tensor(thresholds, device=device)
    with Allocations() as taken:
        redundancy = module.key_redundancy(world.paged, limits)
    stated = kernel_bytes.key_redundancy(tokens, layers=2, kv_heads=2, head_dim=16)
    assert taken.total_bytes == stated + redundancy.nbytes

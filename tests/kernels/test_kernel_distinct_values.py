"""``kernels/distinct_values.py`` against the reference, on paged values."""

from __future__ import annotations

import pytest
import torch
from paged_world import PagedWorld, far_away, paged, poisoned_memory
from torch import Tensor
from triton_tools import FLOAT8S, FLOATS, assert_as_close, device_fixture

from sgl_skipkv.kernels import distinct_values as module
from sgl_skipkv.kernels import reference

device = device_fixture(module)
fixtures = (poisoned_memory,)  # for every test


def drawn(
    tokens: list[int], layers: int, heads: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Values of different sizes, [L, n, Hkv, d] of each request."""
    draw = torch.Generator().manual_seed(len(tokens))
    values = [torch.randn(layers, n, heads, head_dim, generator=draw) for n in tokens]
    sizes = [0.2 + torch.rand(1, n, 1, 1, generator=draw) for n in tokens]
    return [(v * size).to(dtype) for v, size in zip(values, sizes, strict=True)]


def weights_of(layers: int, heads: int) -> Tensor:
    """[layers, Hkv], of sum 1."""
    return (
        torch.rand(layers * heads, generator=torch.Generator().manual_seed(3))
        .softmax(0)
        .view(layers, heads)
    )


def found(world: PagedWorld, firsts: list[int], compared: range) -> list[tuple[Tensor, Tensor]]:
    """float32 [n], distance and size of each request, of the kernel."""
    starts = torch.tensor(firsts, device=world.rows.device)
    weights = weights_of(world.paged.layers, world.paged.kv_heads).to(starts.device)
    lengths = zip(world.row_tokens, firsts, strict=True)
    most = max(tokens - first for tokens, first in lengths)
    both = module.distinct_values(
        world.paged, starts, most_compared=most, weights=weights, compared=compared
    )
    assert all(one.dtype == torch.float32 for one in both)
    return list(zip(*(one.split(world.row_tokens) for one in both), strict=True))


def exact(values: Tensor, first: int, compared: range) -> tuple[Tensor, Tensor]:
    """float64 [n] each, pair by pair. values: [L, n, Hkv, d]."""
    v = values.double()
    u = v / v.norm(dim=3, keepdim=True)[:, first:].mean(dim=1, keepdim=True)
    weights = weights_of(len(v), v.shape[2]).double().to(v.device)
    size = (u.norm(dim=3) * weights[:, None]).sum(dim=(0, 2))
    flat = u[compared.start : compared.stop].permute(1, 0, 2, 3).flatten(1)
    distances = [flat.new_zeros(()) for _ in range(first)]
    for i in range(first, len(flat) - 1):
        gaps = (flat[i] - flat[i + 1 :]).square().sum(dim=1)
        both = flat[i].square().sum() + flat[i + 1 :].square().sum(dim=1)
        distances.append(gaps.where(gaps > both / 4096, 0.0).min().sqrt())
    parts = len(compared) * v.shape[2]
    return torch.stack([*distances, flat.new_zeros(())]) / parts**0.5, size


def assert_as_reference(
    of_request: list[Tensor], firsts: list[int], compared: range, device: torch.device
) -> None:
    world = paged([values.to(device) for values in of_request], seed=len(of_request))
    results = found(world, firsts, compared)
    for values, first, both in zip(world.of_request, firsts, results, strict=True):
        weights = weights_of(len(values), values.shape[2]).to(device)
        plain = reference.distinct_values(list(values), first, weights=weights, compared=compared)
        for one, referred, truth in zip(both, plain, exact(values, first, compared), strict=True):
            assert_as_close(one, referred, truth)


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_equals_the_reference(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Odd lengths, several tiles, one token and two, scrambled slots and rows."""
    tokens = [71, 1, 2, 150] if head_dim == 64 else [41, 1, 2, 70]
    values = drawn(tokens, 2, 2, head_dim, dtype)
    assert_as_reference(values, [10, 0, 1, 0], range(1), device)


@pytest.mark.parametrize("compared", [range(1), range(1, 2), range(1, 3), range(3)], ids=str)
def test_which_layers_are_compared(compared: range, device: torch.device) -> None:
    assert_as_reference(drawn([50, 33], 3, 2, 16, torch.float32), [4, 0], compared, device)


def test_what_is_repeated_is_near_and_the_later_one_is_not(device: torch.device) -> None:
    (values,) = drawn([40], 2, 1, 16, torch.float32)
    values[:, 30] = values[:, 5]
    (both,) = found(paged([values.to(device)], seed=1), [0], range(2))
    distance = both[0]
    assert distance[5] == distance[39] == 0 and distance[30] > 0.1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rounding_does_not_tell_repetitions_apart(dtype: torch.dtype, device: torch.device) -> None:
    """A value computed twice, in a batch of two and again alone, differs in its last bits."""
    (values,) = drawn([40], 2, 2, 64, torch.float32)
    values[:, 8:] = values[:, torch.arange(32) % 8] * (1 + 1e-6 * torch.randn(2, 32, 2, 64))
    cached = values.to(dtype)
    every = {"weights": weights_of(2, 2), "compared": range(2)}
    plain = reference.distinct_values(list(cached), 0, **every)[0]
    ((distance, _),) = found(paged([cached.to(device)], seed=1), [0], range(2))
    for one in (distance.cpu(), plain):
        assert (one[:32] == 0).all() and (one[32:39] > 0.1).all()


def test_a_request_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    values = [one.to(device) for one in drawn([70, 40, 90], 2, 2, 16, torch.bfloat16)]
    together = found(paged(values, seed=3), [8, 0, 8], range(1))
    for i, (own, first) in enumerate(zip(values, [8, 0, 8], strict=True)):
        (alone,) = found(paged([own], seed=4 + i), [first], range(1))
        assert all(map(torch.equal, alone, together[i]))


def test_slots_beyond_two_billion_numbers(device: torch.device) -> None:
    values = [one.to(device) for one in drawn([20], 1, 1, 16, torch.float32)]
    near = paged(values, seed=1)
    (here,), (there,) = found(near, [0], range(1)), found(far_away(near), [0], range(1))
    assert all(map(torch.equal, here, there))


def test_no_tokens(device: torch.device) -> None:
    world = paged([one.to(device) for one in drawn([0], 1, 1, 16, torch.float32)], seed=1)
    assert [one.shape for one in found(world, [0], range(1))[0]] == [(0,), (0,)]

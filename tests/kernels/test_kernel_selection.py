"""``kernels/selection.py`` against the sort in torch; tests/unit/test_select.py has the rest."""

from __future__ import annotations

import pytest
import torch
from paged_world import counted_launches, poisoned_memory
from torch import Tensor
from triton_tools import device_fixture

from sgl_skipkv.eviction import select as truth
from sgl_skipkv.kernels import selection as module

device = device_fixture(module)
fixtures = (poisoned_memory,)  # for every test
Ranges = list[tuple[int, int]]


def assert_as_sorted(scores: list[Tensor], protected: list[Ranges], keep: list[int]) -> None:
    expected, finite = truth.by_sort(scores, protected, keep)
    found, is_finite = truth.by_kernel(scores, protected, keep)
    assert torch.equal(is_finite, finite)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.kept, other.kept) and torch.equal(one.evicted, other.evicted)


@pytest.mark.parametrize("tokens", [[1], [1024, 1025, 7], [2500, 1], [3000]])
def test_rows_of_one_block_and_of_several(tokens: list[int], device: torch.device) -> None:
    draw = torch.Generator().manual_seed(sum(tokens))
    scores = [torch.randn(n, generator=draw).to(device) for n in tokens]
    protected = [[(0, n // 7), (n - n // 9, n)] for n in tokens]
    assert_as_sorted(scores, protected, [n // 7 + n // 9 + n // 3 for n in tokens])
    assert_as_sorted(scores, protected, tokens)


def test_ties_of_tokens_far_apart(device: torch.device) -> None:
    """Scores of few values, so that every cut goes through a tie across blocks."""
    draw = torch.Generator().manual_seed(1)
    scores = [torch.randint(-1, 2, (2300,), generator=draw).float().to(device) for _ in range(3)]
    scores[1] *= 0.0  # zeros of both signs
    assert_as_sorted(scores, [[], [(5, 2000)], [(2299, 2300)]], [1100, 2000, 3])


def test_every_bit_of_a_score_counts(device: torch.device) -> None:
    """Neighbouring floats, subnormal and huge ones, of both signs; and what is no number."""
    whole = torch.tensor([1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1e-38])
    bits = whole.view(torch.int32)
    near = torch.cat([bits, bits - 1, bits[:-1] ^ 1]).view(torch.float32)
    broken = torch.tensor([float("nan"), float("inf"), -float("inf")])
    scores = torch.cat([near, broken, near.flip(0)]).to(device)
    scores = scores.where(scores.isfinite() | (torch.arange(len(scores), device=device) > 19), 0.0)
    for keep in range(len(scores) + 1):
        assert_as_sorted([scores], [[]], [keep])


def test_one_launch_or_none(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = counted_launches(monkeypatch)
    scores = [torch.zeros(9, device=device)] * 5
    truth.by_kernel(scores, [[]] * 5, [3] * 5)
    assert launched == ["_select_kernel"]
    none, zero = torch.zeros(0, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    kept, evicted, finite = module.select_tokens(none, zero, zero, zero[:0], zero, 0)
    assert kept.shape == evicted.shape == finite.shape == (0,) and len(launched) == 1

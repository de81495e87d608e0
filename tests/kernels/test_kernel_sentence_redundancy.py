"""Sentence redundancy by the kernel, in one launch, against ``reference.sentence_redundancy`` per
request."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_tools import FLOATS, assert_as_close, device_fixture, far_tensor, forbid_launches

from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels import sentence_redundancy as module
from sgl_skipkv.kernels.sentence_redundancy import sentence_redundancy

device = device_fixture(module)
CAPACITY = 75


def tables(
    width: int, tracks: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Vectors some of which repeat others nearly."""
    ideas = torch.randn(12, width, device=device)
    which = torch.randint(0, 12, (tracks + 1, CAPACITY), device=device)
    vectors = ideas[which] + 0.3 * torch.randn(tracks + 1, CAPACITY, width, device=device)
    return (vectors / vectors.norm(dim=-1, keepdim=True)).to(dtype)


def exact(vectors: Tensor) -> Tensor:
    """In float64, pair by pair."""
    unit = vectors.double() / vectors.double().norm(dim=-1, keepdim=True).clamp_min(1e-8)
    best = torch.full((len(unit),), -1.0, dtype=torch.float64, device=unit.device)
    for i in range(len(unit) - 1):
        best[i] = (unit[i + 1 :] @ unit[i]).max()
    return best


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 48, 130])
def test_a_batch_of_requests(device: torch.device, width: int, dtype: torch.dtype) -> None:
    """Tables of all lengths, tracks in any order; what lies beyond a table stays out of it."""
    torch.manual_seed(width)
    counts = [33, 0, 2, 75, 1, 32, 64]
    tracks = [3, 8, 1, 6, 2, 7, 4]
    vectors = tables(width, 8, device, dtype)
    for track, count in zip(tracks, counts, strict=True):
        vectors[track, count:] = float("nan")
    rows = sentence_redundancy(
        vectors,
        torch.tensor(tracks, device=device),
        torch.tensor(counts, device=device),
        max_count=75,
    )
    for row, track, count in zip(rows, tracks, counts, strict=True):
        assert (row[max(0, count - 1) :] == -1.0).all()
        if count > 1:
            used = vectors[track, :count]
            assert_as_close(row[:count], reference.sentence_redundancy(used), exact(used))


def test_the_same_bits_alone_and_in_a_batch(device: torch.device) -> None:
    vectors = tables(100, 4, device)
    tracks, counts = (
        torch.tensor([2, 4, 1], device=device),
        torch.tensor([40, 75, 33], device=device),
    )
    together = sentence_redundancy(vectors, tracks, counts, max_count=75)
    for b in range(3):
        own = tracks[b : b + 1], counts[b : b + 1]
        [alone] = sentence_redundancy(vectors, *own, max_count=int(counts[b]))
        assert torch.equal(together[b], alone)


def test_negative_similarities_and_zero_vectors(device: torch.device) -> None:
    """The maximum is one of signed numbers, and a zero vector is similar to nothing."""
    vectors = torch.zeros(2, 4, 3, device=device)
    vectors[1, 1:3] = torch.tensor([[1.0, 0, 0], [-0.6, 0.8, 0]], device=device)
    track = torch.tensor([1], device=device)
    for count, expected in ((3, [0.0, -0.6, -1.0, -1.0]), (4, [0.0, 0.0, 0.0, -1.0])):
        counts = torch.tensor([count], device=device)
        [row] = sentence_redundancy(vectors, track, counts, max_count=4)
        assert row.tolist() == pytest.approx(expected)


def test_offsets_beyond_int32(device: torch.device) -> None:
    tracks = 2**21 + 2
    vectors = far_tensor((tracks, 2, 512), torch.float32, device)
    vectors[tracks - 1] = 0.5
    track, count = torch.tensor([tracks - 1], device=device), torch.tensor([2], device=device)
    [row] = sentence_redundancy(vectors, track, count, max_count=2)
    assert row.tolist() == pytest.approx([1.0, -1.0])


def test_nothing_to_compare_launches_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_launches(monkeypatch)
    vectors, none = tables(8, 2, device), torch.zeros(0, dtype=torch.int64, device=device)
    assert sentence_redundancy(vectors, none, none, max_count=9).shape == (0, CAPACITY)
    one = torch.ones(1, dtype=torch.int64, device=device)
    assert (sentence_redundancy(vectors, one, one, max_count=1) == -1.0).all()


def test_what_does_not_fit_is_refused() -> None:
    one, vectors = torch.ones(1, dtype=torch.int64), torch.zeros(3, 5, 8)
    for most in (6, -1):
        with pytest.raises(ValueError, match=rf"^max_count: expected \[0, 5\], got {most}$"):
            sentence_redundancy(vectors, one, one, max_count=most)
    with pytest.raises(ValueError, match=r"^vectors: expected a contiguous tensor"):
        sentence_redundancy(vectors.transpose(0, 1), one, one, max_count=2)

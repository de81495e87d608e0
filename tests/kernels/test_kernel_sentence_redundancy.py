"""Sentence redundancy by the kernel, in one launch, against ``SentenceTable.compare`` per
request."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_tools import FLOATS, assert_as_close, device_fixture, far_tensor, forbid_launches

from sgl_skipkv.kernels import sentence_redundancy as module
from sgl_skipkv.kernels.sentence_redundancy import raise_redundancy
from sgl_skipkv.recording.sentence_table import SentenceTable
from sgl_skipkv.recording.sentences import Delimiters

device = device_fixture(module)
CAPACITY = 75


@pytest.fixture(autouse=True)
def truth_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU ``SentenceTable`` would launch the kernel that it is the truth of."""
    monkeypatch.setattr("sgl_skipkv.recording.sentence_table.uses_triton", lambda device: False)


def table(
    width: int, tracks: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> SentenceTable:
    """Vectors some of which repeat others nearly, in tables full of NaN; earlier comparisons."""
    made = SentenceTable(tracks, CAPACITY, width, Delimiters([], 4), dtype, device)
    ideas = torch.randn(12, width, device=device)
    which = torch.randint(0, 12, (tracks + 1, CAPACITY), device=device)
    vectors = ideas[which] + 0.3 * torch.randn(tracks + 1, CAPACITY, width, device=device)
    made.vectors.copy_(vectors / vectors.norm(dim=-1, keepdim=True))
    made.redundancy.uniform_(-1.0, 0.9)
    return made


def exact(vectors: Tensor, redundancy: Tensor) -> Tensor:
    """In float64, pair by pair."""
    unit = vectors.double() / vectors.double().norm(dim=-1, keepdim=True).clamp_min(1e-8)
    found = redundancy.double()
    for i in range(len(unit) - 1):
        found[i] = max(found[i], (unit[i + 1 :] @ unit[i]).max())
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 48, 130])
def test_a_batch_of_requests(device: torch.device, width: int, dtype: torch.dtype) -> None:
    """Tables of all lengths, tracks in any order; what lies beyond a table stays out of it."""
    torch.manual_seed(width)
    counts = [33, 0, 2, 75, 1, 32, 64]
    tracks = [3, 8, 1, 6, 2, 7, 4]
    truth = table(width, 8, device, dtype)
    for track, count in zip(tracks, counts, strict=True):
        truth.vectors[track, count:] = float("nan")
        truth.redundancy[track, count:] = -7.0  # below what any comparison could raise it to
    found = truth.redundancy.clone()
    raise_redundancy(
        truth.vectors,
        found,
        torch.tensor(tracks, device=device),
        torch.tensor(counts, device=device),
        max_count=75,
    )
    raised = 0
    for track, count in zip(tracks, counts, strict=True):
        before = truth.redundancy[track].clone()
        entries = range(track * truth.capacity, track * truth.capacity + count)
        [compared] = truth.compare([track], [count], [[(0, 1)] * count], [entries], [])
        expected = compared.redundancy
        goal = exact(truth.vectors[track, :count], before[:count])
        assert_as_close(found[track, :count], expected, goal)
        assert torch.equal(found[track, count:], before[count:])
        assert torch.equal(found[track, :count] == before[:count], expected == before[:count])
        raised += int((expected > before[:count]).sum())
        truth.redundancy[track] = found[track]
    assert raised > 50
    assert torch.equal(found, truth.redundancy)  # the tracks that nobody named among them


def test_the_same_bits_alone_again_and_in_a_batch(device: torch.device) -> None:
    made = table(100, 4, device)
    tracks, counts = (
        torch.tensor([2, 4, 1], device=device),
        torch.tensor([40, 75, 33], device=device),
    )
    together, apart = made.redundancy.clone(), made.redundancy.clone()
    raise_redundancy(made.vectors, together, tracks, counts, max_count=75)
    for b in (1, 2, 0):
        one = slice(b, b + 1)
        raise_redundancy(made.vectors, apart, tracks[one], counts[one], max_count=int(counts[b]))
    assert torch.equal(together, apart) and not torch.equal(together, made.redundancy)
    raise_redundancy(made.vectors, together, tracks, counts, max_count=75)
    assert torch.equal(together, apart)


def test_negative_similarities_and_zero_vectors(device: torch.device) -> None:
    """The maximum is one of signed numbers, and a zero vector is similar to nothing."""
    vectors = torch.zeros(2, 4, 3, device=device)
    vectors[1, 1:3] = torch.tensor([[1.0, 0, 0], [-0.6, 0.8, 0]], device=device)
    redundancy = torch.full((2, 4), -1.0, device=device)
    track = torch.tensor([1], device=device)
    raise_redundancy(vectors, redundancy, track, torch.tensor([3], device=device), max_count=4)
    assert redundancy[1].tolist() == pytest.approx([0.0, -0.6, -1.0, -1.0])
    raise_redundancy(vectors, redundancy, track, torch.tensor([4], device=device), max_count=4)
    assert redundancy[1].tolist() == [0.0, 0.0, 0.0, -1.0]


def test_offsets_beyond_int32(device: torch.device) -> None:
    tracks = 2**21 + 2
    vectors = far_tensor((tracks, 2, 512), torch.float32, device)
    redundancy = far_tensor((tracks, 2), torch.float32, device)
    vectors[tracks - 1] = 0.5
    track, count = torch.tensor([tracks - 1], device=device), torch.tensor([2], device=device)
    raise_redundancy(vectors, redundancy, track, count, max_count=2)
    assert redundancy[tracks - 1].tolist() == pytest.approx([1.0, 0.0])
    assert not redundancy[1].any()


def test_nothing_to_compare_launches_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_launches(monkeypatch)
    made, none = table(8, 2, device), torch.zeros(0, dtype=torch.int64, device=device)
    before = made.redundancy.clone()
    raise_redundancy(made.vectors, made.redundancy, none, none, max_count=9)
    one = torch.ones(1, dtype=torch.int64, device=device)
    raise_redundancy(made.vectors, made.redundancy, one, one, max_count=1)
    assert torch.equal(made.redundancy, before)


def test_what_does_not_fit_is_refused() -> None:
    one, vectors = torch.ones(1, dtype=torch.int64), torch.zeros(3, 5, 8)
    for shape, most in (((3, 4), 2), ((3, 5), 6), ((3, 5), -1)):
        with pytest.raises(ValueError, match=r"^redundancy, max_count: expected \[3, 5\]"):
            raise_redundancy(vectors, torch.zeros(shape), one, one, max_count=most)
    with pytest.raises(ValueError, match=r"^redundancy: expected a contiguous tensor"):
        raise_redundancy(vectors, torch.zeros(5, 3).t(), one, one, max_count=2)

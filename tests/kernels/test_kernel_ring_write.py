"""The ring of recent queries, written by the kernel: byte for byte what ``QueryRings`` writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_tools import FLOATS, device_fixture, far_tensor, forbid_launches

from sgl_skipkv.kernels import ring_write as module
from sgl_skipkv.kernels.ring_write import ring_write
from sgl_skipkv.recording.recorder import QueryRings

device = device_fixture(module)
WINDOW, TRACKS = 7, 6


@pytest.fixture(autouse=True)
def truth_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU ``QueryRings`` would launch the kernel that it is the truth of."""
    monkeypatch.setattr("sgl_skipkv.recording.recorder.uses_triton", lambda device: False)


def as_bytes(tensor: Tensor) -> Tensor:
    """So that a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def poisoned_ring(
    heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> QueryRings:
    sizes = (2, TRACKS + 1, WINDOW, heads, head_dim)
    return QueryRings(torch.full(sizes, float("nan"), dtype=dtype, device=device))


def fused(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Queries as a view of a fused QKV product, whose rows lie apart."""
    qkv = torch.randn(tokens, (heads + 4) * head_dim, dtype=torch.float32).to(dtype)
    return qkv[:, : heads * head_dim].view(tokens, heads, head_dim)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"), [(5, 3, 40), (1, 12, 128), (4, 28, 64), (3, 1, 8)]
)
def test_the_ring_is_what_torch_writes(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: int, head_dim: int
) -> None:
    torch.manual_seed(tokens)
    truth, found = (poisoned_ring(heads, head_dim, dtype, device) for _ in range(2))
    tracks = torch.tensor([4, 1, 6, 2, 5], device=device)[:tokens]
    positions = torch.tensor([0, WINDOW, 2**40 + 3, 6, 123], device=device)[:tokens]
    for step in range(3):
        q = fused(tokens, heads, head_dim, dtype).to(device)
        truth.write(1, tracks, positions + step, q)
        ring_write(q, tracks, positions + step, found.data[1])
    assert not truth.data[1].isnan().all()
    assert torch.equal(as_bytes(found.data), as_bytes(truth.data))


def test_tokens_without_a_track_write_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of untracked requests, the padding of a captured batch, and an empty one."""
    truth, found = (poisoned_ring(2, 24, torch.float32, device) for _ in range(2))
    tracks = torch.tensor([0, 5, 0, 3, 0, 0, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([9, 8, 7, 6, 5, 4, 0], device=device)
    q = torch.randn(7, 2, 24, device=device)
    tracked = torch.tensor([1, 3], device=device)
    truth.write(0, tracks[tracked].long(), positions[tracked], q[tracked])
    ring_write(q, tracks, positions, found.data[0])
    assert torch.equal(as_bytes(found.data), as_bytes(truth.data))
    assert found.data[0, 0].isnan().all()

    ring_write(q, torch.zeros_like(tracks), positions + 1, found.data[0])
    forbid_launches(monkeypatch)
    ring_write(q[:0], tracks[:0], positions[:0], found.data[0])
    assert torch.equal(as_bytes(found.data), as_bytes(truth.data))


@pytest.mark.parametrize("ring_dtype", FLOATS, ids=str)
def test_flat_queries_and_another_dtype(device: torch.device, ring_dtype: torch.dtype) -> None:
    truth, found = (poisoned_ring(3, 40, ring_dtype, device) for _ in range(2))
    tracks, positions = (
        torch.tensor([6, 2, 4], device=device),
        torch.tensor([1, 2, 3], device=device),
    )
    q = torch.randn(3, 120, device=device)
    truth.write(0, tracks, positions, q.view(3, 3, 40))
    ring_write(q, tracks, positions, found.data[0])
    assert torch.equal(as_bytes(found.data), as_bytes(truth.data))


def test_offsets_beyond_int32(device: torch.device) -> None:
    tracks = 2**21 + 2
    ring = far_tensor((tracks, 8, 1, 128), torch.float16, device)
    q = far_tensor((3, 2**30 + 64), torch.float16, device)[:, :128]
    q[2] = torch.arange(128, device=device)
    where = torch.tensor([0, 0, tracks - 1], device=device)
    ring_write(q, where, torch.tensor([0, 0, 13], device=device), ring)
    assert torch.equal(ring[tracks - 1, 5, 0], q[2])
    assert not ring[1].any() and not ring[tracks - 1, 4].any() and not ring[tracks - 1, 6].any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    ring, one = torch.zeros(3, WINDOW, 4, 8), torch.ones(1, dtype=torch.int64)
    for q in (torch.zeros(1, 4, 9), torch.zeros(1, 31), torch.zeros(1, 8, 4).transpose(1, 2)):
        with pytest.raises(ValueError, match=r"^q: expected contiguous rows of 4 \* 8 numbers"):
            ring_write(q, one, one, ring)
    with pytest.raises(ValueError, match=r"^ring: expected a contiguous tensor"):
        ring_write(torch.zeros(1, 32), one, one, torch.zeros(3, WINDOW, 4, 16)[..., ::2])

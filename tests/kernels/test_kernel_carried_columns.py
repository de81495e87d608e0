"""``kernels/carried_columns.py``: where a spared column is after a compaction, or what is left."""

from __future__ import annotations

import pytest
import torch
from paged_world import poisoned_memory
from torch import Tensor
from triton_tools import device_fixture, far_tensor, forbid_launches

from sgl_skipkv.kernels import carried_columns as module
from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels.carried_columns import bytes_moved, carried_columns

device = device_fixture(module)
fixtures = (poisoned_memory,)  # for every test


def drawn(layers: int, kv_heads: int, tokens: list[int], seed: int) -> list[Tensor]:
    """Per request columns, "none" and "none but perhaps among the first m", views of one tensor."""
    draw = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(-1 - n, max(n, 1), (layers, kv_heads, n), generator=draw) for n in tokens
    ]
    return list(torch.cat(parts, 2).to(torch.int32).split(tokens, dim=2))


def by_counting(spared: Tensor, kept: Tensor) -> Tensor:
    """The definition, one entry at a time. spared: int32 [H, n]."""
    stay = kept.tolist()
    now = []
    for head in spared.tolist():
        for row in stay:
            column = head[row] if head[row] >= 0 else -1 - head[row]
            place = sum(other < column for other in stay)
            now.append(place if head[row] in stay else -1 - place)
    return torch.tensor(now, dtype=torch.int32).view(len(spared), len(stay))


def test_the_reference_by_counting() -> None:
    for seed in range(20):
        spared = drawn(1, 3, [23], seed)[0][0]
        kept = (torch.rand(23) < 0.6).nonzero()[:, 0]
        assert torch.equal(reference.carried_columns(spared, kept), by_counting(spared, kept))


def test_row_by_row(device: torch.device) -> None:
    """A column that lives moves; one that is gone leaves how many of those below it live."""
    spared = torch.tensor([[[7, -1, 3, 4, 2, 0, 4, 1]]], dtype=torch.int32, device=device)
    for rows, expected in (
        ([0, 1, 2, 5, 6, 7], [[[5, -1, -4, 0, -4, 1]]]),
        ([2, 3, 6], [[[1, -3, -3]]]),
    ):
        (now,) = carried_columns([spared], [torch.tensor(rows, device=device)])
        assert now.tolist() == expected


@pytest.mark.parametrize("heads", [(1, 1), (3, 2), (2, 8), (28, 4)], ids=str)
def test_a_batch(heads: tuple[int, int], device: torch.device) -> None:
    """Of every kind: one row, blocks of exactly 128, all kept, none, the front, the back."""
    tokens = [1, 1, 300, 256, 129, 128, 70, 400, 90]
    everything = [torch.arange(n) for n in tokens]
    kept = [
        everything[0],
        everything[1][:0],
        (torch.rand(300) < 0.5).nonzero()[:, 0],
        everything[3],
        everything[4][1:],
        everything[5][:0],
        everything[6][:1],
        everything[7][-255:],
        everything[8][89:],
    ]
    spared = [one.to(device) for one in drawn(*heads, tokens, seed=sum(heads))]
    found = carried_columns(spared, [rows.to(device) for rows in kept])
    for one, rows, now in zip(spared, kept, found, strict=True):
        assert now.dtype == torch.int32 and now.is_contiguous()
        assert torch.equal(now.cpu(), reference.carried_columns(one.cpu(), rows))


def test_memory_of_its_own(device: torch.device) -> None:
    """What one request carries does not keep the batch's alive."""
    spared = [one.to(device) for one in drawn(2, 2, [40, 60], 1)]
    found = carried_columns(spared, [torch.arange(30, device=device)] * 2)
    assert [one.untyped_storage().nbytes() for one in found] == [4 * 4 * 30] * 2


def test_heads_far_apart(device: torch.device) -> None:
    """Heads of a batch of many tokens lie more than 2**31 entries from one another."""
    distance = 2**31 + 64
    memory = far_tensor((distance + 8,), torch.int32, device)
    spared = memory.as_strided((1, 2, 8), (2 * distance, distance, 1))
    values = drawn(1, 2, [8], 3)[0]
    spared.copy_(values)
    kept = torch.tensor([1, 4, 6])
    (now,) = carried_columns([spared], [kept.to(device)])
    assert torch.equal(now.cpu(), reference.carried_columns(values, kept))


def test_nothing_to_do(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch)
    assert carried_columns([], []) == []
    none = torch.zeros(0, dtype=torch.int64, device=device)
    (now,) = carried_columns([drawn(2, 2, [5], 0)[0].to(device)], [none])
    assert now.shape == (2, 2, 0)


def test_what_it_refuses(device: torch.device) -> None:
    spared = drawn(2, 2, [6], 0)[0].to(device)
    kept = torch.arange(6, device=device)
    with pytest.raises(ValueError, match=r"expected \[2, 2, n\] with heads at one distance"):
        carried_columns([spared, spared[:1]], [kept, kept])
    with pytest.raises(ValueError, match="contiguous tokens"):
        carried_columns([spared], [torch.arange(12, device=device)[::2]])
    with pytest.raises(ValueError, match="zip"):
        carried_columns([spared], [])


def test_bytes_of_a_batch() -> None:
    moved = bytes_moved(100, requests=3, layers=2, kv_heads=4)
    assert moved == {"spared": 6400, "selections": 800, "requests": 168}

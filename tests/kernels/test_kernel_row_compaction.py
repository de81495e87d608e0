"""Page-table rows rewritten by the kernel: exactly what ``compact_row`` does, for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from row_rewrites import compact_row
from torch import Tensor
from triton_tools import device_fixture, far_tensor, forbid_launches

from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels import row_compaction as module
from sgl_skipkv.kernels.row_compaction import compact_rows

device = device_fixture(module)
WIDTH = 2600
POISON = -7


def offsets(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(len(part) for part in parts)], device=device)


def flat(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts]).to(device)


def partition(row_tokens: int, keep: Tensor) -> Selection:
    everything = torch.arange(row_tokens)
    return Selection(everything[keep], everything[~keep])


def compacted(
    table: Tensor,
    rows: Sequence[int],
    selections: Sequence[Selection],
    positions: Sequence[Tensor],
    row_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    device = table.device
    kept, evicted = [s.kept for s in selections], [s.evicted for s in selections]
    every = flat(positions, device)
    freed, stayed = (every.new_empty(sum(map(len, half))) for half in (evicted, kept))
    compact_rows(
        table,
        torch.tensor(rows, dtype=row_dtype, device=device),
        flat(kept, device),
        offsets(kept, device),
        flat(evicted, device),
        offsets(evicted, device),
        every,
        freed,
        stayed,
    )
    return freed, stayed


def assert_as_one_by_one(
    device: torch.device, rows: Sequence[int], selections: Sequence[Selection], width: int = WIDTH
) -> None:
    """The same rows, freed slots and positions as of ``compact_row`` on each request by itself."""
    lengths = [s.kept.shape[0] + s.evicted.shape[0] for s in selections]
    table = torch.full((max(rows) + 2, width), POISON, dtype=torch.int32)
    slots = torch.randperm(sum(lengths)).to(torch.int32) + 1
    positions = []
    for row, n, own in zip(rows, lengths, slots.split(lengths), strict=True):
        table[row, :n] = own
        positions.append(torch.randperm(9 * n)[:n].sort().values)
    truth, found = table.clone(), table.to(device)
    freed, kept_positions = compacted(found, rows, selections, positions)
    one_by_one = [
        compact_row(truth, row, n, selection, check=True)
        for row, n, selection in zip(rows, lengths, selections, strict=True)
    ]
    assert torch.equal(found.cpu(), truth)
    assert freed.dtype == kept_positions.dtype == torch.int64
    assert torch.equal(freed.cpu(), flat(one_by_one, torch.device("cpu")))
    own = [p[s.kept] for p, s in zip(positions, selections, strict=True)]
    assert torch.equal(kept_positions.cpu(), flat(own, torch.device("cpu")))


@pytest.mark.parametrize("block", [256, 1024, 4096])
def test_a_batch_of_selections(
    device: torch.device, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind: one entry, blocks of exactly 1024, all kept, none, the front, the back."""
    monkeypatch.setattr(module, "_BLOCK", block)
    torch.manual_seed(3)
    n = torch.arange(WIDTH)
    selections = [
        partition(1, torch.tensor([True])),
        partition(1, torch.tensor([False])),
        partition(2500, torch.rand(2500) < 0.5),
        partition(1024, torch.ones(1024, dtype=torch.bool)),
        partition(1025, torch.zeros(1025, dtype=torch.bool)),
        partition(WIDTH, n >= 1100),  # every entry moves by more than a block
        partition(2049, n[:2049] != 0),  # every entry moves by one, across the blocks' borders
        partition(2100, n[:2100] < 1030),
        partition(2048, n[:2048] % 3 == 1),
        partition(777, torch.rand(777) < 0.1),
    ]
    assert_as_one_by_one(device, [4, 11, 2, 9, 0, 7, 3, 12, 6, 1], selections)


def test_rows_longer_than_a_block(device: torch.device) -> None:
    torch.manual_seed(9)
    n = torch.arange(9000)
    assert len(n) > 2 * module._BLOCK
    selections = [partition(9000, keep) for keep in (torch.rand(9000) < 0.95, n > 0, n >= 4000)]
    assert_as_one_by_one(device, [2, 0, 1], selections, width=9000)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 512)
    torch.manual_seed(seed)
    lengths = torch.randint(1, 1500, (3,)).tolist()
    selections = [partition(n, torch.rand(n) < torch.rand(1)) for n in lengths]
    assert_as_one_by_one(device, torch.randperm(9)[:3].tolist(), selections)


def test_evicted_entries_come_back_in_their_own_order(device: torch.device) -> None:
    table = torch.tensor([[0, 0, 0, 0], [5, 9, 7, 3]], dtype=torch.int32, device=device)
    selection = Selection(torch.tensor([1]), torch.tensor([3, 0, 2]))
    freed, positions = compacted(table, [1], [selection], [torch.tensor([0, 4, 5, 8])])
    assert freed.tolist() == [3, 5, 7] and positions.tolist() == [4]
    assert table.tolist() == [[0, 0, 0, 0], [9, 0, 0, 0]]


def test_a_wider_table_than_its_rows(device: torch.device) -> None:
    """Rows of a view, and request rows as int32."""
    whole = torch.arange(1, 61, dtype=torch.int32, device=device).view(5, 12)
    table = whole[:, 2:10]
    stays = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 0, 1]]).bool()
    selections = [partition(4, stays[0, :4]), partition(5, stays[1])]
    compacted(table, [3, 1], selections, [torch.arange(4), torch.arange(5)], torch.int32)
    expected = torch.arange(1, 61, dtype=torch.int32).view(5, 12)
    expected[3, 2:6] = torch.tensor([41, 42, 0, 0])
    expected[1, 2:7] = torch.tensor([16, 19, 0, 0, 0])
    assert torch.equal(whole.cpu(), expected)


def test_offsets_beyond_int32(device: torch.device) -> None:
    table = far_tensor((2**16 + 2, 2**15), torch.int32, device)
    table[-1, :4] = torch.tensor([11, 12, 13, 14])
    selection = Selection(torch.tensor([1, 3]), torch.tensor([0, 2]))
    freed, _ = compacted(table, [2**16 + 1], [selection], [torch.arange(4)])
    assert freed.tolist() == [11, 13]
    assert table[-1, :5].tolist() == [12, 14, 0, 0, 0] and not table[1].any()


def test_what_does_not_fit_is_refused_and_an_empty_batch_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid_launches(monkeypatch)
    table = torch.ones(2, 8, dtype=torch.int32)
    freed, positions = compacted(table, [], [], [])
    assert freed.shape == positions.shape == (0,) and table.all()
    table, two = torch.ones(2, 8, dtype=torch.int32), torch.arange(2)
    one, ends = torch.ones(1, dtype=torch.int64), torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"^positions: expected 2 \+ 2 for contiguous rows, got 2"):
        compact_rows(table, one, two, ends, two, ends, two, two, two)
    with pytest.raises(ValueError, match=r"^positions: expected 2 \+ 2 for contiguous rows"):
        compact_rows(table.t(), one, two, ends, two, ends, torch.arange(4), two, two)
    with pytest.raises(ValueError, match=r"^kept_offsets, evicted_offsets: expected 1 \+ 1"):
        compact_rows(table, one, two, ends, two, torch.tensor([2]), torch.arange(4), two, two)

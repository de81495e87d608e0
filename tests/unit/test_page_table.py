"""Rewriting one row of the page table against plain lists; the ledger against planted faults."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_rewrites import compact_row
from torch import Tensor

from sgl_skipkv.eviction.ledger import LedgerError, check_ledger
from sgl_skipkv.eviction.select import Selection

WIDTH = 24


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[int]], int, int, list[bool]]:
    """Rows of distinct slots, which row, how many entries it uses, and which of them stay."""
    rows = draw(st.integers(1, 4))
    slots = draw(st.permutations(range(1, rows * WIDTH + 1)))
    table = [list(slots[i * WIDTH : (i + 1) * WIDTH]) for i in range(rows)]
    used = draw(st.integers(0, WIDTH))
    stays = draw(st.lists(st.booleans(), min_size=used, max_size=used))
    return table, draw(st.integers(0, rows - 1)), used, stays


@settings(max_examples=200)
@given(tables(), st.booleans())
def test_compaction_equals_the_list_model(
    problem: tuple[list[list[int]], int, int, list[bool]], check: bool
) -> None:
    table, row, used, stays = problem
    device = torch.tensor(table, dtype=torch.int32)
    mask = torch.tensor(stays, dtype=torch.bool)
    selection = Selection(mask.nonzero().flatten(), (~mask).nonzero().flatten())
    freed = compact_row(device, row, used, selection, check=check)

    old, tail = table[row][:used], table[row][used:]
    kept = [slot for slot, stay in zip(old, stays, strict=True) if stay]
    lost = [slot for slot, stay in zip(old, stays, strict=True) if not stay]
    assert freed.dtype == torch.int64 and freed.tolist() == lost
    expected = [list(line) for line in table]
    expected[row] = kept + [0] * len(lost) + tail
    assert device.tolist() == expected and device.dtype == torch.int32


OLD = [7, 3, 9, 4, 12]


@pytest.mark.parametrize(
    ("old", "kept", "freed"),
    [
        (OLD, [7, 3], [9, 4]),  # lost
        (OLD, [7, 3, 9], [9, 4, 12]),  # in both halves
        (OLD, [7, 3, 3], [9, 4]),  # doubled, another lost
        (OLD, [7, 3, 9], [4, 13]),  # invented
        (OLD, [7, 3, 9], [4, 4]),  # freed twice
        (OLD, [], []),  # all lost
        ([7, 3, 0], [7, 3], [0]),  # slot 0 belongs to nobody
        ([7, 3, 3], [7, 3], [3]),  # the row itself named a slot twice
        ([], [5], []),  # out of nothing
    ],
)
def test_ledger_sees_each_fault(old: list[int], kept: list[int], freed: list[int]) -> None:
    with pytest.raises(LedgerError):
        check_ledger(ints(old), ints(kept), ints(freed))


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kept", "evicted"),
    [([0, 1], [2, 3]), ([0, 1, 2], [2, 3, 4]), ([0, 0, 1], [2, 3, 4]), ([0, 1], [3, 3, 4])],
)
def test_checked_compaction_refuses_before_it_writes(kept: list[int], evicted: list[int]) -> None:
    table = torch.tensor([OLD], dtype=torch.int32)
    selection = Selection(torch.tensor(kept), torch.tensor(evicted))
    with pytest.raises(LedgerError):
        compact_row(table, 0, len(OLD), selection, check=True)
    assert table.tolist() == [OLD]

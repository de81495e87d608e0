"""Rows in pages of several tokens, against plain lists; the check against planted faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scarce import Scarce
from torch import Tensor

from sgl_skipkv.eviction.compaction import Compaction, Plan
from sgl_skipkv.eviction.kv_move import KVMove
from sgl_skipkv.eviction.ledger import LedgerError, check_pages
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.request.pages import page_ceil, page_floor

WIDTH = 40


def plan(row: int, stays: list[bool], head: int) -> Plan:
    keep = torch.tensor(stays, dtype=torch.bool)
    entries = torch.arange(len(stays))
    state = SimpleNamespace(row=row, kv=SimpleNamespace(statistics={}), held=SimpleNamespace())
    selection = Selection(entries[keep], entries[~keep])
    positions = entries * 2
    lengths = len(stays), 2 * len(stays)
    return Plan(state, selection, head, positions, torch.tensor(True), *lengths, None)  # type: ignore[arg-type]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[list[bool]], list[int], list[int]]:
    """Page size, which entries of each row stay, first entries that are not to be moved, pages."""
    page = draw(st.sampled_from([2, 4, 16]))
    rows = draw(
        st.lists(st.lists(st.booleans(), min_size=1, max_size=WIDTH), min_size=1, max_size=3)
    )
    heads = [draw(st.integers(0, len(row))) for row in rows]
    for row, head in zip(rows, heads, strict=True):
        row[:head] = [True] * head
    pages = draw(st.permutations(range(1, len(rows) * page_ceil(WIDTH, page) // page + 1)))
    return page, rows, heads, list(pages)


@settings(max_examples=200, deadline=None)
@given(worlds(), st.booleans())
def test_a_compaction_in_pages_equals_the_list_model(
    world: tuple[int, list[list[bool]], list[int], list[int]], check: bool
) -> None:
    page, rows, heads, pages = world
    table = torch.zeros(len(rows) + 1, WIDTH + 16, dtype=torch.int32)
    owned = []
    for row, stays in enumerate(rows, start=1):
        own = [pages.pop() for _ in range(page_ceil(len(stays), page) // page)]
        slots = [p * page + i for p in own for i in range(page)][: len(stays)]
        table[row, : len(stays)] = torch.tensor(slots)
        owned.append(slots)
    buffers = [torch.randn(200, 2, 3) for _ in range(2)] + [torch.randn(200, 1, 5)]
    before = [buffer.clone() for buffer in buffers]
    plans = [plan(row, *one) for row, one in enumerate(zip(rows, heads, strict=True), start=1)]
    recorder: Any = None
    done = Compaction(plans, table, recorder, page_tokens=page, buffers=buffers, check=check)
    assert all(map(torch.equal, buffers, before)), "nothing moves before it is applied"
    counted = Scarce()
    with counted:
        done._move.apply()  # type: ignore[union-attr]
        done._rows.write()
    assert counted.allocations == 0
    untouched = torch.ones(200, dtype=torch.bool)
    for row, stays, slots, vacated, freed in zip(
        range(1, 9), rows, owned, done.vacated, done.freed, strict=False
    ):
        kept = [slot for slot, stay in zip(slots, stays, strict=True) if stay]
        keep = len(kept)
        assert table[row].tolist() == slots[:keep] + [0] * (WIDTH + 16 - keep)
        assert vacated.tolist() == slots[keep:]
        assert freed.tolist() == slots[page_ceil(keep, page) :]
        for buffer, old in zip(buffers, before, strict=True):
            assert torch.equal(buffer[slots[:keep]], old[kept])
        untouched[slots[:keep]] = False
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer[untouched], old[untouched]), "no other slot is written"


@pytest.mark.parametrize(
    ("slots", "kept", "evicted"),
    [
        ([8, 9, 10, 11, 5], [0, 1], [2, 3, 4]),  # slot 5 is no first slot of a page
        ([8, 9, 10, 12, 16], [0, 1], [2, 3, 4]),  # slot modulo page
        ([8, 9, 10, 11, 8], [0, 1], [2, 3, 4]),  # one page twice
        ([0, 1, 2, 3, 8], [0, 1], [2, 3, 4]),  # page 0 belongs to nobody
        ([8, 9, 10, 11, 16], [1, 0], [2, 3, 4]),  # not in order
        ([8, 9, 10, 11, 16], [0, 1], [1, 2, 3, 4]),  # kept and evicted
        ([8, 9, 10, 11, 16], [0], [2, 3, 4]),  # neither
    ],
)
def test_the_check_sees_each_fault(slots: list[int], kept: list[int], evicted: list[int]) -> None:
    check_pages(ints([8, 9, 10, 11, 16]), ints([0, 1]), ints([2, 3, 4]), 4)
    with pytest.raises(LedgerError):
        check_pages(ints(slots), ints(kept), ints(evicted), 4)


def test_no_memory_for_the_move_changes_nothing() -> None:
    """All allocations come before the first byte moves."""
    table = torch.arange(16, 32, dtype=torch.int32)[None]
    selection = Selection(
        torch.tensor([0, 3, 9]), torch.tensor([i for i in range(16) if i not in (0, 3, 9)])
    )
    buffer = torch.randn(32, 1, 4)
    before, counted = buffer.clone(), Scarce()
    with counted:
        KVMove([buffer], table, [0], [selection], [0])
    assert counted.allocations > 0
    for number in range(counted.allocations):
        with pytest.raises(torch.OutOfMemoryError), Scarce(number):
            KVMove([buffer], table, [0], [selection], [0])
    assert torch.equal(buffer, before)


def test_counts_in_whole_pages() -> None:
    assert [page_floor(n, 16) for n in (0, 15, 16, 17)] == [0, 0, 16, 16]
    assert [page_ceil(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert [page_ceil(n, 1) for n in (0, 7)] == [page_floor(n, 1) for n in (0, 7)] == [0, 7]


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)

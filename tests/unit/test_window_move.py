"""The windows of compacted rows in pages of several tokens, against plain lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scarce import Scarce

from sgl_skipkv.eviction.window_move import WindowMove, WindowPool
from sgl_skipkv.request.pages import page_ceil, page_floor

WIDTH, SLOTS = 96, 512


@dataclass(frozen=True)
class Row:
    """A row before a compaction.

    Attributes:
        kept: its length afterwards; own: first entry that is not the radix tree's; begin: the first
            that has a window slot of its own.
    """

    tokens: int
    kept: int
    own: int
    begin: int


@dataclass(frozen=True)
class State:
    """A request's; its row of the page table."""

    row: int
    rid: str = "r"


def begins_at(tokens: int, own: int, window: int, page: int) -> int:
    """Where SGLang leaves the cursor of a row in front of its next compaction."""
    return max(page_floor(tokens - 1 - page_ceil(max(window - 1, page), page), page), own)


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, int, list[Row]]:
    """Page size, window, rows."""
    page, window = draw(st.sampled_from([2, 4, 8, 16])), draw(st.integers(2, 24))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.integers(window + 1, WIDTH))
        kept = draw(st.integers(window, tokens - 1))
        own = page * draw(st.integers(0, (kept - window) // page))
        found.append(Row(tokens, kept, own, begins_at(tokens, own, window, page)))
    return page, window, found


class World:
    """Their pools: rows of pages in any order, and the window slots that SGLang would map."""

    def __init__(self, page: int, window: int, found: list[Row]) -> None:
        self.page, self.window = page, window
        self.table = torch.zeros(len(found) + 1, WIDTH + 16, dtype=torch.int32)
        self.slot_of = torch.zeros(SLOTS + 1, dtype=torch.int64)
        self.buffers = [torch.randn(SLOTS, 2, 3), torch.randn(SLOTS, 1, 5)]
        pages, windows = (torch.randperm(SLOTS // page - 1).add(1).tolist() for _ in range(2))
        self.states: list[Any] = [State(number) for number in range(1, len(found) + 1)]
        for state, row in zip(self.states, found, strict=True):
            firsts = [pages.pop() * page for _ in range(0, row.tokens, page)]
            slots = [first + i for first in firsts for i in range(page)][: row.tokens]
            self.table[state.row, : row.tokens] = torch.tensor(slots)
            for entry in range(row.begin, row.tokens):
                if entry % page == 0:
                    first = windows.pop() * page
                self.slot_of[slots[entry]] = first + entry % page

    def move(self, found: list[Row]) -> WindowMove:
        spans = ((row.own, row.begin) for row in found)
        by_state = dict(zip(self.states, spans, strict=True))
        pool = WindowPool(self.buffers, self.slot_of, self.window, by_state)
        lengths = [(row.tokens, row.kept) for row in found]
        return WindowMove(pool, self.table, self.states, lengths, self.page)


@settings(max_examples=300, deadline=None)
@given(rows())
def test_the_last_tokens_move_with_their_row(drawn: tuple[int, int, list[Row]]) -> None:
    page, window, found = drawn
    world = World(page, window, found)
    slot_of, before = world.slot_of.clone(), [buffer.clone() for buffer in world.buffers]
    move = world.move(found)
    assert torch.equal(world.slot_of, slot_of), "nothing is mapped before it is applied"
    assert all(map(torch.equal, world.buffers, before)), "nothing moves before it is applied"
    counted = Scarce()
    with counted:
        move.apply()
    assert counted.allocations == 0
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    for row, moved, state in zip(found, move.rows, world.states, strict=True):
        slots = world.table[state.row, : row.tokens].tolist()
        old, new = slot_of[slots].tolist(), world.slot_of[slots].tolist()
        assert moved.state is state and moved.moved_from == row.kept - window
        assert moved.first == begins_at(row.kept, row.own, window, page)
        assert not any(new[: moved.first]) and not any(new[row.kept :])
        held = [slot // page for slot in new[moved.first : row.kept : page]]
        expected = [held[i // page] * page + i % page for i in range(row.kept - moved.first)]
        assert new[moved.first : row.kept] == expected, "entry i is slot i % page"
        freed = moved.freed_pages.tolist()
        own = [slot // page for slot in old[row.begin : row.tokens : page]]
        assert sorted(held + freed) == sorted(own), "no page is lost, and none is taken"
        for entry in range(row.kept - window, row.kept):
            source = old[entry + row.tokens - row.kept]
            for buffer, was in zip(world.buffers, before, strict=True):
                assert torch.equal(buffer[new[entry]], was[source])
            untouched[new[entry]] = False
    for buffer, was in zip(world.buffers, before, strict=True):
        assert torch.equal(buffer[untouched], was[untouched]), "no other slot is written"


@settings(max_examples=300, deadline=None)
@given(rows())
def test_no_slot_is_written_before_it_is_read(drawn: tuple[int, int, list[Row]]) -> None:
    """One token after the other, as the kernel's tiles do."""
    page, window, found = drawn
    world = World(page, window, found)
    taken = world.move(found)._move
    for start in range(0, len(found) * window, window):
        written = set[int]()
        part = slice(start, start + window)
        targets, sources = taken._targets[part].tolist(), taken._sources[part].tolist()
        for target, source in zip(targets, sources, strict=True):
            assert source not in written
            written.add(target)


def test_a_row_that_has_too_few_pages_is_not_moved() -> None:
    """Its windows began a page later than SGLang leaves them."""
    page, window = 16, 16
    row = Row(tokens=32, kept=17, own=0, begin=16)
    world = World(page, window, [row])
    with pytest.raises(AssertionError, match="window pages"):
        world.move([row])


@given(rows())
@settings(max_examples=20, deadline=None)
def test_no_memory_for_the_move_changes_nothing(drawn: tuple[int, int, list[Row]]) -> None:
    page, window, found = drawn
    assume(len(found) > 1)
    world = World(page, window, found)
    slot_of, before = world.slot_of.clone(), [buffer.clone() for buffer in world.buffers]
    counted = Scarce()
    with counted:
        world.move(found)
    assert counted.allocations > 0
    for number in range(counted.allocations):
        with pytest.raises(torch.OutOfMemoryError), Scarce(number):
            world.move(found)
    assert torch.equal(world.slot_of, slot_of)
    assert all(map(torch.equal, world.buffers, before))

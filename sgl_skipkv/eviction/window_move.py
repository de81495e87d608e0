"""Window layers with a KV pool of their own, in pages of several tokens: a compaction moves the KV
of the last tokens within their row's own window pages.

SGLang maps the slots of a row's last tokens to slots of the window pool, page by page: entry i is
slot ``i % page`` in both pools. A compaction keeps the last tokens of the row, as many as a window
holds, and moves them towards the front by what it evicts. So the row's new last pages are mapped to
the window pages that it has, whole pages by ``evicted // page``, and within these the KV moves by
the rest. No page is taken: a row keeps as many in front of its end as SGLang leaves it.

Where the rest crosses a page's border, the first new page would need a window page that has been
given back, and the last one of the row is not needed any more: it becomes the first. What is
written there lies behind what is still read there, and everywhere else KV only moves towards the
front, so ``KVMove`` may move it in place.

Entries of the first pages that are in front of the last tokens have window slots without their KV.
No later query sees them; who gives the row away gives these slots back first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.eviction.kv_move import KVMove
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.request.pages import page_ceil
from sgl_skipkv.request.state import RequestState


class WindowPool(NamedTuple):
    """The window layers' pool as compactions read it.

    Attributes:
        buffers: [window slots, ...] each, every window layer's keys and values.
        slot_of: int64 [slots + 1], the window slot of each slot of the other pool; 0: it has none.
        window_tokens: that a query sees, itself among them.
        spans: of each request that is compacted, the first row entry that may have a window slot of
            its own, and the first one that has: both begin a page.
    """

    buffers: Sequence[Tensor]
    slot_of: Tensor
    window_tokens: int
    spans: Mapping[RequestState, tuple[int, int]]


class MovedRow(NamedTuple):
    """The windows of a compacted row.

    Attributes:
        first: the first entry that has a window slot of its own.
        moved_from: the first entry whose KV was moved; that of later ones was, too.
        freed_pages: int64, window pages that the row does not need any more.
    """

    state: RequestState
    first: int
    moved_from: int
    freed_pages: Tensor


class WindowMove:
    """The new window slots of several compacted rows, and the KV that moves there.

    Args:
        req_to_token: int32 [table rows, width], SGLang's page table before the compaction.
        states: no row twice.
        lengths: of each row, before and after.

    Raises:
        torch.OutOfMemoryError: nothing has changed.

    Attributes:
        rows: as they are afterwards.
    """

    def __init__(
        self,
        pool: WindowPool,
        req_to_token: Tensor,
        states: Sequence[RequestState],
        lengths: Sequence[tuple[int, int]],
        page_tokens: int,
    ) -> None:
        self._slot_of = pool.slot_of
        self.rows = list[MovedRow]()
        old, new, mapped, moved = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        in_page = torch.arange(page_tokens, device=req_to_token.device)
        for state, (row_tokens, keep_tokens) in zip(states, lengths, strict=True):
            own, begin = pool.spans[state]
            end, keep_end = page_ceil(row_tokens, page_tokens), page_ceil(keep_tokens, page_tokens)
            first = max(own, begin - (end - keep_end))
            windowed = keep_tokens - pool.window_tokens
            assert first <= windowed, f"window pages: {first} > {windowed} ({state.rid})"
            slots = req_to_token[state.row, :row_tokens].to(torch.int64)
            whole = (row_tokens - keep_tokens) // page_tokens * page_tokens
            pages = pool.slot_of[slots[begin::page_tokens]]
            pages = pages.roll((begin - first - whole) // page_tokens)
            needed = (keep_end - first) // page_tokens
            self.rows.append(MovedRow(state, first, windowed, pages[needed:] // page_tokens))
            targets = (pages[:needed, None] + in_page).flatten()[: keep_tokens - first]
            old.append(slots[begin:])
            new.append(slots[first:keep_tokens])
            mapped.append(targets)
            moved.append(targets[windowed - first :])
            moved.append(pool.slot_of[slots[row_tokens - pool.window_tokens :]])
        self._old, self._new, self._mapped = torch.cat(old), torch.cat(new), torch.cat(mapped)
        # A table of its own: each row has the slots to write, then those to read.
        table = torch.stack(moved).view(len(states), -1).to(torch.int32)
        entries = torch.arange(table.shape[1], device=table.device)
        halves = Selection(entries[pool.window_tokens :], entries[: pool.window_tokens])
        rows, alike = [*range(len(states))], len(states)
        self._move = KVMove(pool.buffers, table, rows, [halves] * alike, [0] * alike)

    def apply(self) -> None:
        """Move the KV and map the rows' slots. Allocates nothing."""
        self._move.apply()
        self._slot_of.index_fill_(0, self._old, 0)
        self._slot_of.index_copy_(0, self._new, self._mapped)

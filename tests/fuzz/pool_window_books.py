"""What two pools must hold, where window layers have one of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from pool_books import Books
from pool_content import keys_of, values_of
from pool_turns import Apart, Entry, Left

from sgl_skipkv.request.pages import page_ceil, page_floor

#: in place of a hash: a slot whose KV is not that of the row entry that has it
HOLLOW = -1


class Read(NamedTuple):
    """What a step sees of a row: its entries from the first one on, and their slots when the step
    was launched, in both pools."""

    rid: str
    first: int
    slots: list[int]
    windows: list[int]


class WindowBooks(Books):
    """The books of a ``WindowWorld``.

    Attributes:
        window_tokens: that a query sees, itself among them; window_pool: slots of the second pool.
        window_content: slot of the second pool -> hash of what was last written there. ``HOLLOW``
            is what a compaction or a restore in pages has left without KV; nothing may see that.
        reading: what the step that was launched last sees; writing: where it writes, in the second
            pool.
    """

    window_tokens: int
    window_pool: int

    def __init__(self, **how: Any) -> None:
        self.window_content: dict[int, int] = {}
        self.reading: list[Read] = []
        self.writing: list[int] = []
        super().__init__(**how)

    def window_slots(self, slots: Sequence[int]) -> list[int]:
        """Their slots in the second pool; 0: it has none."""
        found: list[int] = self._mapping()[list(slots)].tolist()
        return found

    def cursor_of(self, req: Any) -> int:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        entry: int = req.kv.get_evicted_seqlen(ComponentType.SWA)
        return entry

    def _mapping(self) -> torch.Tensor:
        mapping: torch.Tensor = self.token_to_kv_pool_allocator.full_to_swa_index_mapping
        return mapping

    def _free_slots(self) -> list[int]:
        free: list[int] = self._free_of("full_attn_allocator")
        return free

    def _free_of(self, name: str) -> list[int]:
        allocator = getattr(self.token_to_kv_pool_allocator, name)
        return self._whole_pages(allocator.get_all_free_pages().tolist())

    def _whole_pages(self, pages: Iterable[int]) -> list[int]:
        return [page * self.page_size + i for page in pages for i in range(self.page_size)]

    # -- the device

    def _window_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        return pool.get_key_buffer(1), pool.get_value_buffer(1)

    def _store_windows(self, at: list[int], tags: list[int]) -> None:
        for buffer, content in zip(
            self._window_buffers(), (keys_of(tags), values_of(tags)), strict=True
        ):
            buffer[at] = self.widened(content).to(self.device)

    def _check_stored(self, slots: list[int], tags: Sequence[int]) -> None:
        """Of whatever has a slot in the second pool, too."""
        super()._check_stored(slots, tags)
        found = zip(self.window_slots(slots), tags, strict=True)
        known = [one for one in found if one[0] and self.window_content.get(one[0]) != HOLLOW]
        self._check_windows_stored(known)

    def _check_windows_stored(self, expected: list[tuple[int, int]]) -> None:
        at, tags = [slot for slot, _ in expected], [tag for _, tag in expected]
        keys, values = (buffer[at].cpu() for buffer in self._window_buffers())
        assert torch.equal(keys, self.widened(keys_of(tags))), "another window"
        assert torch.equal(values, self.widened(values_of(tags))), "another window"

    def _new_windows(self, slots: list[int]) -> list[int]:
        """Slots in the second pool that are about to be booked."""
        at = self.window_slots(slots)
        self.window_content.update(dict.fromkeys(filter(None, at), HOLLOW))
        return at

    def _book_windows(self, slots: list[int], tags: Sequence[int], seen_tokens: int) -> None:
        """New slots of a row's end: the last tokens have their KV, those in front may not."""
        at = self.window_slots(slots)
        assert all(at)
        stored = self._window_buffers()[1][at].cpu()
        right = (stored == self.widened(values_of(tags))).flatten(1).all(dim=1).tolist()
        assert all(right[max(len(right) - seen_tokens, 0) :]), "a window did not come along"
        content = [tag if one else HOLLOW for tag, one in zip(tags, right, strict=True)]
        self.window_content.update(zip(at, content, strict=True))
        self.count["windows without KV"] += HOLLOW in content

    def _check_read(self, read: Read) -> None:
        """A step reads; it is not looked at what comes of a request that has lost its row."""
        if read.rid in self.rows:
            stop = read.first + len(read.slots)
            tags = [entry.tag for entry in self.rows[read.rid][read.first : stop]]
            super()._check_stored(read.slots, tags)
            self._check_windows_stored(list(zip(read.windows, tags, strict=True)))
            self.count["windows read"] += 1

    # -- rows

    def _goes_on_from(self, history: Any, left: Left, cut: int) -> bool:
        """If a whole window ends there."""
        row_tokens = len(left.row_before(cut))
        is_whole = super()._goes_on_from(history, left, cut)
        pages = history.key + history.padding
        ends = (at(row_tokens, self.page_size) for at in (page_floor, page_ceil))
        return is_whole and all(self._has_all(pages[:end], left.apart, end) for end in ends)

    def _restored(self, req: Any) -> list[Entry]:
        shared = req.kv.cache_protected_len
        own = self._row(req)[shared : req.prefix_len]
        at = self._new_windows(own)
        held = super()._restored(req)
        first = len(held) - page_ceil(max(self.window_tokens - 1, self.page_size), self.page_size)
        first = max(page_floor(first, self.page_size), shared)
        assert [*map(bool, at)] == [entry >= first for entry in range(shared, len(held))]
        tags = [entry.tag for entry in held[first:]]
        self._book_windows(own[first - shared :], tags, self.window_tokens - 1)
        self.count["restored, window shared"] += len(own) < self.window_tokens - 1
        self.count["restored, compacted"] += req.skipkv.kv.evicted_tokens > 0
        return held

    def _book_compaction(self, req: Any, before: list[int]) -> None:
        old = self.rows[req.rid]
        if self.page_size > 1:
            self._move_windows(req, old)
        super()._book_compaction(req, before)
        seen, left = old[-self.window_tokens :], self.rows[req.rid]
        assert left[-self.window_tokens :] == seen, "a window was evicted from"
        self.count["compactions beside a prompt in the window"] += (
            seen[0].position < self.talks[req.rid].prompt_tokens
        )

    def _move_windows(self, req: Any, old: Sequence[Entry]) -> None:
        """Of a compacted row the last tokens have moved, and nothing else."""
        slots, shared = self._row(req), req.kv.cache_protected_len
        at = [(i, slot) for i, slot in enumerate(self.window_slots(slots)) if slot and i >= shared]
        moved = len(slots) - self.window_tokens
        for entry, slot in at:
            tag = old[entry + len(old) - len(slots)].tag if entry >= moved else HOLLOW
            self.window_content[slot] = tag

    def _matched(self, req: Any) -> list[Entry]:
        own = self._row(req)[req.kv.cache_protected_len : req.prefix_len]
        self._new_windows(own)
        row = super()._matched(req)
        if own:  # copied
            tags = [entry.tag for entry in row[len(row) - len(own) :]]
            self._book_windows(own, tags, self.window_tokens - 1)
        return row

    def _in_tree(self, key: Sequence[int], apart: Apart) -> list[int]:
        """A match ends where the tree has a whole window."""
        found = super()._in_tree(key, apart)
        match = self._match(key, apart)
        slots = self.tree_cache.path_device_indices(match.last_device_node).tolist()[: len(found)]
        # Of a history only the whole row counts, which may end within a page.
        rows = (one.key for one in self.left if [*one.key, *one.padding] == [*key])
        row_tokens = len(next(rows, found))
        if len(found) >= row_tokens:
            first = max(len(found) - self.window_tokens + 1, 0)
            at = self.window_slots(slots[first:row_tokens])
            assert [self.window_content.get(slot) for slot in at] == found[first:row_tokens]
        return found

    # -- invariants

    def check(self) -> None:
        super().check()
        owners, mapping = self.owners(), self._mapping().tolist()
        free, tree = self._free_of("swa_attn_allocator"), self.tree_cache
        in_tree = [mapping[slot] for slot in tree.all_values_flatten().tolist() if mapping[slot]]
        private: list[int] = []
        for req in owners:
            private += self._check_windows(req, mapping)
        assert not any(mapping[slot] for slot in [0, *self._free_slots()]), "a window of nobody"
        locked = tree.swa_protected_size()
        assert tree.swa_evictable_size() + locked == len(in_tree)
        assert owners or not locked, "a lock of nobody"
        if not owners:
            tree.sanity_check()
        everywhere = free + in_tree + private
        assert len(everywhere) == self.window_pool, "window pool accounting"
        slots_of_all = range(self.page_size, self.window_pool + self.page_size)
        assert set(everywhere) == set(slots_of_all), "a slot has two owners"

    def _check_windows(self, req: Any, mapping: list[int]) -> list[int]:
        """One request's slots in the second pool; those that are its own."""
        slots, row = self._row(req), self.rows[req.rid]
        shared, cursor = req.kv.cache_protected_len, self.cursor_of(req)
        at = [mapping[slot] for slot in slots]
        behind = max(cursor, shared)
        assert cursor % self.page_size == 0, "the cursor stands within a page"
        assert cursor <= len(row) and not any(at[shared:behind]), "in front of the cursor"
        assert all(at[behind:]), "behind the cursor"
        assert all(at[1 - self.window_tokens :]), "the next query has no window"
        content = [self.window_content.get(slot) for slot in at]
        seen_from = len(row) - self.window_tokens + 1
        for entry, (tag, slot) in enumerate(zip(content, at, strict=True)):
            assert not slot or tag == row[entry].tag or (tag == HOLLOW and entry < seen_from), (
                "another window"
            )
        page = self.page_size
        assert all(slot % page == i % page for i, slot in enumerate(at) if slot), "within a page"
        pages = [slot // page for slot in at[behind::page]]
        assert at[behind:] == self._whole_pages(pages)[: len(at) - behind], "not a page of windows"
        return self._whole_pages(pages)

    def check_empty(self) -> None:
        super().check_empty()
        assert len(self._free_of("swa_attn_allocator")) == self.window_pool
        assert not self._mapping()[:-1].any()

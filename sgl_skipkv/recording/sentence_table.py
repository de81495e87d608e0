"""Sentence vectors of every tracked request: summed in decode steps, compared in compactions.

The buffers have one row per track id (``recorder.py``); a compaction takes all due requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels.on_device import device_tensors, uses_triton
from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.recording.sentences import Delimiters

Spans = Sequence[tuple[int, int]]
#: vectors per copy: 59 MB of temporary memory at a hidden size of 3,584 and 2 bytes per value
_MOVED_AT_ONCE = 8192


class SentenceTable:
    """Running sentence sums and closed-sentence vectors of every tracked request."""

    def __init__(
        self,
        tracks: int,
        capacity: int,
        hidden_size: int,
        delimiters: Delimiters,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        rows = tracks + 1
        self.bits = torch.frombuffer(delimiters.bits, dtype=torch.uint8).to(device)
        self.preset = torch.zeros(rows, dtype=torch.uint8, device=device)
        self.total = torch.zeros(rows, hidden_size, device=device)
        self.length = torch.zeros(rows, device=device)
        self.index = torch.zeros(rows, dtype=torch.int64, device=device)
        self.after_delimiter = torch.zeros(rows, dtype=torch.bool, device=device)
        # In the type of the KV cache: vectors are only compared with each other, by cosine.
        self.vectors = torch.zeros(rows, capacity, hidden_size, dtype=dtype, device=device)

    def reset(self, track: int, preset_bit: int) -> None:
        """Clear the track for another request."""
        self.preset[track].fill_(preset_bit)  # an assignment would wait for the device
        self.open_next(track, 0)

    def tables(self) -> dict[str, Tensor]:
        """The tables with one row per track id, except ``preset``."""
        names = ("total", "length", "index", "after_delimiter", "vectors")
        return {name: getattr(self, name) for name in names}

    def open_next(self, track: int, entries: int) -> None:
        """The next token opens a sentence; its vector comes behind this many."""
        for table in (self.total, self.length, self.after_delimiter):
            table[track].zero_()
        self.index[track].fill_(entries)

    def step(self, tracks: Tensor, token_ids: Tensor, hidden: Tensor) -> None:
        """Add S tokens per track, one after the other. tracks: int64 [B]; token_ids: int64 [B S],
        track after track; hidden: float [B S, D]."""
        tables = self.tables()
        if uses_triton(hidden.device):
            from sgl_skipkv.kernels.sentence_step import sentence_step

            sentence_step(hidden, tracks, token_ids, bits=self.bits, preset=self.preset, **tables)
        else:
            steps = token_ids.shape[0] // tracks.shape[0]
            for step in range(steps):
                of_all = slice(step, None, steps)
                is_delimiter = (self.bits[token_ids[of_all]] & self.preset[tracks]) != 0
                reference.sentence_step(hidden[of_all], tracks, is_delimiter, **tables)

    def compare(
        self,
        tracks: Sequence[int],
        used: Sequence[int],
        spans: Sequence[Spans],
        entries: Sequence[Sequence[int]],
        places: Sequence[Sequence[int]],
        earlier: Sequence[Tensor],
    ) -> list[Sentences]:
        """Raise each sentence's redundancy to its similarity with any later entry of its table.

        Args:
            tracks: of the tables.
            used: number of entries of each table.
            spans: logical spans of the sentences that the policy scores, ascending.
            entries: of these in all these tables, one behind the other; -1: in none.
            places: of these in all these tables and then ``earlier``, one behind the other; -1: it
                is not known.
            earlier: float32 [sentences], what earlier compactions found.
        """
        device, counts = self.vectors.device, [len(of_table) for of_table in spans]
        bounds = [[span[end] for of_table in spans for span in of_table] for end in (0, 1)]
        parts = [*bounds, [*chain(*entries)], [*chain(*places)], tracks, used]
        starts, stops, entry, place, at, count = device_tensors(parts, device)
        if uses_triton(device):
            from sgl_skipkv.kernels.sentence_redundancy import sentence_redundancy

            now = sentence_redundancy(self.vectors, at, count, max_count=max(used))
        else:
            now = torch.full((len(tracks), self.capacity), -1.0, device=device)
            for row, track, n in zip(now, tracks, used, strict=True):
                if n:
                    row[:n] = reference.sentence_redundancy(self.vectors[track, :n])
        unknown = now.new_full((1,), -1.0)
        known = torch.cat([now.view(-1), *earlier, unknown])
        columns = [starts, stops, torch.maximum(known[entry], known[place])]
        of_table = zip(*(torch.split(column, counts) for column in columns), strict=True)
        return [Sentences(*parts) for parts in of_table]


class TableMoves:
    """Moves that keep some entries of each table, at its front, and drop the others; with all
    memory allocated.

    Args:
        tracks: of the tables, no track twice.
        entries: of each table, the indices to keep, ascending.
        closed_last: of each table, whether the last token was a delimiter, so that the running sum
            still belongs to the newest entry.

    Raises:
        torch.OutOfMemoryError: nothing has changed.
    """

    def __init__(
        self,
        table: SentenceTable,
        tracks: Sequence[int],
        entries: Sequence[Sequence[int]],
        closed_last: Sequence[bool],
    ) -> None:
        device, capacity = table.vectors.device, table.capacity
        self._table = table
        counts = [len(chosen) for chosen in entries]
        ends = [n - closed for n, closed in zip(counts, closed_last, strict=True)]
        moved = [  # those before the first dropped one do not move
            (track * capacity + to, track * capacity + source)
            for track, chosen in zip(tracks, entries, strict=True)
            for to, source in enumerate(chosen)
            if to != source
        ]
        parts = [[to for to, _ in moved], [source for _, source in moved], tracks, ends]
        self._to, self._source, self._tracks, self._ends = device_tensors(parts, device)
        self._staging = table.vectors.new_empty(
            min(len(moved), _MOVED_AT_ONCE), table.vectors.shape[-1]
        )

    def apply(self) -> None:
        """Move the entries. Allocates nothing, so it cannot fail halfway."""
        table = self._table
        vectors = table.vectors.view(-1, table.vectors.shape[-1])
        # Entries only move to the front, so a part never overwrites what a later part reads.
        for start in range(0, self._to.shape[0], _MOVED_AT_ONCE):
            source = self._source[start : start + _MOVED_AT_ONCE]
            staged = self._staging[: source.shape[0]]
            torch.index_select(vectors, 0, source, out=staged)
            vectors.index_copy_(0, self._to[start : start + _MOVED_AT_ONCE], staged)
        table.index.index_copy_(0, self._tracks, self._ends)

"""Sentence vectors of every tracked request: summed while it decodes, compared at its compactions.

Fixed buffers, one row per slot; slot 0 is scratch that untracked rows write to and nobody reads. A
decode step writes through tensor indices only, so a CUDA graph captures it. What a compaction does
is done for all due requests at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels.on_device import device_tensor, uses_triton
from sgl_skipkv.offload.host_memory import HostCopies, HostCopy
from sgl_skipkv.policy.base import Sentences
from sgl_skipkv.recording.sentences import Delimiters

Spans = Sequence[tuple[int, int]]
#: vectors that one copy moves: 59 MB beside the table where the hidden size is 3,584
_MOVED_AT_ONCE = 8192


class SentenceTable:
    """Running sentence sums and closed-sentence vectors of every tracked request."""

    def __init__(
        self,
        slots: int,
        capacity: int,
        hidden_size: int,
        delimiters: Delimiters,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        rows = slots + 1
        self.bits = torch.frombuffer(delimiters.bits, dtype=torch.uint8).to(device)
        self.preset = torch.zeros(rows, dtype=torch.uint8, device=device)
        self.total = torch.zeros(rows, hidden_size, device=device)
        self.length = torch.zeros(rows, device=device)
        self.index = torch.zeros(rows, dtype=torch.int64, device=device)
        self.after_delimiter = torch.zeros(rows, dtype=torch.bool, device=device)
        # In the cache's type: they only ever meet each other in a cosine.
        self.vectors = torch.zeros(rows, capacity, hidden_size, dtype=dtype, device=device)
        self.redundancy = torch.full((rows, capacity), -1.0, device=device)

    def reset(self, slot: int, preset_bit: int) -> None:
        """Forget the slot's last request."""
        self.preset[slot] = preset_bit
        for table in (self.total, self.length, self.index, self.after_delimiter):
            table[slot] = 0
        self.redundancy[slot] = -1.0

    def save(self, slot: int, copies: HostCopies) -> dict[str, HostCopy]:
        """Everything about the slot's call, added to the copies."""
        return {name: copies.add(table[slot]) for name, table in self.tables().items()}

    def restore(self, slot: int, saved: Mapping[str, HostCopy]) -> None:
        """What ``save`` gave, into a slot that was reset."""
        for name, table in self.tables().items():
            table[slot] = saved[name].to(table.device)

    def tables(self) -> dict[str, Tensor]:
        """What is kept of a request, one entry per slot."""
        return {
            "total": self.total,
            "length": self.length,
            "index": self.index,
            "after_delimiter": self.after_delimiter,
            "vectors": self.vectors,
            "redundancy": self.redundancy,
        }

    def step(self, slots: Tensor, token_ids: Tensor, hidden: Tensor) -> None:
        """Add one token per row. slots, token_ids: int64 [B]; hidden: float [B, D]."""
        tables = self.tables()
        del tables["redundancy"]  # between sentences: a matter of compactions
        if uses_triton(hidden.device):
            from sgl_skipkv.kernels.sentence_step import sentence_step

            sentence_step(hidden, slots, token_ids, bits=self.bits, preset=self.preset, **tables)
        else:
            is_delimiter = (self.bits[token_ids] & self.preset[slots]) != 0
            reference.sentence_step(hidden, slots, is_delimiter, **tables)

    def keep_entries(
        self,
        slots: Sequence[int],
        entries: Sequence[Sequence[int]],
        closed_last: Sequence[bool],
    ) -> None:
        """Move each table's named entries to its front and forget the others.

        Args:
            slots: whose tables, no slot twice.
            entries: of each the indices to keep, ascending.
            closed_last: of each whether the last token seen was a delimiter, so that the running
                sum still belongs to the newest entry.
        """
        device, counts = self.vectors.device, [len(chosen) for chosen in entries]
        ends = [n - closed for n, closed in zip(counts, closed_last, strict=True)]
        table, target = _places(counts)
        packed = device_tensor([*table, *target, *chain(*entries), *slots, *ends], device)
        moves, at, end = torch.split(packed, [3 * len(table), len(slots), len(slots)])
        redundancy = self.redundancy.new_full((len(slots), self.capacity), -1.0)
        # No entry moves backwards, so a part never overwrites what a later part reads.
        for whose, to, source in torch.split(moves.view(3, len(table)), _MOVED_AT_ONCE, dim=1):
            slot = at[whose]
            self.vectors[slot, to] = self.vectors[slot, source]
            redundancy[whose, to] = self.redundancy[slot, source]
        self.redundancy[at] = redundancy
        self.index[at] = end

    def compare(self, slots: Sequence[int], spans: Sequence[Spans]) -> list[Sentences]:
        """Raise each entry's redundancy to its similarity with any later entry of its table.

        Args:
            slots: whose tables, no slot twice.
            spans: of each the logical spans of its entries, in the table's order.
        """
        device, counts = self.vectors.device, [len(one) for one in spans]
        bounds = [[span[end] for one in spans for span in one] for end in (0, 1)]
        flat = [*bounds, *_places(counts), slots, counts]
        packed = device_tensor([*chain(*flat)], device)
        starts, stops, table, entry, at, used = torch.split(packed, [len(one) for one in flat])
        if uses_triton(device):
            from sgl_skipkv.kernels.sentence_redundancy import raise_redundancy

            raise_redundancy(self.vectors, self.redundancy, at, used, max_count=max(counts))
        else:
            for slot, count in zip(slots, counts, strict=True):
                self._raise(slot, count)
        parts = [starts, stops, self.redundancy[at[table], entry]]
        of_call = zip(*(torch.split(part, counts) for part in parts), strict=True)
        return [Sentences(*one) for one in of_call]

    def _raise(self, slot: int, count: int) -> None:
        """``compare`` of one table, in plain torch."""
        if count < 2:
            return
        similarity = reference.sentence_similarity(self.vectors[slot, :count])
        earlier = torch.ones_like(similarity, dtype=torch.bool).tril()
        later = similarity.masked_fill(earlier, -1.0).amax(dim=1)
        redundancy = self.redundancy[slot, :count]
        self.redundancy[slot, :count] = torch.maximum(redundancy, later)


def _places(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of the entries of several tables, one after the other: which table, which entry of it."""
    table = [i for i, count in enumerate(counts) for _ in range(count)]
    return table, [entry for count in counts for entry in range(count)]

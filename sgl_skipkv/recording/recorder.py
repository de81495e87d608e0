"""What decoding records on the device for the next compaction: recent queries, sentence vectors.

Fixed buffers, written in place with tensor indices only, so a CUDA graph captures every write
of a decode step. They are indexed by *slot*, a small number that a request holds while it has a row
in the page table; slot 0 is scratch that untracked rows write to and nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor, uses_triton
from sgl_skipkv.offload.backup import Recorded
from sgl_skipkv.offload.host_memory import HostCopies, HostCopy
from sgl_skipkv.recording.sentence_table import SentenceTable
from sgl_skipkv.recording.sentences import Delimiters


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the buffers depend on; heads are those of this rank."""

    layers: int
    query_heads: int
    head_dim: int
    hidden_size: int


class SlotTable:
    """Which slot each page-table row writes to, and which slots are free."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.of_row = torch.zeros(0, dtype=torch.int64, device=device)
        self._free = list(range(slots, 0, -1))

    def use_rows(self, rows: int) -> None:
        """The page table exists, with this many rows."""
        self.of_row = torch.zeros(rows, dtype=torch.int64, device=self.of_row.device)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


class Loan(NamedTuple):
    """A ring that is lent to a request, and the positions whose queries go there.

    Position p is recorded if ``(p - first) % interval < window``, so from ``first`` on ``window``
    positions of every ``interval``.
    """

    ring: int = 0
    first: int = 0
    interval: int = 1
    window: int = 1


class QueryRings:
    """The last ``window`` rotated queries of requests that are about to be compacted, per layer.

    Token at logical position p is stored at ``p % window``; the formulas take queries in any order.
    Ring 0 is scratch. ``ring_book`` decides who has which ring when.

    Attributes:
        data: float [layers, rings + 1, window, Hq, d].
        loans: int64 [slots + 1, 4], the ``Loan`` of each slot.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        slots: int,
        rings: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = window
        sizes = (shape.layers, rings + 1, window, shape.query_heads, shape.head_dim)
        self.data = torch.zeros(sizes, dtype=dtype, device=device)
        self.loans = device_tensor(Loan(), device).repeat(slots + 1, 1)

    def lend(self, slot: int, loan: Loan) -> None:
        """From now on the slot's call records by this loan."""
        self.loans[slot] = device_tensor(loan, self.loans.device)

    def of_tokens(self, slots: Tensor, positions: Tensor) -> Tensor:
        """int64 [B], the ring of each token, 0 where its query is not wanted. Graph-safe.

        Args:
            slots, positions: int64 [B].
        """
        ring, first, interval, window = self.loans[slots].unbind(dim=1)
        return torch.where((positions - first) % interval < window, ring, 0)

    def write(self, layer: int, rings: Tensor, positions: Tensor, q: Tensor) -> None:
        """Store one query per token. rings, positions: int64 [B]; q: float [B, Hq, d]."""
        if uses_triton(q.device):
            from sgl_skipkv.kernels.ring_write import ring_write

            ring_write(q, rings, positions, self.data[layer])
        else:
            self.data[layer][rings, positions % self.window] = q.to(self.data.dtype)

    def save(self, ring: int, copies: HostCopies) -> HostCopy:
        """float [layers, window, Hq, d], the whole ring, added to the copies."""
        return copies.add(self.data[:, ring])

    def restore(self, ring: int, saved: HostCopy) -> None:
        """What ``save`` gave, into another ring: positions have the same places there."""
        self.data[:, ring] = saved.to(self.data.device)

    def read(self, ring: int, last_position: int, count: int) -> Tensor:
        """float [layers, count, Hq, d], the queries of the last ``count`` positions."""
        entries = [(last_position - i) % self.window for i in range(count)]
        return self.data[:, ring, device_tensor(entries, self.data.device)]


@dataclass(frozen=True)
class Recording:
    """Where one forward pass writes: one entry per recorded token.

    Attributes:
        rings, positions: int64 [B]; tokens of ring 0 leave no query.
        slots: int64 [B], whose sentences the tokens belong to; None in a prefill.
        tokens: int64 [B], which of the forward's tokens are recorded; None for all of them, in
            order, as in a decode step.
        replay: (slot, first, stop) of generated tokens that a prefill recomputes after a
            retraction: they go into the sentence table one by one, as they did when they were new.
    """

    rings: Tensor
    positions: Tensor
    slots: Tensor | None = None
    tokens: Tensor | None = None
    replay: tuple[tuple[int, int, int], ...] = ()


class Recorder:
    """All recording buffers of one scheduler process.

    The large ones are allocated by ``reserve``: at start where the operator asked for eviction,
    else with the first request that needs them, so that a server nobody asked holds no memory for
    us.

    ``slots.use_rows`` comes before the first request.

    Attributes:
        current: where the forward pass that is being launched records; None for nowhere.
        records_decode: whether it is a decode step with a request that records: its first layer
            says where.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        slots: int,
        rings: int,
        query_window: int,
        max_sentences: int,
        delimiters: Delimiters,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.rings = rings
        self.current: Recording | None = None
        self.records_decode = False
        self.slots = SlotTable(slots, device)
        self._new_queries = partial(
            QueryRings,
            shape,
            slots=slots,
            rings=rings,
            window=query_window,
            dtype=dtype,
            device=device,
        )
        self._new_sentences = partial(
            SentenceTable,
            slots,
            max_sentences,
            shape.hidden_size,
            delimiters,
            dtype=dtype,
            device=device,
        )

    @cached_property
    def queries(self) -> QueryRings:
        return self._new_queries()

    @cached_property
    def sentences(self) -> SentenceTable:
        return self._new_sentences()

    def reserve(self) -> None:
        """Allocate everything now.

        Raises:
            torch.OutOfMemoryError: the device has no room beside the KV pool.
        """
        _ = self.queries, self.sentences

    def start(self, row: int, slot: int, preset_bit: int, loan: Loan) -> None:
        """A request begins its prefill: point its row at its slot and clear what was there.

        Belongs on the stream of the forward pass: the slot's last request may still be writing
            there.
        """
        self.slots.of_row[row] = slot
        self.sentences.reset(slot, preset_bit)
        self.queries.lend(slot, loan)

    def request_bytes(self) -> int:
        """What ``save`` copies of one request at most."""
        tables = self.sentences.tables().values()
        return self.queries.data[:, 0].nbytes + sum(table[0].nbytes for table in tables)

    def save(self, slot: int, ring: int, copies: HostCopies) -> Recorded:
        """Add what was recorded of a call to the copies. ring: 0 if it is not recording."""
        queries = self.queries.save(ring, copies) if ring else None
        return Recorded(self.sentences.save(slot, copies), queries)

    def restore(self, slot: int, ring: int, recorded: Recorded) -> None:
        """Put it back, after ``start``, on the same stream."""
        self.sentences.restore(slot, recorded.sentences)
        if recorded.queries is not None:
            self.queries.restore(ring, recorded.queries)

    def decode_recording(self, rows: Tensor, positions: Tensor) -> Recording:
        """Where a decode step writes. Graph-safe.

        Args:
            rows: int64 [B], of the page table. positions: int64 [B], logical.
        """
        slots = self.slots.of_row[rows]
        return Recording(self.queries.of_tokens(slots, positions), positions, slots)

    def record_queries(self, recording: Recording, layer: int, q: Tensor) -> None:
        """q: float [tokens of the forward, Hq * d] or [tokens, Hq, d]."""
        heads, head_dim = self.queries.data.shape[-2:]
        q = q.view(-1, heads, head_dim)
        if recording.tokens is not None:
            q = q[recording.tokens]
        self.queries.write(layer, recording.rings, recording.positions, q)

    def record_hidden(self, recording: Recording, token_ids: Tensor, hidden: Tensor) -> None:
        """token_ids: int64 [tokens of the forward]; hidden: float [tokens, D], after final norm."""
        if recording.slots is not None:
            self.sentences.step(recording.slots, token_ids, hidden)
            return
        for slot, first, stop in recording.replay:
            slots = torch.full((1,), slot, dtype=torch.int64, device=hidden.device)
            for token in range(first, stop):
                self.sentences.step(slots, token_ids[token : token + 1], hidden[token : token + 1])

"""Records on the device for the next compaction: recent queries and sentence vectors.

The buffers are fixed and written in place with tensor indices, so a CUDA graph captures every write
of a decode step. They are indexed by *track id*, a small number that a request holds while it has a
row in the page table. Track 0 is scratch: untracked rows write to it, and it is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor, uses_triton
from sgl_skipkv.offload.host_memory import HostCopies, HostCopy
from sgl_skipkv.recording.draft_chains import DraftChains
from sgl_skipkv.recording.sentence_table import SentenceTable
from sgl_skipkv.recording.sentences import Delimiters


@dataclass(frozen=True)
class ModelShape:
    """The model sizes that determine the buffers; heads are those of this rank."""

    layers: int
    query_heads: int
    head_dim: int
    hidden_size: int


class QueryRings:
    """The last rotated queries of every tracked request, per layer.

    The query of logical position p is stored at ``p % entries``; scores do not depend on the order.

    Attributes:
        data: float [layers, tracks + 1, entries, Hq, d].
    """

    def __init__(self, data: Tensor) -> None:
        self.data, self.entries = data, data.shape[2]

    def write(self, layer: int, tracks: Tensor, positions: Tensor, q: Tensor) -> None:
        """Store one query per token. tracks, positions: int64 [B]; q: float [B, Hq, d]."""
        if uses_triton(q.device):
            from sgl_skipkv.kernels.ring_write import ring_write

            ring_write(q, tracks, positions, self.data[layer])
        else:
            self.data[layer][tracks, positions % self.entries] = q.to(self.data.dtype)

    def read(self, track_id: int, last_position: int, count: int) -> Tensor:
        """float [layers, count, Hq, d], the queries of the last ``count`` positions."""
        entries = [(last_position - i) % self.entries for i in range(count)]
        return self.data[:, track_id, device_tensor(entries, self.data.device)]


@dataclass(frozen=True)
class Recording:
    """Where one forward pass writes: one entry per recorded token.

    Attributes:
        tracks, positions: int64 [B]; track 0 is never read.
        tokens: int64 [B], indices of a prefill's recorded tokens; None in a decode step: all tokens
            are recorded, and their sentences.
        generated: tracks, int64 [B], and tokens of a prefill that count as generated, equally many
            of each track; they are added to the sentence table one after the other, as in decode
            steps.
        verified: int64 [requests], tracks of a step that verifies drafts, equally many tokens of
            each; None in other passes.
    """

    tracks: Tensor
    positions: Tensor
    tokens: Tensor | None = None
    generated: tuple[tuple[Tensor, slice], ...] = ()
    verified: Tensor | None = None


@dataclass(eq=False)
class Recorder:
    """All recording buffers of one scheduler process.

    ``reserve`` allocates the large ones: at start if eviction is enabled, else with the first
    request that needs them. ``use_rows`` must be called before the first request.

    Attributes:
        chain_tokens: of a step that verifies drafts (speculative decoding); 0: a decode step adds
            one token to each row.
        free_tracks: track ids that no request holds.
        track_of_row: int64 [rows], the track id of each page-table row.
        current: where the forward pass being launched records; None: it does not record.
        records_decode: whether the pass is a decode step with a tracked request; its first
            attention layer then sets ``current``.
    """

    shape: ModelShape
    _: KW_ONLY
    track_count: int
    query_window: int
    max_sentences: int
    delimiters: Delimiters
    dtype: torch.dtype
    device: torch.device
    chain_tokens: int = 0

    def __post_init__(self) -> None:
        self.free_tracks = list(range(self.track_count, 0, -1))
        self.use_rows(0)
        self.current: Recording | None = None
        self.records_decode = False

    def use_rows(self, rows: int) -> None:
        """Allocate ``track_of_row``, once the number of page-table rows is known."""
        self.track_of_row = torch.zeros(rows, dtype=torch.int64, device=self.device)

    @property
    def ring_entries(self) -> int:
        """Queries of a track. A running step writes a chain behind those that are known, and one
        step more may add a chain before statistics have seen them."""
        return self.query_window + 2 * self.chain_tokens

    @cached_property
    def queries(self) -> QueryRings:
        heads, width = self.shape.query_heads, self.shape.head_dim
        sizes = (self.shape.layers, self.track_count + 1, self.ring_entries, heads, width)
        return QueryRings(torch.zeros(sizes, dtype=self.dtype, device=self.device))

    @cached_property
    def sentences(self) -> SentenceTable:
        return SentenceTable(
            self.track_count,
            self.max_sentences,
            self.shape.hidden_size,
            self.delimiters,
            self.dtype,
            self.device,
        )

    @cached_property
    def chains(self) -> DraftChains:
        sizes = self.track_count, self.chain_tokens, self.shape.hidden_size
        return DraftChains(*sizes, self.dtype, self.device)

    def reserve(self) -> None:
        """Allocate the large buffers.

        Raises:
            torch.OutOfMemoryError: the device has no memory for them beside the KV pool.
        """
        _ = self.queries, self.sentences, self.chains

    def start(self, row: int, track_id: int, preset_bit: int) -> None:
        """A request begins its prefill: assign the track to its row and clear the track.

        Must run on the stream of the forward pass, where an earlier step may still write to it.
        """
        self.track_of_row[row].fill_(track_id)  # an assignment would wait for the device
        self.sentences.reset(track_id, preset_bit)
        self.chains.reset(track_id)

    def _recorded(self, track_id: int) -> dict[str, Tensor]:
        """Views of what the track holds: its rows of the sentence tables, and its ring."""
        rows = {name: table[track_id] for name, table in self.sentences.tables().items()}
        return {**rows, "queries": self.queries.data[:, track_id]}

    def request_bytes(self) -> int:
        """How many bytes ``save`` copies for one request."""
        return sum(part.nbytes for part in self._recorded(0).values())

    def save(self, track_id: int, copies: HostCopies) -> dict[str, HostCopy]:
        """Copy the recordings of a request."""
        return {name: copies.add(part) for name, part in self._recorded(track_id).items()}

    def restore(self, track_id: int, saved: Mapping[str, HostCopy]) -> None:
        """Write what ``save`` returned to any track, after ``start`` and on the same stream."""
        for name, part in self._recorded(track_id).items():
            part.copy_(saved[name].to(self.device))

    def decode_recording(self, rows: Tensor, positions: Tensor) -> Recording:
        """Where a decode step writes. Graph-safe.

        Args:
            rows: int64 [B], of the page table. positions: int64 [B], logical; with drafts of the
                tokens of all chains, one chain after the other.
        """
        tracks = self.track_of_row[rows]
        if not self.chain_tokens:
            return Recording(tracks, positions)
        of_tokens = tracks.unsqueeze(1).expand(-1, self.chain_tokens).flatten()
        positions = positions[: of_tokens.shape[0]]  # DP attention pads a step
        self.add_accepted(tracks, positions[:: self.chain_tokens])
        return Recording(of_tokens, positions, verified=tracks)

    def add_accepted(self, tracks: Tensor, positions: Tensor) -> None:
        """Add the accepted tokens of the last chains to the sentences. Graph-safe.

        Args:
            tracks: int64 [B]. positions: int64 [B], of the first token behind them.
        """
        self.chains.add_accepted(tracks, positions, self.sentences)

    def record_queries(self, recording: Recording, layer: int, q: Tensor) -> None:
        """q: float [tokens of the pass, Hq * d] or [tokens of the pass, Hq, d]."""
        if recording.tokens is not None and recording.tokens.shape[0] == 0:
            return  # and nothing is allocated for it
        heads, head_dim = self.queries.data.shape[-2:]
        q = q.view(-1, heads, head_dim)
        if recording.tokens is not None:
            q = q[recording.tokens]
        q = q[: recording.positions.shape[0]]  # as above
        self.queries.write(layer, recording.tracks, recording.positions, q)

    def record_hidden(self, recording: Recording, token_ids: Tensor, hidden: Tensor) -> None:
        """token_ids: int64 [tokens of the pass]; hidden: float [tokens, D], after final norm."""
        if recording.verified is not None:
            count = recording.positions.shape[0]
            self.chains.keep(recording.verified, token_ids[:count], hidden[:count])
            return
        if recording.tokens is None:
            self.sentences.step(recording.tracks, token_ids, hidden)
            return
        for tracks, tokens in recording.generated:
            self.sentences.step(tracks, token_ids[tokens], hidden[tokens])

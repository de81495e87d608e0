"""Pools with pages of several tokens: a compaction moves KV to the front of its row's own pages.

SGLang gives a request whole pages, so entry i of its row is slot ``i % page`` of page ``i // page``
of the row, and the next token goes to the slot behind the last one. A compaction keeps that: the
row's first entries stay as they are, the KV of the kept tokens is moved there, and the pages behind
them are free. Pages that the radix tree may own lie in front of the first entry that moves.

Kept entries ascend, so KV only moves towards the front. No KV is overwritten before it is read:
``kernels/kv_move.py`` says why, and plain torch reads a whole buffer's part before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels.on_device import device_tensors, uses_triton


class KVMove:
    """``kv[slots[j]] = kv[slots[kept[j]]]`` of several rows, in every buffer.

    Args:
        buffers: [slots, ...] each, every layer's keys and values as they are stored.
        req_to_token: int32 [table rows, width], SGLang's page table.
        rows: of the requests, no row twice.
        selections: for each row, its kept and evicted entries.
        firsts: for each row, how many of its first entries are certainly kept: they do not move.

    Raises:
        torch.OutOfMemoryError: nothing has changed.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        req_to_token: Tensor,
        rows: Sequence[int],
        selections: Sequence[Selection],
        firsts: Sequence[int],
    ) -> None:
        self._launch: Callable[[], None] | None = None
        self._buffers = buffers
        if uses_triton(req_to_token.device):
            from sgl_skipkv.kernels.kv_move import SlotBuffers, move_kv

            kept = [selection.kept for selection in selections]
            offsets = [0, *accumulate(one.shape[0] for one in kept)]
            device, alike = req_to_token.device, SlotBuffers.of(buffers, req_to_token.device)
            at, firsts_at, kept_at = device_tensors([rows, firsts, offsets], device)
            halves = torch.cat(kept), kept_at
            self._launch = partial(move_kv, alike, req_to_token, at, firsts_at, *halves)
            return
        targets, sources = list[Tensor](), list[Tensor]()
        for row, (entries, evicted), first in zip(rows, selections, firsts, strict=True):
            keep_tokens = entries.shape[0]
            slots = req_to_token[row, : keep_tokens + evicted.shape[0]].to(torch.int64)
            targets.append(slots[first:keep_tokens])
            sources.append(slots[entries[first:]])
        self._targets, self._sources = torch.cat(targets), torch.cat(sources)
        moved = self._sources.shape[0]
        #: by shape of a slot; one buffer's part at a time
        self._staged = {
            buffer.shape[1:]: buffer.new_empty(moved, *buffer.shape[1:]) for buffer in buffers
        }

    def apply(self) -> None:
        """Move the KV. Allocates nothing; on a GPU one kernel launch where keys and values have
        one shape."""
        if self._launch is not None:
            self._launch()
            return
        for buffer in self._buffers:
            staged = self._staged[buffer.shape[1:]]
            torch.index_select(buffer, 0, self._sources, out=staged)
            buffer.index_copy_(0, self._targets, staged)

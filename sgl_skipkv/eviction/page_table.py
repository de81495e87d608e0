"""Rewrites rows of the page table in a compaction; a ledger check shows that no slot is lost.

SGLang's ``req_to_token`` has one row per request; entry i is the slot that holds the KV of the i-th
cached token, for all layers. The owners of a budgeted request's row::

    [0, prompt)       the radix tree (shared, locked)      freed by the tree, never by the plugin
    [prompt, n)       the request                          freed here, or by SGLang at the end
    [n, row width)    unused                               zero after a compaction

With ``protect_prompt: false`` the request also owns its prompt, and none of it is in the tree.

A compaction moves no KV: it writes the slot ids of the kept tokens to the front of the row, in
ascending logical position, and returns the other slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels.on_device import device_tensors, uses_triton


class RowRewrite:
    """The new contents of several rows, and the slots that they free.

    Args:
        req_to_token: int32 [table rows, width], SGLang's page table.
        rows: of the requests, no row twice.
        selections: for each row, its kept and evicted entries: a partition of those in use.
        positions: int64 [n] each, logical position of each entry.
        check: verify the ledger; reads device values, so it waits for the device.

    Raises:
        torch.OutOfMemoryError: nothing has changed.

    Attributes:
        freed: int64 [evicted] each, slots that are unused once the rows are written.
        kept_positions: int64 [kept of all], kept logical positions, request after request. On a
            GPU ``write`` fills them and ``freed``.
    """

    def __init__(
        self,
        req_to_token: Tensor,
        rows: Sequence[int],
        selections: Sequence[Selection],
        positions: Sequence[Tensor],
        *,
        check: bool = False,
    ) -> None:
        self._req_to_token, self._rows, self._slots = req_to_token, rows, list[Tensor]()
        self._launch: Callable[[], None] | None = None
        if check or not uses_triton(req_to_token.device):
            self.freed = list[Tensor]()
            for row, (kept, evicted), old in zip(rows, selections, positions, strict=True):
                slots = req_to_token[row, : old.shape[0]]
                self._slots.append(slots[kept])
                self.freed.append(slots[evicted].to(torch.int64))
                if check:
                    check_ledger(slots, self._slots[-1], self.freed[-1])
            pairs = zip(positions, selections, strict=True)
            self.kept_positions = torch.cat([old[kept] for old, (kept, _) in pairs])
            return
        from sgl_skipkv.kernels.row_compaction import compact_rows

        device = req_to_token.device
        kept_counts, evicted_counts = ([half[i].shape[0] for half in selections] for i in (0, 1))
        offsets = ([0, *accumulate(counts)] for counts in (kept_counts, evicted_counts))
        kept_at, evicted_at, at = device_tensors([*offsets, rows], device)
        kept, evicted = (torch.cat([half[i] for half in selections]) for i in (0, 1))
        flat = torch.cat(list(positions))
        freed = evicted.new_empty(evicted.shape[0])
        self.kept_positions = flat.new_empty(kept.shape[0])
        self.freed = list(torch.split(freed, evicted_counts))
        halves = (kept, kept_at, evicted, evicted_at)
        out = (freed, self.kept_positions)
        self._launch = partial(compact_rows, req_to_token, at, *halves, flat, *out)

    def write(self) -> None:
        """Rewrite the rows in place. Allocates nothing; one kernel launch on a GPU."""
        if self._launch is not None:
            self._launch()
            return
        for row, slots, freed in zip(self._rows, self._slots, self.freed, strict=True):
            keep_tokens = slots.shape[0]
            self._req_to_token[row, :keep_tokens] = slots
            self._req_to_token[row, keep_tokens : keep_tokens + freed.shape[0]] = 0


class LedgerError(AssertionError):
    """kept + freed = old does not hold: a slot is missing, repeated or new."""


def check_ledger(old: Tensor, kept: Tensor, freed: Tensor) -> None:
    """Raise ``LedgerError`` unless ``kept`` and ``freed`` are a partition of ``old``.

    Also requires that no slot occurs twice and none is 0, SGLang's padding slot.
    """
    before = old.to(torch.int64).sort().values
    after = torch.cat([kept.to(torch.int64), freed.to(torch.int64)]).sort().values
    if before.shape != after.shape or not torch.equal(before, after):
        raise LedgerError(
            f"kept + freed = old: {kept.numel()} + {freed.numel()} slots against {old.numel()}, or "
            "not the same slots"
        )
    if before.numel() and (int(before[0]) <= 0 or bool((before[1:] == before[:-1]).any())):
        raise LedgerError("a row names slot 0 or the same slot twice")

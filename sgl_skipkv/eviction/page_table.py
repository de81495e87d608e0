"""Rewrites rows of the page table in a compaction; a ledger check shows that no slot is lost.

SGLang's ``req_to_token`` has one row per request; entry i is the slot that holds the KV of the i-th
cached token, for all layers. The owners of a budgeted request's row::

    [0, prompt)       the radix tree (shared, locked)      freed by the tree, never by the plugin
    [prompt, n)       the request                          freed here, or by SGLang at the end
    [n, row width)    unused                               zero after a compaction

With ``protect_prompt: false`` the request also owns its prompt, and none of it is in the tree.

With pages of one token a compaction moves no KV: it writes the slot ids of the kept tokens to the
front of the row, in ascending logical position, and returns the other slots. With larger pages it
moves KV (``kv_move.py``), because entry i of a row is slot ``i % page`` of a page, and the row
loses its last slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from sgl_skipkv.eviction.ledger import check_ledger, check_pages
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels.on_device import device_tensors, uses_triton


class RowRewrite:
    """The new contents of several rows, and the slots that they free.

    Args:
        req_to_token: int32 [table rows, width], SGLang's page table.
        rows: of the requests, no row twice.
        selections: for each row, its kept and evicted entries: a partition of those in use.
        positions: int64 [n] each, logical position of each entry.
        page_tokens: of the pool; above 1 the slots stay and the KV of the kept entries is moved.
        check: verify the ledger; reads device values, so it waits for the device.

    Raises:
        torch.OutOfMemoryError: nothing has changed.

    Attributes:
        vacated: int64 [evicted] each, slots that hold no token once the rows are written, in the
            order of the row where the slots stay.
        kept_positions: int64 [kept of all], kept logical positions, request after request. On a
            GPU ``write`` fills them and ``vacated``.
    """

    def __init__(
        self,
        req_to_token: Tensor,
        rows: Sequence[int],
        selections: Sequence[Selection],
        positions: Sequence[Tensor],
        *,
        page_tokens: int = 1,
        check: bool = False,
    ) -> None:
        self._req_to_token, self._rows, self._slots = req_to_token, rows, list[Tensor]()
        self._launch: Callable[[], None] | None = None
        if check or not uses_triton(req_to_token.device):
            self.vacated = list[Tensor]()
            for row, (kept, evicted), old in zip(rows, selections, positions, strict=True):
                slots, keep_tokens = req_to_token[row, : old.shape[0]], kept.shape[0]
                left = slots[kept] if page_tokens == 1 else slots[:keep_tokens].clone()
                lost = slots[evicted] if page_tokens == 1 else slots[keep_tokens:]
                self._slots.append(left)
                self.vacated.append(lost.to(torch.int64, copy=True))
                if check:
                    check_ledger(slots, left, lost)
                if check and page_tokens > 1:
                    check_pages(slots, kept, evicted, page_tokens)
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
        vacated = evicted.new_empty(evicted.shape[0])
        self.kept_positions = flat.new_empty(kept.shape[0])
        self.vacated = list(torch.split(vacated, evicted_counts))
        halves, out = (kept, kept_at, evicted, evicted_at), (vacated, self.kept_positions)
        rewrite = partial(compact_rows, slots_stay=page_tokens > 1)
        self._launch = partial(rewrite, req_to_token, at, *halves, flat, *out)

    def write(self) -> None:
        """Rewrite the rows in place. Allocates nothing; one kernel launch on a GPU."""
        if self._launch is not None:
            self._launch()
            return
        for row, slots, vacated in zip(self._rows, self._slots, self.vacated, strict=True):
            keep_tokens = slots.shape[0]
            self._req_to_token[row, :keep_tokens] = slots
            self._req_to_token[row, keep_tokens : keep_tokens + vacated.shape[0]] = 0

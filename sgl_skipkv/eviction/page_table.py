"""The page table of one request after a compaction, and the ledger that proves nothing was lost.

SGLang's ``req_to_token`` has one row per request; entry i names the slot that holds the KV of the
i-th cached token, for all layers at once. Who owns which part of a row of a budgeted request::

    [0, prompt)       the radix tree (shared, locked)      freed by the tree, never by us
    [prompt, n)       the request itself                      freed here, or by SGLang at the end
    [n, row width)    nobody                               zero after a compaction

(With ``protect_prompt: false`` the request owns its prompt too and nothing of it is in the tree.)

A compaction moves no KV: it writes the survivors' slot ids to the front of the row, in ascending
logical position, and hands the other slots back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels.on_device import device_tensor, uses_triton


def compact_row(
    req_to_token: Tensor, row: int, row_tokens: int, selection: Selection, *, check: bool = False
) -> Tensor:
    """Rewrite one row in place and return the slots that nobody refers to any more.

    Args:
        req_to_token: int32 [rows, width], SGLang's page table (changed in place).
        row: the request's row.
        row_tokens: entries in use before the compaction.
        selection: partition of ``range(row_tokens)``.
        check: verify the ledger; reads device values, so it waits for the device.

    Returns:
        int64 [evicted], freed slot ids.
    """
    old = req_to_token[row, :row_tokens]
    kept, freed = old[selection.kept], old[selection.evicted].to(torch.int64)
    if check:
        check_ledger(old, kept, freed)
    keep_tokens = kept.shape[0]
    req_to_token[row, :keep_tokens] = kept
    req_to_token[row, keep_tokens:row_tokens] = 0
    return freed


def compact_rows(
    req_to_token: Tensor,
    rows: Sequence[int],
    selections: Sequence[Selection],
    positions: Sequence[Tensor],
    *,
    check: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Rewrite the rows of several requests in place; on a GPU in one launch.

    Args:
        req_to_token, check: as in ``compact_row``.
        rows: of the requests, no row twice.
        selections: of each row's entries.
        positions: int64 [n] each, logical position of each entry.

    Returns:
        of each request int64 [evicted], freed slot ids, and int64 [kept], positions that stayed.
    """
    if check or not uses_triton(req_to_token.device):
        return [
            (
                compact_row(req_to_token, row, old.shape[0], selection, check=check),
                old[selection.kept],
            )
            for row, selection, old in zip(rows, selections, positions, strict=True)
        ]
    from sgl_skipkv.kernels import row_compaction

    device = req_to_token.device
    kept, evicted = ([part[i].shape[0] for part in selections] for i in (0, 1))
    freed, stayed = row_compaction.compact_rows(
        req_to_token,
        device_tensor(rows, device),
        torch.cat([selection.kept for selection in selections]),
        device_tensor([0, *accumulate(kept)], device),
        torch.cat([selection.evicted for selection in selections]),
        device_tensor([0, *accumulate(evicted)], device),
        torch.cat(list(positions)),
    )
    return list(zip(torch.split(freed, evicted), torch.split(stayed, kept), strict=True))


class LedgerError(AssertionError):
    """kept + freed = old does not hold: a slot was lost, doubled or invented."""


def check_ledger(old: Tensor, kept: Tensor, freed: Tensor) -> None:
    """Raise ``LedgerError`` unless ``kept`` and ``freed`` are a partition of ``old``.

    Also requires that no slot is named twice and none is 0, SGLang's padding slot.
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

"""Checks of a rewritten row (``check_ledger``, a debug setting): no slot is lost, and none is there
twice."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_skipkv.error_boundary import FatalError


class LedgerError(FatalError, AssertionError):
    """A slot is missing, repeated, new or in another place than its entry."""


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


def check_pages(slots: Tensor, kept: Tensor, evicted: Tensor, page_tokens: int) -> None:
    """Raise ``LedgerError`` unless the row consists of whole pages in order, the last of which may
    be partly used, and its kept and evicted entries are a partition. Waits for the device."""
    entries = torch.arange(slots.shape[0], device=slots.device)
    both = torch.cat([kept, evicted]).sort().values
    if not torch.equal(both, entries) or bool((kept[1:] <= kept[:-1]).any()):
        raise LedgerError(f"kept + evicted = the row's {slots.shape[0]} entries, kept in order")
    pages = slots[::page_tokens] // page_tokens
    if not torch.equal(slots, pages[entries // page_tokens] * page_tokens + entries % page_tokens):
        raise LedgerError(f"entry i is slot i % {page_tokens} of its page: {slots.tolist()}")
    ordered = pages.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()) or bool((pages <= 0).any()):
        raise LedgerError(f"a row names page 0 or the same page twice: {pages.tolist()}")

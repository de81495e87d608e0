"""The KV that ``kernels/kv_move.py`` reads and writes, counted where Triton's interpreter does."""

from __future__ import annotations

from itertools import accumulate

import torch
from kv_bytes import counted_bytes
from triton_tools import interpreted

from sgl_skipkv.kernels import kv_move
from sgl_skipkv.request.pages import page_ceil

PROMPT_TOKENS, KEPT_TOKENS, INTERVAL, BUFFERS = 64, 1024, 128, 4


def kept_entries(kind: str, row_tokens: int, keep_tokens: int) -> torch.Tensor:
    """The prompt, and of the rest: any, or the most recent."""
    rest = torch.arange(PROMPT_TOKENS, row_tokens)
    chosen = rest[torch.randperm(len(rest))] if kind == "random" else rest.flip(0)
    own = chosen[: keep_tokens - PROMPT_TOKENS].sort().values
    return torch.cat([torch.arange(PROMPT_TOKENS), own])


def moved_over_survivors(kind: str, page_tokens: int, requests: int = 2) -> float:
    """Bytes read and written, over those of the KV that stays."""
    torch.manual_seed(page_tokens)
    row_tokens = PROMPT_TOKENS + KEPT_TOKENS + INTERVAL
    width = page_ceil(row_tokens, page_tokens)
    pages = 1 + torch.randperm(requests * width // page_tokens)
    slots = pages[:, None] * page_tokens + torch.arange(page_tokens)
    table = slots.view(requests, width).to(torch.int32)
    buffers = [torch.randn(int(slots.max()) + 1, 1, 8) for _ in range(BUFFERS)]
    keep_tokens = PROMPT_TOKENS + KEPT_TOKENS
    kept = [kept_entries(kind, row_tokens, keep_tokens) for _ in range(requests)]
    offsets = torch.tensor([0, *accumulate(map(len, kept))])
    expected = [buffer.clone() for buffer in buffers]
    for buffer in expected:
        for row, entries in enumerate(kept):
            buffer[table[row, : len(entries)].long()] = buffer[table[row, entries].long()]
    firsts = torch.full((requests,), PROMPT_TOKENS)
    alike = kv_move.SlotBuffers.of(buffers, table.device)
    with interpreted(kv_move), counted_bytes(buffers) as counted:
        kv_move.move_kv(alike, table, torch.arange(requests), firsts, torch.cat(kept), offsets)
    assert all(map(torch.equal, buffers, expected))
    survivors = len(torch.cat(kept)) * sum(buffer[0].nbytes for buffer in buffers)
    return counted.total() / survivors

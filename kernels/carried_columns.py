"""What stays known of each row's spared column when a compaction keeps some rows: two launches.

A column that stays moves to its new place; of one that goes it stays known how many of the columns
below it live, for only among those can the row find another. ``spared_columns`` takes it from
there. The truth is ``reference.carried_columns``, request by request.

With ``place(c)`` = how many kept rows lie below c: ``c`` becomes ``place(c)`` if it is kept, else
``-1 - place(c)``; ``-1 - m``, "none but perhaps among the first m", becomes ``-1 - place(m)``.

How: ``kept`` ascends, so ``place`` is a binary search. The first launch makes it once per column,
for all heads and rows: a table of a few kilobytes per request, which the second reads from L1.

Mutates nothing but its own buffers. Not for CUDA graphs: the grid depends on the lengths.

Floors for k tokens kept, over the batch: bytes ``8 L Hkv k + 8 k`` and 56 per request; operations
none.
"""

# Triton ships no types, and its functions are a language of their own.
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.compile_case import CompileCase
from sgl_skipkv.kernels.on_device import device_tensor

_TILE = {"HEAD_TILE": 8, "BLOCK": 128}
_PLACES_BLOCK = 256


@triton.jit(do_not_specialize=["count", "blocks"])
def _places_kernel(requests, count, blocks, BLOCK: tl.constexpr):
    """``place(c)`` of every column that is kept, ``-1 - place(c)`` of the others and of n."""
    request = requests + tl.program_id(0) // blocks
    kept = tl.load(request + 2 * count).to(tl.pointer_type(tl.int64))
    keep_tokens = tl.load(request + 3 * count).to(tl.int32)
    places = tl.load(request + 5 * count).to(tl.pointer_type(tl.int32))
    tokens = tl.load(request + 6 * count).to(tl.int32)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    place = tl.zeros([BLOCK], tl.int32)
    left = keep_tokens
    while left > 1:
        half = left // 2
        place += tl.where(tl.load(kept + place + half - 1) < column, half, 0)
        left -= half
    # A request of which nothing is kept has no entry to look at.
    here = tl.load(kept + place, mask=place < keep_tokens, other=0)
    place += ((here < column) & (keep_tokens > 0)).to(tl.int32)
    stays = (here == column) & (keep_tokens > 0)
    tl.store(places + column, tl.where(stays, place, -1 - place), mask=column <= tokens)


@triton.jit(do_not_specialize=["count", "blocks"])
def _carried_columns_kernel(
    requests, count, blocks, HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, BLOCK: tl.constexpr
):
    request = requests + tl.program_id(0) // blocks
    spared = tl.load(request).to(tl.pointer_type(tl.int32))
    head_stride = tl.load(request + count)
    kept = tl.load(request + 2 * count).to(tl.pointer_type(tl.int64))
    keep_tokens = tl.load(request + 3 * count).to(tl.int32)
    out = tl.load(request + 4 * count).to(tl.pointer_type(tl.int32))
    places = tl.load(request + 5 * count).to(tl.pointer_type(tl.int32))
    start = tl.program_id(0) % blocks * BLOCK
    if start >= keep_tokens:
        return
    j = start + tl.arange(0, BLOCK)[None, :]
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]).to(tl.int64)
    inside = (head < HEADS) & (j < keep_tokens)
    row = tl.load(kept + j, mask=j < keep_tokens, other=0)
    before = tl.load(spared + head * head_stride + row, mask=inside, other=-1)
    place = tl.load(places + tl.where(before >= 0, before, -1 - before), mask=inside, other=0)
    # Of a column that lives the table has its place; of all else what is below it is what counts.
    now = tl.where((before >= 0) | (place < 0), place, -1 - place)
    tl.store(out + head * keep_tokens + j, now, mask=inside)


def carried_columns(spared: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """What stays known of the spared columns of each request.

    Args:
        spared: int32 [L, Hkv, n] each, as ``spared_columns`` returned it or as this did; heads
            one after the other at one distance, tokens contiguous.
        kept: int64 [k] each, contiguous, rows that stay, ascending.

    Returns:
        int32 [L, Hkv, k] each, contiguous, memory of its own: a view of the batch's would keep what
        all of them knew alive.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    out = [
        one.new_empty(*one.shape[:2], rows.shape[0]) for one, rows in zip(spared, kept, strict=True)
    ]
    longest = max((rows.shape[0] for rows in kept), default=0)
    if not longest:
        return out
    layers, kv_heads, _ = spared[0].shape
    for one, rows in zip(spared, kept, strict=True):
        strides = (kv_heads * one.stride(1), 1, 1)
        if one.shape[:2] != (layers, kv_heads) or (
            (one.stride(0), one.stride(2), rows.stride(0)) != strides
        ):
            raise ValueError(
                f"spared, kept: expected [{layers}, {kv_heads}, n] with heads at one distance and "
                f"contiguous tokens, got {[*one.shape]} with strides {[*one.stride()]} and "
                f"{[*rows.stride()]}"
            )
    device = spared[0].device
    tokens = [one.shape[2] for one in spared]
    places = torch.empty(sum(tokens) + len(tokens), dtype=torch.int32, device=device)
    starts = accumulate((n + 1 for n in tokens[:-1]), initial=0)
    requests = (
        [one.data_ptr() for one in spared],
        [one.stride(1) for one in spared],
        [rows.data_ptr() for rows in kept],
        [rows.shape[0] for rows in kept],
        [one.data_ptr() for one in out],
        [places.data_ptr() + 4 * start for start in starts],
        tokens,
    )
    table = device_tensor([*chain(*requests)], device)
    blocks = triton.cdiv(max(tokens) + 1, _PLACES_BLOCK)
    _places_kernel[(len(out) * blocks,)](table, len(out), blocks, BLOCK=_PLACES_BLOCK)
    heads, blocks = layers * kv_heads, triton.cdiv(longest, _TILE["BLOCK"])
    _carried_columns_kernel[(len(out) * blocks, triton.cdiv(heads, _TILE["HEAD_TILE"]))](
        table, len(out), blocks, HEADS=heads, **_TILE
    )
    return out


def bytes_moved(keep_tokens: int, *, requests: int, layers: int, kv_heads: int) -> dict[str, int]:
    """Floor of the bytes of device memory that one request moves, by kind; tokens over the
    batch."""
    return {
        "spared": 8 * layers * kv_heads * keep_tokens,
        "selections": 8 * keep_tokens,
        "requests": 56 * requests,
    }


def compile_cases() -> list[CompileCase]:
    """R1-Qwen-7B; all types are fixed."""
    signature = {"requests": "*i64", "count": "i32", "blocks": "i32"}
    return [
        CompileCase("places", _places_kernel, signature, {"BLOCK": _PLACES_BLOCK}),
        CompileCase("112-heads", _carried_columns_kernel, signature, {"HEADS": 112, **_TILE}),
    ]

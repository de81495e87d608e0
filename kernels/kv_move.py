"""Move the KV of tokens that stay to the front of their rows' own pages: all layers, one launch.

For each request, with ``slots`` its row of the page table and ``kept`` the entries that stay:
``kv[slots[j]] = kv[slots[kept[j]]]`` in every layer's keys and values, for every ``j`` from the
request's first entry that may move. The page table itself stays as it is, so slot modulo page stays
entry modulo page. The truth is ``eviction.pages.KVMove`` in plain torch.

Mutates the KV buffers. Reads nothing on the host, needs no scratch memory. Not for CUDA graphs: the
grid depends on the requests.

In place, because ``kept`` ascends, so that ``kept[j] >= j``: KV only moves towards the front. A
program owns a slice of every slot of one buffer, so no two programs touch the same bytes, and walks
one request's kept entries in ascending tiles. Tile t reads entries from its own first one on, and
all earlier tiles have written entries in front of that: no tile reads what an earlier one wrote. In
a tile one entry's target may be another entry's source: hence one barrier between the loads and the
stores. Two requests share no slot behind their first entries that may move.

Floors with M entries that are moved and S bytes of a slot in all buffers: bytes ``(2 S + 16) M``
and ``24 B``; operations none. Each program reads the indices again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor

#: entries that are loaded together, words of a slot that a program owns
_TILE, _SLICE, _WARPS = 128, 16, 4
#: bytes of a word -> how Triton moves it; the widest that fits is used
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _move_kv_kernel(
    pointers, req_to_token, rows, firsts, kept, kept_offsets, row_stride,
    SLICES: tl.constexpr, SLOT_WORDS: tl.constexpr, SLOT_STRIDE: tl.constexpr, WORD: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    request, owned = tl.program_id(1), tl.program_id(0)
    row = req_to_token + tl.load(rows + request).to(tl.int64) * row_stride
    first_kept = tl.load(kept_offsets + request)
    keep_tokens = (tl.load(kept_offsets + request + 1) - first_kept).to(tl.int32)
    kv = tl.load(pointers + owned // SLICES).to(tl.pointer_type(WORD))
    word = owned % SLICES * SLICE + tl.arange(0, SLICE)
    kv = tl.multiple_of(kv, 16) + word[None, :]
    for start in range(tl.load(firsts + request).to(tl.int32), keep_tokens, TILE):
        j = start + tl.arange(0, TILE)
        inside = j < keep_tokens
        entry = tl.load(kept + first_kept + j, mask=inside, other=0)
        source = tl.load(row + entry, mask=inside, other=0).to(tl.int64)
        target = tl.load(row + j, mask=inside, other=0).to(tl.int64)
        moves = inside[:, None] & (word < SLOT_WORDS)[None, :]
        words = tl.load(kv + source[:, None] * SLOT_STRIDE, mask=moves, other=0)
        tl.debug_barrier()
        tl.store(kv + target[:, None] * SLOT_STRIDE, words, mask=moves)


@dataclass(frozen=True)
class SlotBuffers:
    """Buffers whose slots look alike, so that one launch moves all of them.

    Attributes:
        pointers: int64 [buffers], their addresses; their owner keeps them.
        slot_bytes, stride_bytes: of one slot, and from one slot to the next.
    """

    pointers: Tensor
    slot_bytes: int
    stride_bytes: int

    @classmethod
    def of(cls, buffers: Sequence[Tensor], device: torch.device) -> list[SlotBuffers]:
        """[slots, ...] each, every layer's keys and values, grouped.

        Raises:
            ValueError: slots that are not contiguous, or not aligned to 16 bytes.
        """
        by_size = defaultdict[tuple[int, int], list[int]](list)
        for buffer in buffers:
            slot, stride_bytes = buffer[0], buffer.stride(0) * buffer.itemsize
            if not slot.is_contiguous() or buffer.data_ptr() % 16:
                raise ValueError(
                    f"buffers: expected contiguous slots at a multiple of 16 bytes, got strides "
                    f"{[*buffer.stride()]}, {buffer.data_ptr() % 16} bytes behind one"
                )
            by_size[slot.numel() * buffer.itemsize, stride_bytes].append(buffer.data_ptr())
        return [cls(device_tensor(ptrs, device), *size) for size, ptrs in by_size.items()]

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        sizes = self.slot_bytes, self.stride_bytes
        word = next(width for width in _WORDS if not any(size % width for size in sizes))
        words = self.slot_bytes // word
        return {
            "SLICES": triton.cdiv(words, _SLICE),
            "SLOT_WORDS": words,
            "SLOT_STRIDE": self.stride_bytes // word,
            "WORD": _WORDS[word],
            "TILE": _TILE,
            "SLICE": _SLICE,
        }


def move_kv(
    buffers: Sequence[SlotBuffers],
    req_to_token: Tensor,
    rows: Tensor,
    firsts: Tensor,
    kept: Tensor,
    kept_offsets: Tensor,
) -> None:
    """Move the KV of B requests in place.

    Args:
        buffers: every layer's keys and values (changed in place).
        req_to_token: int32 [table rows, width], the page table; columns contiguous.
        rows: int64 or int32 [B], each request's row; no row twice.
        firsts: int64 [B], the first entry that may move: of those in front ``kept[j] == j``.
        kept: int64 [K], entries that stay, request after request, ascending within each.
        kept_offsets: int64 [B + 1], where each request's part of ``kept`` starts, and K.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    requests = rows.shape[0]
    shapes = firsts.shape[0], kept_offsets.shape[0] - 1, req_to_token.stride(1)
    if shapes != (requests, requests, 1):
        raise ValueError(
            f"firsts, kept_offsets, stride of a row: expected {requests}, {requests} + 1 and 1, "
            f"got {shapes[0]}, {shapes[1]} + 1 and {shapes[2]}"
        )
    if requests == 0:
        return
    for group in buffers:
        sizes = group.constants
        _move_kv_kernel[(group.pointers.shape[0] * sizes["SLICES"], requests)](
            *(group.pointers, req_to_token, rows, firsts, kept, kept_offsets),
            req_to_token.stride(0),
            **sizes,
            num_warps=_WARPS,
            num_stages=1,
        )

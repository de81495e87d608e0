"""Rewrite the page-table rows of a batch after its selections, in place: one launch.

For each request, with ``old`` the row before: ``row[j] = old[kept[j]]``, zero from there to where
``old`` ended, ``freed = old[evicted]`` and ``kept_positions = positions[kept]``. The truth is
``page_table.RowRewrite`` in plain torch. No KV moves.

With pages of several tokens KV has moved (``kv_move``) and the slots stay where they are: then
``row[j] = old[j]`` and ``freed = old[kept tokens:]``, the slots that hold no token any more.

Mutates ``req_to_token``. Reads nothing on the host; the sizes come from the selections' shapes.

In place without a copy, because ``kept`` ascends, so that ``kept[j] >= j``: an entry only moves
towards the front. One program per request walks the kept entries in ascending blocks. Block t reads
entries from ``t * BLOCK`` on, whatever the selection, and writes ``[t * BLOCK, (t + 1) * BLOCK)``,
so no block reads what an earlier one wrote. What it writes may be what its own threads still have
to read: hence one barrier between the loads and the stores of a block. What later blocks and the
zeros overwrite, all threads have read before the last barrier. The freed entries may lie anywhere,
so they are read first, all of them, with a barrier behind them.

Floors with K entries kept and E evicted, over the batch: bytes ``(8 + 4 + 4 + 8 + 8) K +
(8 + 4 + 8 + 4) E`` and 40 per request; operations none.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: most rows are one block, because every block waits for memory twice
_BLOCK, _WARPS = 4096, 16


@triton.jit
def _compact_rows_kernel(
    req_to_token, rows, kept, kept_offsets, evicted, evicted_offsets, positions, freed,
    kept_positions, row_stride, SLOTS_STAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = req_to_token + tl.load(rows + b).to(tl.int64) * row_stride
    first_kept, first_evicted = tl.load(kept_offsets + b), tl.load(evicted_offsets + b)
    keep_tokens = tl.load(kept_offsets + b + 1) - first_kept
    evict_tokens = tl.load(evicted_offsets + b + 1) - first_evicted
    own_positions = positions + first_kept + first_evicted

    for start in range(0, evict_tokens, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < evict_tokens
        if SLOTS_STAY:
            entry = keep_tokens + j
        else:
            entry = tl.load(evicted + first_evicted + j, mask=inside, other=0)
        slot = tl.load(row + entry, mask=inside, other=0)
        tl.store(freed + first_evicted + j, slot.to(tl.int64), mask=inside)
    tl.debug_barrier()
    for start in range(0, keep_tokens, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < keep_tokens
        entry = tl.load(kept + first_kept + j, mask=inside, other=0)
        if not SLOTS_STAY:
            slot = tl.load(row + entry, mask=inside, other=0)
        position = tl.load(own_positions + entry, mask=inside, other=0)
        if not SLOTS_STAY:
            tl.debug_barrier()
            tl.store(row + j, slot, mask=inside)
        tl.store(kept_positions + first_kept + j, position, mask=inside)
    for start in range(0, evict_tokens, BLOCK):
        j = start + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), tl.int32)
        tl.store(row + keep_tokens + j, zeros, mask=j < evict_tokens)


def compact_rows(
    req_to_token: Tensor,
    rows: Tensor,
    kept: Tensor,
    kept_offsets: Tensor,
    evicted: Tensor,
    evicted_offsets: Tensor,
    positions: Tensor,
    freed: Tensor,
    kept_positions: Tensor,
    *,
    slots_stay: bool = False,
) -> None:
    """Rewrite the rows of B requests in place, and write down what they gave up and what they kept.

    Request b has n entries in its row; its parts of ``kept`` and ``evicted`` are a partition of
    ``range(n)``, which is where n comes from.

    Args:
        req_to_token: int32 [table rows, width], SGLang's page table (changed in place).
        rows: int64 or int32 [B], each request's row; no row twice.
        kept: int64 [K], entries to keep, request after request, ascending within each.
        kept_offsets: int64 [B + 1], where each request's part of ``kept`` starts, and K.
        evicted: int64 [E], the other entries, request after request, in any order.
        evicted_offsets: int64 [B + 1], where each request's part of ``evicted`` starts, and E.
        positions: int64 [K + E], logical position of each row's entries, request after request.
        freed: int64 [E], slots of ``evicted``, that nobody refers to any more (output).
        kept_positions: int64 [K], logical positions of the entries kept (output).
        slots_stay: whether KV was moved instead, so that the first entries stay and ``freed`` is
            what lies behind them.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    requests = rows.shape[0]
    if req_to_token.stride(1) != 1 or positions.shape[0] != kept.shape[0] + evicted.shape[0]:
        raise ValueError(
            f"positions: expected {kept.shape[0]} + {evicted.shape[0]} for contiguous rows, got "
            f"{positions.shape[0]} for rows of strides {[*req_to_token.stride()]}"
        )
    if kept_offsets.shape[0] != requests + 1 or evicted_offsets.shape[0] != requests + 1:
        raise ValueError(
            f"kept_offsets, evicted_offsets: expected {requests} + 1 of each, got "
            f"{kept_offsets.shape[0]} and {evicted_offsets.shape[0]}"
        )
    if requests == 0:
        return
    _compact_rows_kernel[(requests,)](
        *(req_to_token, rows, kept, kept_offsets, evicted, evicted_offsets, positions),
        *(freed, kept_positions, req_to_token.stride(0)),
        SLOTS_STAY=slots_stay,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        num_stages=1,
    )

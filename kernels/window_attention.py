"""Importance of each cached token to its request's last queries: two launches, K read once.

Per layer and KV head ``a[w, i] = max over the G query heads of (q_w . k_i) * scale`` (times the
layer's ``k_scale``, if keys have one), softmax over ``i in [0, n - W)``, mean over w,
``max_pool1d(width, padding width // 2, stride 1)`` over i; then the mean over KV heads and layers.
The truth is ``reference.window_attention``, per request and layer.

Source: SkipKV (arXiv 2512.07993) eq. 4 and R-KV (arXiv 2505.24133) section 3.2.

How: persistent programs walk tasks (request, layer, KV head). Pass A loads each block of keys once
through the page table, takes the logits of all W x G queries from it with one tensor-core product
(or a few, where W x G is large), keeps maximum and normaliser of every w, and leaves the logits in
a scratch of the program's own: [W, n] floats that the next task overwrites, stored so that the keys
that stream by do not push them out of L2.
Pass B reads them back and writes the mean over w of the softmax. The second kernel pools, and sums
over heads and layers in one fixed order. No float is added atomically: the bits of a request depend
neither on the rest of the batch nor on the number of programs.

Mutates nothing but its own buffers. Not for CUDA graphs: grid and workspace depend on the lengths.

Floors, with c = sum over requests of n - W: bytes ``c (L Hkv (d key_bytes + 8) + 8) + L B W Hq d
key_bytes`` (the first 8 are the heads' means, written and read once); operations ``2 L Hq W d c``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.paged_keys import PagedKeys, widened

_PROGRAMS_PER_PROCESSOR = 3
_SCRATCH_BYTES = 64 << 20
_POOL = {"HEAD_TILE": 16, "BLOCK": 64}


@triton.jit(do_not_specialize=["scratch_tokens", "columns", "tasks"])
def _importance_kernel(
    k_ptrs, req_to_token, rows, offsets, page_stride, k_scales,
    queries, query_tracks, last_positions, layer_stride, track_stride, entry_stride, head_stride,
    scratch, scratch_tokens, importance, columns, scale_log2, tasks,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, K_TYPE: tl.constexpr,
    FLOAT8: tl.constexpr, RING: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr, WINDOW_TILE: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, SUM_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    d = tl.arange(0, HEAD_DIM)
    m = tl.arange(0, WINDOW_TILE * GROUP_PADDED)
    w_of_tile = tl.arange(0, WINDOW_TILE)
    tile_index = tl.arange(0, TILES)[:, None]
    w_all = tl.arange(0, TILES * WINDOW_TILE)
    own_scratch = scratch + program.to(tl.int64) * WINDOW * scratch_tokens
    for task in range(program, tasks, tl.num_programs(0)):
        head = task % KV_HEADS
        layer = tl.cast(task // KV_HEADS % LAYERS, tl.int64)
        request = task // (KV_HEADS * LAYERS)
        first = tl.load(offsets + request)
        candidates = (tl.load(offsets + request + 1) - first).to(tl.int32) - WINDOW
        page = req_to_token + tl.load(rows + request) * page_stride
        keys = tl.load(k_ptrs + layer).to(tl.pointer_type(K_TYPE)) + head * K_HEAD_STRIDE
        keys = tl.multiple_of(keys, 16)
        query_track = tl.load(query_tracks + request)
        own_queries = queries + layer * layer_stride + query_track * track_stride
        last = tl.load(last_positions + request)
        factor = scale_log2
        if k_scales is not None:
            factor *= tl.load(k_scales + layer)

        # Padding repeats the last query head, which the maximum over the group absorbs, and the
        # oldest query, which nothing stores.
        query_head = head * GROUP + tl.minimum(m % GROUP_PADDED, GROUP - 1)
        q_offset = query_head.to(tl.int64) * head_stride
        entry = (last - tl.minimum(m // GROUP_PADDED, WINDOW - 1)) % RING
        q = tl.load(own_queries + (entry * entry_stride + q_offset)[:, None] + d[None, :])

        highest = tl.full([TILES, WINDOW_TILE], float("-inf"), tl.float32)
        normaliser = tl.zeros([TILES, WINDOW_TILE], tl.float32)
        for start in range(0, candidates, BLOCK):
            i = start + tl.arange(0, BLOCK)
            inside = i < candidates
            slot = tl.load(page + i, mask=inside, other=0).to(tl.int64)
            k = tl.load(
                keys + (slot[:, None] * K_SLOT_STRIDE + d[None, :]), mask=inside[:, None], other=0
            )
            k = widened(k, FLOAT8).to(q.dtype)  # float16 and bfloat16 hold any float8
            for tile in range((WINDOW + WINDOW_TILE - 1) // WINDOW_TILE):
                if TILES > 1:
                    w = tile * WINDOW_TILE + m // GROUP_PADDED
                    entry = (last - tl.minimum(w, WINDOW - 1)) % RING
                    q = tl.load(
                        own_queries + (entry * entry_stride + q_offset)[:, None] + d[None, :]
                    )
                logits = tl.dot(q, tl.trans(k), input_precision="ieee")
                logits = tl.reshape(logits, [WINDOW_TILE, GROUP_PADDED, BLOCK])
                logits = tl.max(logits, axis=1) * factor  # a positive factor keeps the order
                w = tile * WINDOW_TILE + w_of_tile
                tl.store(
                    own_scratch + (w.to(tl.int64)[:, None] * scratch_tokens + i[None, :]),
                    logits,
                    mask=(w < WINDOW)[:, None] & inside[None, :],
                    eviction_policy="evict_last",
                )
                logits = tl.where(inside[None, :], logits, float("-inf"))
                is_tile = tile_index == tile
                old = tl.max(tl.where(is_tile, highest, float("-inf")), axis=0)
                new = tl.maximum(old, tl.max(logits, axis=1))
                added = tl.sum(tl.exp2(logits - new[:, None]), axis=1)
                kept = tl.sum(tl.where(is_tile, normaliser, 0.0), axis=0) * tl.exp2(old - new)
                highest = tl.where(is_tile, new[None, :], highest)
                normaliser = tl.where(is_tile, (kept + added)[None, :], normaliser)

        tl.debug_barrier()  # pass B reads what other threads wrote
        is_query = w_all < WINDOW
        top = tl.where(is_query, tl.reshape(highest, [TILES * WINDOW_TILE]), 0.0)
        total = tl.where(is_query, tl.reshape(normaliser, [TILES * WINDOW_TILE]), 1.0)
        out = importance + (layer * KV_HEADS + head) * columns + (first - request * WINDOW)
        for start in range(0, candidates, SUM_BLOCK):
            i = start + tl.arange(0, SUM_BLOCK)
            inside = i < candidates
            logits = tl.load(
                own_scratch + (w_all.to(tl.int64)[:, None] * scratch_tokens + i[None, :]),
                mask=is_query[:, None] & inside[None, :],
                other=float("-inf"),
                cache_modifier=".cg",
            )
            attention = tl.exp2(logits - top[:, None]) * (1.0 / total)[:, None]
            tl.store(out + i, tl.sum(attention, axis=0) / WINDOW, mask=inside)
        tl.debug_barrier()  # the next task overwrites the scratch


@triton.jit(do_not_specialize=["columns", "width", "blocks"])
def _pool_kernel(
    importance, columns, offsets, width, out, blocks,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(offsets + request)
    candidates = (tl.load(offsets + request + 1) - first).to(tl.int32) - WINDOW
    if tl.program_id(0) % blocks * BLOCK < candidates:
        half = width // 2
        first -= request * WINDOW
        total = tl.zeros([HEAD_TILE, BLOCK], tl.float32)
        for start in range(0, HEADS, HEAD_TILE):
            head = start + tl.arange(0, HEAD_TILE)
            row = importance + (head.to(tl.int64) * columns)[:, None] + first
            pooled = tl.full([HEAD_TILE, BLOCK], float("-inf"), tl.float32)
            for shift in range(-half, half + 1):
                j = i + shift
                inside = (j >= 0) & (j < candidates)
                seen = (head < HEADS)[:, None] & inside[None, :]
                near = tl.load(row + j[None, :], mask=seen, other=float("-inf"))
                pooled = tl.maximum(pooled, near)
            total += tl.where((head < HEADS)[:, None], pooled, 0.0)
        mean = tl.sum(total, axis=0) / HEADS
        tl.store(out + first + i, mean, mask=i < candidates)


def window_attention(
    paged: PagedKeys,
    queries: Tensor,
    query_tracks: Tensor,
    last_positions: Tensor,
    *,
    window: int,
    width: int,
    scale: float,
) -> Tensor:
    """Importance of each request's candidates, the tokens before its last ``window``.

    Args:
        paged: requests of more than ``window`` tokens each.
        queries: [L, tracks, R, Hq, d] in the dtype of the keys, float16, bfloat16 or float32
            if those are float8: ring buffer of rotated queries, that of logical position p at
            ``p % R``.
        query_tracks: int64 [B], where in it each request's queries are.
        last_positions: int64 [B], logical position of each request's newest query, ``window - 1``
            or more.
        window: W, queries per request, R or fewer.
        width: of the max-pool in tokens, odd.
        scale: factor on the logits.

    Returns:
        float32 [sum of n - window], request after request.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    paged.check_queries(queries)
    if not 1 <= window <= queries.shape[2]:
        raise ValueError(f"window: expected 1 to {queries.shape[2]} queries, got {window}")
    if min(paged.row_tokens, default=window + 1) <= window:
        raise ValueError(f"row_tokens: expected more than {window}, got {min(paged.row_tokens)}")
    columns = paged.columns - window * len(paged.row_tokens)
    out = torch.empty(columns, dtype=torch.float32, device=paged.device)
    if not paged.row_tokens:
        return out
    heads, group = paged.layers * paged.kv_heads, queries.shape[3] // paged.kv_heads
    longest = max(paged.row_tokens) - window
    programs = _programs_that_fit(paged.programs(_PROGRAMS_PER_PROCESSOR), window, longest)
    scratch = out.new_empty(programs, window, longest)
    importance = out.new_empty(heads, columns)
    options = _options(queries.dtype, paged.head_dim, queries.shape[2], window, group)
    _importance_kernel[(programs,)](
        *(*paged.arguments, paged.k_scales),
        *(queries, query_tracks, last_positions, *queries.stride()[:4]),
        *(scratch, longest, importance, columns, scale * math.log2(math.e), paged.tasks),
        **paged.constants,
        **options,
    )
    blocks = triton.cdiv(longest, _POOL["BLOCK"])
    _pool_kernel[(len(paged.row_tokens) * blocks,)](
        *(importance, columns, paged.offsets, width, out, blocks),
        WINDOW=window,
        HEADS=heads,
        **_POOL,
    )
    return out


def _options(
    dtype: torch.dtype, head_dim: int, ring: int, window: int, group: int
) -> dict[str, int]:
    """Constants of a window and launch options."""
    full = dtype == torch.float32
    group_padded = triton.next_power_of_2(group)
    # Rows of one product: all W x G queries where they fit; 16 at least, for the tensor cores.
    tile = min(triton.next_power_of_2(window), max(1, (32 if full else 64) // group_padded))
    tile = max(tile, 16 // group_padded)
    tiles = triton.next_power_of_2(triton.cdiv(window, tile))
    # Where all queries fit into one product, four warps and three programs per multiprocessor were
    # fastest on an H100, faster than blocks of 128 keys and eight warps.
    small = not full and tiles == 1 and head_dim <= 128
    return {
        "RING": ring,
        "WINDOW": window,
        "GROUP": group,
        "GROUP_PADDED": group_padded,
        "WINDOW_TILE": tile,
        "TILES": tiles,
        "BLOCK": 32 if full else 64,
        "SUM_BLOCK": max(16, min(256, 2048 // (tile * tiles))),
        "num_warps": 4 if small else 8,
        # Slots, then keys, then products: with five stages three blocks of keys are in flight; wide
        # heads then need more shared memory than some devices have.
        "num_stages": 2 if full else 5 if head_dim <= 128 else 3,
    }


def _programs_that_fit(programs: int, window: int, longest: int) -> int:
    """As many as have scratches in L2, and for one very long request not a gigabyte of them."""
    return max(1, min(programs, _SCRATCH_BYTES // (4 * window * longest)))

"""Attention that each cached token received at its request's last decode steps: two launches.

``P[t, i] = mean over layers and query heads of softmax over i of (q_t . k_i) * scale`` (times the
layer's ``k_scale``, if keys have one). ``over`` says what is taken of the rows, one per layer and
query head: their ``mean``; ``group_max``, the maximum over the query heads of each KV head, then
the mean over KV heads and layers; or ``max``, the maximum over all rows. Step t of a request's T
sees the columns ``[first, stop)``: ``stop = n - T + 1 + t`` where causal, which is what the model
saw at that step, and ``n - T`` of every step otherwise. 0 in columns that a step does not see and
in rows that a request has no step for. The truth is ``reference.causal_attention``, per layer, and,
where not causal, ``reference.selector_attention`` before its sum and pool.

Source: the windowed form of per-step statistics (H2O, arXiv 2306.14048; RaaS, arXiv 2502.11147;
LazyEviction, arXiv 2506.15969), TOVA (arXiv 2401.06104) and RPC (arXiv 2505.13866).
The maximum over a group, after the softmax: G-KV (arXiv 2512.00504).

How: the first kernel has a program per request, layer, KV head and tile of steps, and finds maximum
and normaliser of every query. The second has one per request, tile of steps and block of columns.
It walks layers and KV heads in one fixed order, computes their logits again and adds up. So no
buffer of [heads, n] exists, no float is added atomically, and the bits of a request depend neither
on the rest of the batch nor on the schedule.

Mutates nothing but its own buffers. Not for CUDA graphs: the grid depends on the lengths.

Floors, with N cached tokens and S steps of all requests: bytes ``L Hkv d key_bytes N + L Hq d
query_bytes S + 4 N (T + 1)``, operations ``2 L Hq d`` for each step and token that it sees. Both
kernels read the keys, so it moves and computes twice that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensors
from sgl_skipkv.kernels.paged_keys import PagedKeys, widened

#: what is taken of the rows -> ``OVER``
OVER = {"mean": 0, "group_max": 1, "max": 2}
_RUNTIME = ["causal", "tiles", "most_steps", "blocks", "columns"]


@triton.jit
def _query_offsets(
    tile, steps, last, head, entry_stride, head_stride,
    RING: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, STEP_TILE: tl.constexpr,
):  # fmt: skip
    """Step and place in the ring of each row of a tile, steps x padded group. Padding repeats the
    last step and the last query head, which nothing stores or adds."""
    m = tl.arange(0, STEP_TILE * GROUP_PADDED)
    step = tl.minimum(tile * STEP_TILE + m // GROUP_PADDED, steps - 1)
    query_head = head * GROUP + tl.minimum(m % GROUP_PADDED, GROUP - 1)
    entry = (last - (steps - 1 - step)) % RING
    return step, entry * entry_stride + query_head.to(tl.int64) * head_stride


@triton.jit
def _logits(q, keys, slot, inside, factor, d, K_SLOT_STRIDE: tl.constexpr, FLOAT8: tl.constexpr):
    """[rows, BLOCK], of a tile of queries and a block of one KV head's keys."""
    place = slot[:, None] * K_SLOT_STRIDE + d[None, :]
    k = tl.load(keys + place, mask=inside[:, None], other=0)
    k = widened(k, FLOAT8).to(q.dtype)  # float16 and bfloat16 hold any float8
    return tl.dot(q, tl.trans(k), input_precision="ieee") * factor


@triton.jit(do_not_specialize=_RUNTIME)
def _normaliser_kernel(
    k_ptrs, req_to_token, rows, offsets, page_stride, k_scales,
    queries, query_tracks, last_positions, layer_stride, track_stride, entry_stride, head_stride,
    step_counts, firsts, causal, tiles, highest, normaliser, scale_log2,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, K_TYPE: tl.constexpr,
    FLOAT8: tl.constexpr, RING: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    STEP_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head = task % KV_HEADS
    layer = tl.cast(task // KV_HEADS % LAYERS, tl.int64)
    request = task // (KV_HEADS * LAYERS)
    steps = tl.load(step_counts + request)
    if tile * STEP_TILE >= steps:
        return
    begin = tl.load(offsets + request)
    tokens = (tl.load(offsets + request + 1) - begin).to(tl.int32)
    page = req_to_token + tl.load(rows + request) * page_stride
    keys = tl.load(k_ptrs + layer).to(tl.pointer_type(K_TYPE)) + head * K_HEAD_STRIDE
    keys = tl.multiple_of(keys, 16)
    factor = scale_log2
    if k_scales is not None:
        factor *= tl.load(k_scales + layer)
    d = tl.arange(0, HEAD_DIM)
    step, place = _query_offsets(
        tile, steps, tl.load(last_positions + request), head, entry_stride, head_stride,
        RING, GROUP, GROUP_PADDED, STEP_TILE,
    )  # fmt: skip
    own_queries = queries + layer * layer_stride + tl.load(query_tracks + request) * track_stride
    q = tl.load(own_queries + place[:, None] + d[None, :])
    stop = (tokens - steps + causal * (step + 1)).to(tl.int32)
    top = tl.full([STEP_TILE * GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([STEP_TILE * GROUP_PADDED], tl.float32)
    # Every step sees the first column, so no maximum stays at minus infinity.
    for start in range(tl.load(firsts + request).to(tl.int32), tl.max(stop, axis=0), BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < tokens
        slot = tl.load(page + i, mask=inside, other=0).to(tl.int64)
        logits = _logits(q, keys, slot, inside, factor, d, K_SLOT_STRIDE, FLOAT8)
        logits = tl.where(i[None, :] < stop[:, None], logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, axis=1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(logits - new[:, None]), axis=1)
        top = new
    m = tl.arange(0, STEP_TILE * GROUP_PADDED)
    own = tl.program_id(0).to(tl.int64) * (STEP_TILE * GROUP_PADDED) + m
    tl.store(highest + own, top)
    tl.store(normaliser + own, total)


@triton.jit(do_not_specialize=_RUNTIME)
def _mean_attention_kernel(
    k_ptrs, req_to_token, rows, offsets, page_stride, k_scales,
    queries, query_tracks, last_positions, layer_stride, track_stride, entry_stride, head_stride,
    step_counts, firsts, causal, tiles, highest, normaliser, scale_log2,
    out, most_steps, columns, blocks,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    K_SLOT_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, K_TYPE: tl.constexpr,
    FLOAT8: tl.constexpr, RING: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    STEP_TILE: tl.constexpr, BLOCK: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks % tiles
    request = tl.program_id(0) // (blocks * tiles)
    begin = tl.load(offsets + request)
    tokens = (tl.load(offsets + request + 1) - begin).to(tl.int32)
    if block * BLOCK >= tokens:
        return
    steps = tl.load(step_counts + request)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < tokens
    page = req_to_token + tl.load(rows + request) * page_stride
    slot = tl.load(page + i, mask=inside, other=0).to(tl.int64)
    last, first = tl.load(last_positions + request), tl.load(firsts + request)
    query_track = tl.load(query_tracks + request)
    d = tl.arange(0, HEAD_DIM)
    m = tl.arange(0, STEP_TILE * GROUP_PADDED)
    own_step = tile * STEP_TILE + m // GROUP_PADDED
    stop = tl.where(own_step < steps, tokens - steps + causal * (own_step + 1), 0)
    seen = (i[None, :] >= first) & (i[None, :] < stop[:, None])
    seen &= (m % GROUP_PADDED < GROUP)[:, None]
    any_seen = (block * BLOCK < tl.max(stop, axis=0)) & ((block + 1) * BLOCK > first)
    # Triton's maxima over an axis drop a NaN. Every NaN of a row is in its normaliser.
    spoilt = tl.zeros([STEP_TILE * GROUP_PADDED], tl.float32)
    if OVER == 1:
        received = tl.zeros([STEP_TILE, BLOCK], tl.float32)
    else:
        received = tl.zeros([STEP_TILE * GROUP_PADDED, BLOCK], tl.float32)
    for pair in range(0, any_seen.to(tl.int32) * (LAYERS * KV_HEADS)):
        head, layer = pair % KV_HEADS, tl.cast(pair // KV_HEADS, tl.int64)
        keys = tl.load(k_ptrs + layer).to(tl.pointer_type(K_TYPE)) + head * K_HEAD_STRIDE
        keys = tl.multiple_of(keys, 16)
        factor = scale_log2
        if k_scales is not None:
            factor *= tl.load(k_scales + layer)
        _, place = _query_offsets(
            tile, steps, last, head, entry_stride, head_stride,
            RING, GROUP, GROUP_PADDED, STEP_TILE,
        )  # fmt: skip
        own_queries = queries + layer * layer_stride + query_track * track_stride
        q = tl.load(own_queries + place[:, None] + d[None, :])
        task = (tl.cast(request, tl.int64) * LAYERS + layer) * KV_HEADS + head
        own = (task * tiles + tile) * (STEP_TILE * GROUP_PADDED) + m
        top, total = tl.load(highest + own), tl.load(normaliser + own)
        logits = _logits(q, keys, slot, inside, factor, d, K_SLOT_STRIDE, FLOAT8)
        attention = tl.exp2(logits - top[:, None]) * (1.0 / total)[:, None]
        attention = tl.where(seen, attention, 0.0)
        if OVER == 0:
            received += attention
        elif OVER == 1:
            by_step = tl.reshape(attention, [STEP_TILE, GROUP_PADDED, BLOCK])
            received += tl.max(by_step, axis=1)
            spoilt += 0.0 * total
        else:
            received = tl.maximum(received, attention, propagate_nan=tl.PropagateNan.ALL)
    t = tile * STEP_TILE + tl.arange(0, STEP_TILE)
    if OVER == 1:
        of_step = tl.sum(tl.reshape(spoilt, [STEP_TILE, GROUP_PADDED]), axis=1)
        attended = received / (LAYERS * KV_HEADS) + tl.where(t < steps, of_step, 0.0)[:, None]
    else:
        by_step = tl.reshape(received, [STEP_TILE, GROUP_PADDED, BLOCK])
        if OVER == 0:
            attended = tl.sum(by_step, axis=1) / (LAYERS * KV_HEADS * GROUP)
        else:
            attended = tl.max(by_step, axis=1) + 0.0 * tl.sum(by_step, axis=1)
    to = out + t.to(tl.int64)[:, None] * columns + (begin + i)[None, :]
    tl.store(to, attended, mask=(t < most_steps)[:, None] & inside[None, :])


def step_attention(
    paged: PagedKeys,
    queries: Tensor,
    query_tracks: Tensor,
    last_positions: Tensor,
    steps: Sequence[int],
    firsts: Sequence[int],
    *,
    causal: bool,
    scale: float,
    over: str = "mean",
) -> Tensor:
    """Attention of each request's last steps, its oldest in row 0.

    Args:
        paged: requests of as many tokens as steps, or more.
        queries, query_tracks, last_positions: as ``window_attention.window_attention`` takes them.
        steps: T of each request, 1 to R.
        firsts: of each request the first column that its steps see; every step must see one.
        causal: each step sees its own token and those before it; otherwise no step sees the last T.
        scale: factor on the logits.
        over: what is taken of the rows, ``mean``, ``group_max`` or ``max``.

    Returns:
        float32 [max T, N], tokens request after request.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    paged.check_queries(queries)
    for count, first, tokens in zip(steps, firsts, paged.row_tokens, strict=True):
        most = min(queries.shape[2], tokens)
        if not 1 <= count <= most:
            raise ValueError(f"steps: expected 1 to {most}, got {count}")
        stop = tokens - count + causal
        if not 0 <= first < stop:
            raise ValueError(f"firsts: expected an integer in [0, {stop}), got {first}")
    most_steps = max(steps, default=0)
    out = torch.empty(most_steps, paged.columns, dtype=torch.float32, device=paged.device)
    if not paged.row_tokens:
        return out
    group = queries.shape[3] // paged.kv_heads
    options = _options(queries.dtype, paged.head_dim, queries.shape[2], group)
    tiles = triton.cdiv(most_steps, options["STEP_TILE"])
    rows = options["STEP_TILE"] * options["GROUP_PADDED"]
    highest, normaliser = out.new_empty(2, paged.tasks * tiles * rows).unbind()
    step_counts, first_columns = device_tensors([steps, firsts], paged.device)
    arguments = (
        *(*paged.arguments, paged.k_scales),
        *(queries, query_tracks, last_positions, *queries.stride()[:4]),
        *(step_counts, first_columns, int(causal), tiles),
        *(highest, normaliser, scale * math.log2(math.e)),
    )
    _normaliser_kernel[(paged.tasks * tiles,)](*arguments, **paged.constants, **options)
    blocks = triton.cdiv(max(paged.row_tokens), options["BLOCK"])
    _mean_attention_kernel[(len(paged.row_tokens) * tiles * blocks,)](
        *(*arguments, out, most_steps, paged.columns, blocks),
        **paged.constants,
        **{**options, **_over(over, paged.layer.dtype)},
    )
    return out


def _over(over: str, dtype: torch.dtype) -> dict[str, int]:
    """Constants of the second kernel that depend on what is taken of the rows."""
    constants = {"OVER": OVER[over]}
    if over == "group_max" and dtype == torch.float8_e4m3fn:
        constants["num_stages"] = 2  # a third would spill registers on sm_100
    return constants


def _options(dtype: torch.dtype, head_dim: int, ring: int, group: int) -> dict[str, int]:
    """Constants of a launch. Those of a server are always the same: bits may differ from tile to
    tile, so how many steps a batch replays must not decide about the tile."""
    group_padded = triton.next_power_of_2(group)
    full = dtype == torch.float32
    # 16 rows of a product at least, for the tensor cores; more share the keys that were loaded.
    step_tile = min(triton.next_power_of_2(ring), max(1, (32 if full else 64) // group_padded))
    return {
        "RING": ring,
        "GROUP": group,
        "GROUP_PADDED": group_padded,
        "STEP_TILE": max(step_tile, 16 // group_padded),
        "BLOCK": 32 if full else 64,
        "num_warps": 8 if full else 4,
        "num_stages": 2 if full or head_dim > 128 else 3,
    }

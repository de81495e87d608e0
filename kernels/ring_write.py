"""Store this step's rotated queries where the next compaction reads them: one launch per layer.

``ring[tracks[b], positions[b] % R] = q[b]`` for every token b of a tracked request.

Source: the window of recent queries of R-KV (arXiv 2505.24133) section 3.2 and SkipKV (arXiv
2512.07993) eq. 4, as a ring, so that no query ever moves. The truth is ``QueryRings.write``, less
its writes to track 0, which nobody reads.

Mutates ``ring``. Graph-safe: tracks and positions are read on the device, only shapes decide the
launch, nothing is allocated.

Floors for T tracked tokens of B: bytes ``T Hq d (q_bytes + ring_bytes)`` and the indices, 16 for
a tracked token and 8 for another; operations none.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# 16 bytes per thread of 4 warps where a number has 2 bytes, the widest load there is.
_BLOCK, _WARPS = 1024, 4


@triton.jit
def _ring_write_kernel(
    q, tracks, positions, ring, q_stride, window, width, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    track = tl.load(tracks + token).to(tl.int64)
    if track == 0:
        return
    entry = track * window + tl.load(positions + token) % window
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(q + token * q_stride + i, mask=i < width)
    tl.store(ring + entry * width + i, values, mask=i < width)


def ring_write(q: Tensor, tracks: Tensor, positions: Tensor, ring: Tensor) -> None:
    """Store one query per token.

    Args:
        q: float16, bfloat16 or float32 [B, Hq, d] or [B, Hq * d]; a row is contiguous, rows may
            lie apart, as in a view of a fused QKV product.
        tracks: int64 or int32 [B], track id of each token, 0 for none; any number of tokens
            may have none, no two others share track and ring entry.
        positions: int64 [B], logical position of each token, from 0.
        ring: as q in dtype or another of the three, contiguous [tracks, R, Hq, d], one layer's
            recent queries (changed in place). Track 0 is scratch and is not touched.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    tokens, (heads, head_dim) = q.shape[0], ring.shape[2:]
    width = heads * head_dim
    expected = ([heads, head_dim], [head_dim, 1]) if q.ndim == 3 else ([width], [1])
    if ([*q.shape[1:]], [*q.stride()[1:]]) != expected:
        raise ValueError(
            f"q: expected contiguous rows of {heads} * {head_dim} numbers, got {[*q.shape]} with "
            f"strides {[*q.stride()]}"
        )
    if not ring.is_contiguous():
        raise ValueError(f"ring: expected a contiguous tensor, got strides {[*ring.stride()]}")
    if tokens == 0:
        return
    _ring_write_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        *(q, tracks, positions, ring, q.stride(0), ring.shape[1], width),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )

"""Count one token per row and add the steering vector where it is due: one launch per decode step.

``residual[b] += (alpha_0[row] + gamma * nonexecution[row]) * vector`` where the token is a
delimiter inside the thinking part of a steered row. The truth is ``reference.steering_step``, bit
for bit, except that a row nobody steers is not counted either: nothing reads those counts, and
padding may repeat such a row any number of times.

Source: SkipKV (arXiv 2512.07993) section 4.2 and its algorithm 2; docs/steering.md says what
differs. Mutates ``residual`` and, of steered rows, ``nonexecution``, ``keyword_seen`` and
``thinking``.
Graph-safe: rows and tokens are read on the device, only B decides the launch, nothing is allocated.

One program per row: it alone updates the row's counts, once, and walks the row's D numbers.

Floors for B rows, M of them steered and C of those at a delimiter inside the thinking part: bytes
``9 B + 25 M + 2 C D residual_bytes + 4 D`` (the vector once, then it is in cache); operations
``2 C D``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels import reference

_DELIMITER = tl.constexpr(reference.DELIMITER)
_KEYWORD = tl.constexpr(reference.KEYWORD)
_THINK_START = tl.constexpr(reference.THINK_START)
_THINK_END = tl.constexpr(reference.THINK_END)
_BLOCK, _WARPS = 1024, 4
# A product and a sum that are rounded one by one, as torch does it.
_OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _steering_add_kernel(
    residual, vector, rows, token_ids, bits, steered, alpha_0, nonexecution, keyword_seen,
    thinking, gamma, residual_stride, width, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + b).to(tl.int64)
    if tl.load(steered + row) == 0:
        return
    token_class = tl.load(bits + tl.load(token_ids + b).to(tl.int64))
    closes = (token_class & _DELIMITER) != 0
    has_keyword = tl.load(keyword_seen + row) | ((token_class & _KEYWORD) != 0)
    thinks = tl.load(thinking + row) | ((token_class & _THINK_START) != 0)
    thinks = thinks & ((token_class & _THINK_END) == 0)
    count = tl.load(nonexecution + row) + (closes & has_keyword).to(tl.int32)
    # Every warp has loaded the row's entries before the first one stores them: one that came late
    # would count this token twice.
    tl.debug_barrier()
    tl.store(nonexecution + row, count)
    tl.store(keyword_seen + row, has_keyword & (closes == 0))
    tl.store(thinking + row, thinks)
    if closes & thinks:
        strength = tl.load(alpha_0 + row) + gamma * count.to(tl.float32)
        hidden = residual + b * residual_stride
        for start in range(0, width, BLOCK):
            i = start + tl.arange(0, BLOCK)
            values = tl.load(hidden + i, mask=i < width).to(tl.float32)
            moved = values + strength * tl.load(vector + i, mask=i < width)
            tl.store(hidden + i, moved, mask=i < width)


def steering_add(
    residual: Tensor,
    vector: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    *,
    bits: Tensor,
    gamma: float,
    steered: Tensor,
    alpha_0: Tensor,
    nonexecution: Tensor,
    keyword_seen: Tensor,
    thinking: Tensor,
) -> None:
    """Count one token per row; where it is a delimiter of a steered row's thoughts, add the vector.

    Args:
        residual: float16, bfloat16 or float32 [B, D], rows contiguous (changed in place).
        vector: float32 [D], contiguous.
        rows: int64 or int32 [B], row of the page table; no steered row twice, any other at will.
        token_ids: int64 or int32 [B], the tokens fed.
        bits: uint8 [vocabulary], class of each token, as in ``reference.steering_step``.
        gamma, steered, alpha_0, nonexecution, keyword_seen, thinking: as there.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    count, width = residual.shape
    if residual.stride(1) != 1 or vector.shape != (width,) or vector.stride(0) != 1:
        raise ValueError(
            f"residual, vector: expected contiguous rows [B, D] and [D], got {[*residual.shape]} "
            f"with strides {[*residual.stride()]} and {[*vector.shape]}"
        )
    if count == 0:
        return
    _steering_add_kernel[(count,)](
        *(residual, vector, rows, token_ids, bits),
        *(steered, alpha_0, nonexecution, keyword_seen, thinking),
        *(gamma, residual.stride(0), width),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        **_OPTIONS,
    )

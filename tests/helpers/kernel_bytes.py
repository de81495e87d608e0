"""Bytes that the scoring kernels allocate besides their output, for rows of so many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_skipkv.kernels.last_similar import bound_columns
from sgl_skipkv.kernels.window_attention import _programs_that_fit


def window_attention(
    row_tokens: Sequence[int], *, window: int, layers: int, kv_heads: int, programs: int
) -> int:
    """The scratches of the programs, and the heads' means."""
    tasks = len(row_tokens) * layers * kv_heads
    candidates = [n - window for n in row_tokens]
    scratch = 0
    if longest := max(candidates, default=0):
        scratch = _programs_that_fit(min(tasks, programs), window, longest) * window * longest
    return 4 * (scratch + layers * kv_heads * sum(candidates))


def key_redundancy(row_tokens: Sequence[int], *, layers: int, kv_heads: int, head_dim: int) -> int:
    """16 per key, and a bound for every 32."""
    heads, tasks = layers * kv_heads, len(row_tokens) * layers * kv_heads
    bounds = 4 * heads * bound_columns(row_tokens)
    return 16 * heads * sum(row_tokens) + 4 * tasks * (head_dim + 1) + bounds

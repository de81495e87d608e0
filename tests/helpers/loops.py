"""The papers' formulas as loops over Python floats (fp64): what the tests hold the package against.

They follow the definitions word by word and share no code with the package: every product, maximum,
softmax and mean is spelled out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Rows = list[list[float]]


#: float32 carries 24 bits; sums over a few hundred terms of size one lose some of them
TOLERANCE = 2e-6


def assert_near(found: Tensor, exact: Any, tolerance: float = TOLERANCE) -> None:
    """float32 against numbers in float64."""
    assert found.dtype == torch.float32
    expected = torch.tensor(exact, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0.0)


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / math.fsum(powers) for power in powers]


def cosine_matrix(rows: Sequence[Sequence[float]]) -> Rows:
    norms = [max(math.sqrt(dot(row, row)), 1e-8) for row in rows]
    units = [[x / norm for x in row] for row, norm in zip(rows, norms, strict=True)]
    return [[dot(a, b) for b in units] for a in units]


def importance(q: Tensor, k: Tensor, kernel: int = 7, scale: float | None = None) -> Rows:
    """I[h][i]: the best of the group's heads, softmax without the window, mean, max-pool."""
    window, heads, width = q.shape
    n, kv_heads, _ = k.shape
    queries, keys = q.double().tolist(), k.double().tolist()
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    group, pooled = heads // kv_heads, []
    for h in range(kv_heads):
        attention = [
            softmax(
                [
                    max(dot(queries[w][h * group + g], keys[i][h]) * scale for g in range(group))
                    for i in range(n - window)
                ]
            )
            for w in range(window)
        ]
        mean = [math.fsum(column) / window for column in zip(*attention, strict=True)]
        reach = kernel // 2
        pooled.append([max(mean[max(i - reach, 0) : i + reach + 1]) for i in range(n - window)])
    return pooled


def redundancy(k: Tensor, threshold: float = 0.5) -> Rows:
    """R[h][i]: mean over rows of the cosine, less each row's last similar key, softmax over i."""
    n, kv_heads, _ = k.shape
    result = []
    for h in range(kv_heads):
        matrix = cosine_matrix(k[:, h].double().tolist())
        for r in range(n):
            matrix[r][r] = 0.0
            similar = [c for c in range(n) if matrix[r][c] > threshold]
            if similar:
                matrix[r][max(similar)] = 0.0
        result.append(softmax([math.fsum(matrix[r][i] for r in range(n)) / n for i in range(n)]))
    return result


def rkv_scores(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    sigma: float = 0.1,
    kernel: int = 7,
    threshold: float = 0.5,
) -> list[float]:
    """Z = sigma I - (1 - sigma) R, mean over heads, then layers; 0 for the window.

    Args:
        queries: [L, W, Hq, d]. keys: [L, n, Hkv, d].
    """
    layers, n, heads, _ = keys.shape
    total = [0.0] * n
    for q, k in zip(queries, keys, strict=True):
        important, redundant = importance(q, k, kernel, scale), redundancy(k, threshold)
        for h in range(heads):
            for i in range(n - len(q)):
                z = sigma * important[h][i] - (1.0 - sigma) * redundant[h][i]
                total[i] += z / heads / layers
    return total


def attention(q: Sequence[float], k: Sequence[Sequence[float]], scale: float) -> list[float]:
    """Softmax of one query over keys."""
    return softmax([dot(q, key) * scale for key in k])

"""Attention layers with a sliding window: what a compaction keeps for them, and which layers score.

SGLang masks a window in row entries, and a compacted row has fewer than its text has tokens. While
the last tokens of the row, as many as a window holds, are the last tokens of the text, the two
windows hold the same tokens. A compaction keeps these; until the next one the row only grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def model_window_tokens(layers: Sequence[Any], runner_window: int | None) -> int:
    """The largest window of these attention layers, in tokens; 0: none of them has a window.

    Returns ``max(sliding_window_size) + 1``, as config.json counts: a query sees itself and at most
    ``sliding_window_size`` tokens before it, in every backend. Triton's decode step sees one fewer.

    Args:
        layers: ``RadixAttention`` modules.
        runner_window: ``sliding_window_size`` of the model runner; some backends read it instead.
    """
    sizes = [layer.sliding_window_size for layer in layers if has_window(layer)]
    return max(*sizes, runner_window or 0) + 1 if sizes else 0


def scored_layers(layers: Sequence[Any]) -> list[Any]:
    """The layers that see the whole row: their queries are recorded, their attention scores.

    A window layer gives no later attention to anything that may be evicted, because all that it
    sees is kept. So it has no say.
    """
    return [layer for layer in layers if not has_window(layer)]


def has_window(layer: Any) -> bool:
    return bool(layer.sliding_window_size > 0)

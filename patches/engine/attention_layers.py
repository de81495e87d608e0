"""The model's attention layers: which of them score, and how far their windows reach.

SGLang masks a window in row entries, and a compacted row has fewer than its text has tokens. While
the last tokens of the row, as many as a window holds, are the last tokens of the text, the two
windows hold the same tokens. A compaction keeps these; until the next one the row only grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def attention_layers(model: Any) -> list[Any]:
    """The model's attention layers that attend to what is cached, in order.

    With MLA a layer has two of them: ``attn_mqa`` asks latents with absorbed queries, ``attn_mha``
    is of prefills whose keys are those of each head, which nobody caches.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, RadixAttention) and name.rpartition(".")[2] != "attn_mha"
    ]


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


def with_rotary_part(part: Tensor, rotary: Tensor | None) -> Tensor:
    """float [T, heads, d], queries or keys as they are cached: with MLA some backends get the
    latent part and the rotary part apart."""
    return part if rotary is None else torch.cat([part, rotary], dim=-1)

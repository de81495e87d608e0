"""How far the heads of a model look: the same for all requests, measured when a server starts.

A head that only ever looks at its last few tokens needs nothing older, whatever it has cached.
Which heads look further, and at single tokens, is a property of the model: one pass over plain text
tells, even in models for which that text is strange (docs/distinct.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: not counted: keys this near before a query, and the first of a text, which are attention sinks
NEAR_TOKENS, SINK_TOKENS = 8, 4
#: queries before this one have too little to choose from
FIRST_QUERY = 64
_QUERIES_TOGETHER = 32


def head_reach(queries: Tensor, keys: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """How much attention each KV head of one layer gives to the far token that it looks at most.

    ``mean over queries t >= 64 and query heads of max over 4 <= i < t - 8 of attention[t, i]``, the
    attention causal, over all tokens.

    Args:
        queries: float [T, Hq, d] of the positions from 0, T more than ``FIRST_QUERY``; with
            ``keys``, [T, Hkv, d], as the model's attention gets them.
        scale: factor on the logits.
        sinks: float [Hq], of a model with attention sinks: a head that looks at its sink looks at
            no token.

    Returns:
        float32 [Hkv], in [0, 1].
    """
    (tokens, heads, width), kv_heads = queries.shape, keys.shape[1]
    grouped, keys = queries.float().view(tokens, kv_heads, -1, width), keys.float()
    position, total = torch.arange(tokens, device=keys.device), keys.new_zeros(kv_heads)
    for start in range(FIRST_QUERY, tokens, _QUERIES_TOGETHER):  # blocks bound the memory
        block = slice(start, start + _QUERIES_TOGETHER)
        behind = position[block, None] - position
        far = (behind > NEAR_TOKENS) & (position >= SINK_TOKENS)
        logits = torch.einsum("thgd,nhd->hgtn", grouped[block], keys) * scale
        attention = softmax_with_sinks(logits.masked_fill(behind < 0, -torch.inf), sinks)
        total += attention.where(far, 0.0).amax(dim=-1).sum(dim=(1, 2))
    return total / ((tokens - FIRST_QUERY) * heads // kv_heads)


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """``softmax([logits, sink])`` without the sink's weight, the last: gpt-oss's attention.

    Args:
        logits: float32 [Hkv, query heads per KV head, T, n].
        sinks: float [Hq], a logit per query head; None: an ordinary softmax.
    """
    if sinks is None:
        return logits.softmax(dim=-1)
    kv_heads, group, steps, _ = logits.shape
    column = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, steps, 1)
    return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]

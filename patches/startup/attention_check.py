"""Checks at start that each attention layer's output is the attention of its recorded queries over
the cached keys and values, as scores assume.

A model may rotate its queries or keys behind the place where they are recorded, or add something of
its own to the attention. Scores would then be wrong without an error. One comparison per layer, in
the prefill that measures the model at start, finds such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.patches.engine.attention_layers import has_window, with_rotary_part
from sgl_skipkv.patches.engine.window_pool import has_window_pool, window_slots
from sgl_skipkv.policy.inputs.head_reach import softmax_with_sinks
from sgl_skipkv.ranks import ONE_RANK, Ranks

_LAST_QUERIES = 16
#: of the output's norm. Attention in bfloat16 is off by less than a hundredth.
_MOST_OFF = 0.1


class AttentionMismatch(ValueError):
    """A layer's output is not that of its recorded queries and cached keys and values."""


def attention_gap(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """How far a causal attention layer's output lies from the formula, over the output's norm.

    ``|softmax(scale q k) v - output| / |output|``, the softmax with a sink as one more logit.

    Args:
        queries, output: float [T, Hq, d] and [T, Hq, v], of the last T tokens.
        keys, values: float [n, Hkv, d] and [n, Hkv, v], of all tokens. With MLA the output is in
            latent space, as the values are.
        window: tokens before its own that a query sees; 0: all of them.
        sinks: float [Hq], a logit per query head without a value; None: the layer has none.

    Returns:
        float32 scalar.
    """
    (recent, heads, width), (tokens, kv_heads, _) = queries.shape, keys.shape
    grouped = queries.float().view(recent, kv_heads, -1, width)
    logits = torch.einsum("thgd,nhd->hgtn", grouped, keys.float()) * scale
    position = torch.arange(tokens, device=keys.device)
    back = position[-recent:, None] - position
    hidden = (back < 0) | (back > window) if window else back < 0
    attention = softmax_with_sinks(logits.masked_fill(hidden, -torch.inf), sinks)
    expected = torch.einsum("hgtn,nhd->thgd", attention, values.float()).reshape(recent, heads, -1)
    norm = output.float().norm().clamp_min(torch.finfo(torch.float32).tiny)
    gap: Tensor = (expected - output.float()).norm() / norm
    return gap


class AttentionCheck:
    """Compares every attention layer of one prefill, whose tokens are those of one request.

    With quantised keys nothing is compared: backends quantise their queries too, and how far that
    takes the output depends on the weights.

    Args:
        tokens: of the prefill. DP attention pads it.
    """

    def __init__(self, scheduler: Any, scale: float, tokens: int) -> None:
        runner = scheduler.tp_worker.model_runner
        self._exact = runner.kv_cache_dtype == runner.dtype
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._pool = self._allocator.get_kvcache()
        self._scale, self._tokens, self._queries = scale, tokens, dict[int, Tensor]()
        self.gaps = dict[int, Tensor]()

    def before(self, layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Forward pre-hook: the layer may change its queries in place."""
        queries = with_rotary_part(args[0], kwargs.get("q_rope")).detach()[: self._tokens]
        recent = queries.reshape(len(queries), -1, layer.head_dim)[-_LAST_QUERIES:]
        self._queries[layer.layer_id] = recent.clone()

    def after(
        self, layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Forward hook with keywords: compare the output with the formula."""
        queries = self._queries.pop(layer.layer_id)
        if not self._exact:
            return
        if not isinstance(output, Tensor):  # attention of two outputs, as sparse kinds have it
            self.gaps[layer.layer_id] = torch.full((), torch.nan, device=queries.device)
            return
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[3]
        slots = batch.out_cache_loc[: self._tokens]
        if has_window(layer) and has_window_pool(self._allocator):
            slots = window_slots(self._allocator, slots)
        keys, values = (part[slots] for part in self._pool.get_kv_buffer(layer.layer_id))
        shown = output.detach()[: self._tokens].reshape(len(slots), queries.shape[1], -1)
        shown = shown[-len(queries) :]
        window = max(layer.sliding_window_size, 0)
        sinks = kwargs.get("sinks")
        gap = attention_gap(queries, keys, values, shown, self._scale, window, sinks)
        self.gaps[layer.layer_id] = gap

    def conclude(self, ranks: Ranks = ONE_RANK) -> None:
        """Refuse the model if a layer of any rank is off.

        Raises:
            AttentionMismatch: with the layer that is off most.
        """
        if not self._exact:
            return
        gaps = ranks.gathered(torch.stack([self.gaps[i] for i in sorted(self.gaps)])).amax(dim=0)
        worst = int(gaps.argmax())  # of NaN as well
        if not float(gaps[worst]) <= _MOST_OFF:
            raise AttentionMismatch(
                f"attention layer {sorted(self.gaps)[worst]} is not that of its recorded queries "
                f"and cached keys: its output is off by {float(gaps[worst]):.0%} (queries or keys "
                "rotated elsewhere, another window, or a bias)"
            )

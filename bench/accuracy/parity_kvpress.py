"""kvpress's scores of given traces: run by ``bench/accuracy/parity.py``, in an environment that has
kvpress 0.5.x.

Reads one JSON object from standard input: ``model_path``, ``traces`` (token ids), ``window``, and
the file to write. What a press sees is what a compaction of this package would show it: all cached
tokens but the last ``window`` for Expected Attention, whose queries are those of the window alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from kvpress import ExpectedAttentionPress, KeyDiffPress
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

SINK = 4


def layer_tensors(model: Any, layer: int, hidden: Tensor, cache: Any, window: int) -> list[Tensor]:
    """Of one layer: keys, values [n, Hkv, d], queries [W, Hq, d], and the scores of both presses,
    the mean over KV heads: [n] and [n - W]."""
    attention = model.model.layers[layer].self_attn
    attention.rotary_emb = model.model.rotary_emb
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    n, width = keys.shape[2], attention.head_dim
    different = KeyDiffPress().score(attention, hidden, keys, values, None, {})
    # Mean and covariance of a window that is repeated are those of the window.
    asking = hidden[:, -window:].repeat(1, 2, 1)
    filler = hidden[:, :1].expand(1, n - asking.shape[1], -1)
    press = ExpectedAttentionPress(n_sink=n - asking.shape[1])
    mean, covariance = press.get_query_statistics(attention, torch.cat([filler, asking], dim=1))
    press = ExpectedAttentionPress(n_sink=SINK)
    press.get_query_statistics = lambda *_: (mean, covariance)
    older = keys[:, :, :-window], values[:, :, :-window]
    expected = press.score(attention, hidden, *older, None, {})
    projected = attention.q_proj(hidden[:, -window:]).view(1, window, -1, width).transpose(1, 2)
    turn = model.model.rotary_emb(hidden, torch.arange(n - window, n)[None])
    queries, _ = apply_rotary_pos_emb(projected, projected, *turn)
    return [
        *(part[0].transpose(0, 1).contiguous() for part in (keys, values, queries)),
        *(scores[0].mean(dim=0).contiguous() for scores in (different, expected)),
    ]


@torch.no_grad()
def main() -> None:
    request, seen_tensors = json.load(sys.stdin), dict[str, Tensor]()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(request["model_path"], dtype=torch.float32)
    for number, ids in enumerate(request["traces"]):
        cache, hidden = DynamicCache(), list[Tensor]()
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, seen=hidden: seen.append(kwargs["hidden_states"]),
                with_kwargs=True,
            )
            for layer in model.model.layers
        ]
        model(torch.tensor([ids]), past_key_values=cache)
        for hook in hooks:
            hook.remove()
        names = ("keys", "values", "queries", "keydiff", "expected")
        for layer, states in enumerate(hidden):
            parts = layer_tensors(model, layer, states, cache, request["window"])
            pairs = zip(names, parts, strict=True)
            seen_tensors |= {f"{number}.{layer}.{name}": part for name, part in pairs}
    save_file(seen_tensors, request["out"])


if __name__ == "__main__":
    main()

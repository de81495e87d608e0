"""The score oracle of a model with MLA: its keys and values are latents of one head per rank.

The forward makes keys of every head, as Hugging Face does. What a server caches is taken from it: a
layer's normalised latent and its rotary key. Queries are absorbed in float64.
"""

from __future__ import annotations

from pathlib import Path

import torch
from score_oracle import ScoreOracle
from torch import Tensor


class LatentOracle(ScoreOracle):
    """Args:
    ranks: of the server. Each has all latents, and some of the query heads.
    """

    def __init__(self, model_path: Path | str, ranks: int = 1) -> None:
        super().__init__(model_path)
        self.ranks = ranks

    def _forward(self, ids: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As there, with Hkv = ranks, d = r + rotary and values of r numbers.

        The formulas divide logits by the root of ``d``, so queries carry the rest of the model's
        own factor.
        """
        layers = [layer.self_attn for layer in self.model.model.layers]
        latents: list[Tensor] = []
        hooks = [
            layer.kv_a_layernorm.register_forward_hook(lambda m, args, out: latents.append(out[0]))
            for layer in layers
        ]
        try:
            queries, keys, _, hidden = super()._forward(ids, visible)
        finally:
            for hook in hooks:
                hook.remove()
        plain = layers[0].qk_nope_head_dim
        cached = torch.stack(latents)[:, :, None].expand(-1, -1, self.ranks, -1)
        absorbed = torch.stack(
            [
                torch.einsum("thd,hdr->thr", asked[..., :plain], _to_keys(layer))
                for layer, asked in zip(layers, queries, strict=True)
            ]
        )
        queries = torch.cat([absorbed, queries[..., plain:]], dim=3)
        rotary = keys[:, :, :1, plain:].expand(-1, -1, self.ranks, -1)
        keys = torch.cat([cached, rotary], dim=3)
        return queries * (layers[0].scaling * keys.shape[3] ** 0.5), keys, cached, hidden


def _to_keys(layer: torch.nn.Module) -> Tensor:
    """[Hq, nope, r], the part of a layer's expansion that makes keys."""
    weight = layer.kv_b_proj.weight.detach()
    return weight.unflatten(0, (layer.num_heads, -1))[:, : layer.qk_nope_head_dim]

"""MLA: scores of absorbed queries and latents against attention over the keys that latents stand
for.

The truth is in float64 and absorbs nothing: each head's keys are made from the latents,
``k = [W_UK c, rotary key]``, and asked the usual way. A score may be off by twice what the same
formula, in float32, is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import redundancy
from score_inputs import score_input
from torch import Tensor

from sgl_skipkv.kernels.reference import causal_attention, window_attention
from sgl_skipkv.patches.startup.attention_check import attention_gap
from sgl_skipkv.policy import make_policy

HEADS, NOPE, ROTARY, RANK, VALUE, WINDOW, TOKENS, LAYERS = 4, 16, 8, 24, 12, 8, 90, 3
#: not what follows from any size: YaRN multiplies it
SCALE = 1.3 / (NOPE + ROTARY) ** 0.5
KERNEL = 7


@dataclass(frozen=True)
class Layer:
    """What a layer of MLA has: its weights, queries of the last tokens, and what is cached."""

    to_keys: Tensor
    to_values: Tensor
    plain: Tensor
    turned: Tensor
    latents: Tensor
    rotary: Tensor

    @classmethod
    def drawn(cls, seed: int) -> Layer:
        draw = torch.Generator().manual_seed(seed)
        sizes = (
            *((HEADS, NOPE, RANK), (HEADS, VALUE, RANK), (WINDOW, HEADS, NOPE)),
            *((WINDOW, HEADS, ROTARY), (TOKENS, RANK), (TOKENS, ROTARY)),
        )
        return cls(*(torch.randn(size, generator=draw) for size in sizes))

    def to(self, dtype: torch.dtype) -> Layer:
        return Layer(*(part.to(dtype) for part in vars(self).values()))

    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [W, H, nope + rotary], keys [n, H, nope + rotary] and values [n, H, v] of every
        head."""
        keys = torch.einsum("hdr,nr->nhd", self.to_keys, self.latents)
        turned = self.rotary[:, None].expand(-1, HEADS, -1)
        values = torch.einsum("hdr,nr->nhd", self.to_values, self.latents)
        return torch.cat([self.plain, self.turned], 2), torch.cat([keys, turned], 2), values

    def absorbed(self, *, rotary: bool = True) -> tuple[Tensor, Tensor]:
        """As the recorder and the pool have it: queries [W, H, r + rotary], keys [n, 1, r +
        rotary]."""
        asked = torch.einsum("whd,hdr->whr", self.plain, self.to_keys)
        turned = self.turned if rotary else torch.zeros_like(self.turned)
        keys = torch.cat([self.latents, self.rotary], 1)[:, None]
        return torch.cat([asked, turned], 2), keys


def logits(layer: Layer) -> Tensor:
    """[H, W, n], the ordinary way."""
    queries, keys, _ = layer.expanded()
    return torch.einsum("whd,nhd->hwn", queries, keys) * SCALE


def importance(layer: Layer) -> Tensor:
    """[n - W]: the best of all heads, which share what is cached."""
    best = logits(layer).amax(dim=0)[:, : TOKENS - WINDOW].softmax(dim=1).mean(dim=0)
    return F.max_pool1d(best[None], KERNEL, 1, KERNEL // 2)[0]


def received(layer: Layer) -> Tensor:
    """[W, n]: attention of each query, mean over heads; queries newest last."""
    later = torch.arange(TOKENS) > torch.arange(TOKENS)[-WINDOW:, None]
    return logits(layer).masked_fill(later, -torch.inf).softmax(dim=2).mean(dim=0)


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max())


FORMULAS: dict[str, Any] = {
    "importance": (
        importance,
        lambda q, k, scale: window_attention(q, k, kernel=KERNEL, scale=scale)[0],
    ),
    "attention of steps": (received, lambda q, k, scale: causal_attention(q, k, scale=scale)),
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_absorbed_queries_ask_latents_what_queries_ask_keys(formula: str) -> None:
    """Over a few draws together, as one may be rounded luckily."""
    ordinary, ours = FORMULAS[formula]
    layers = [Layer.drawn(seed) for seed in range(8)]
    exact = [ordinary(layer.to(torch.float64)) for layer in layers]
    rounded = max(off(ordinary(layer), one) for layer, one in zip(layers, exact, strict=True))
    found = [ours(*layer.absorbed(), SCALE) for layer in layers]
    assert max(off(*pair) for pair in zip(found, exact, strict=True)) <= 2 * rounded
    # Mistakes that one could make.
    whole_key = 1.3 / (RANK + ROTARY) ** 0.5
    for scale, rotary in ((whole_key, True), (SCALE, False)):
        wrong = [ours(*layer.absorbed(rotary=rotary), scale) for layer in layers]
        assert min(off(*pair) for pair in zip(wrong, exact, strict=True)) > 100 * rounded


def test_a_layers_output_is_looked_at_in_latent_space() -> None:
    """It is the ordinary output before values are made of it; a part left out is seen."""
    layer = Layer.drawn(0)
    queries, keys = layer.absorbed()
    later = torch.arange(TOKENS) > torch.arange(TOKENS)[-WINDOW:, None]
    weights = logits(layer).masked_fill(later, -torch.inf).softmax(dim=2)
    output = torch.einsum("hwn,nr->whr", weights, layer.latents)
    of_values = torch.einsum("whr,hdr->whd", output, layer.to_values)
    ordinary = torch.einsum("hwn,nhd->whd", weights, layer.expanded()[2])
    torch.testing.assert_close(of_values, ordinary, atol=1e-4, rtol=1e-4)
    values = keys[..., :RANK]
    assert attention_gap(queries, keys, values, output, SCALE) < 1e-5
    without_rotary = layer.absorbed(rotary=False)[0]
    assert attention_gap(without_rotary, keys, values, output, SCALE) > 0.1
    assert attention_gap(queries, keys, values, output, SCALE * 1.3) > 0.1


@pytest.mark.parametrize("name", ["rkv", "snapkv"])
def test_a_policy_takes_the_latents_as_keys_of_one_head(name: str) -> None:
    """Importance from expanded keys; redundancy of what is cached, latent and rotary key."""
    layers = [Layer.drawn(seed) for seed in range(LAYERS)]
    absorbed = [layer.absorbed() for layer in layers]
    queries = torch.stack([q.flip(0) for q, _ in absorbed])
    inputs = dataclasses.replace(
        score_input(0, n=TOKENS, layers=LAYERS),
        keys=lambda layer: absorbed[layer][1],
        queries=lambda: queries,
        scale=SCALE,
    )
    found = make_policy(name, kernel=KERNEL).scores(inputs)[: TOKENS - WINDOW]
    exact = torch.stack([importance(layer.to(torch.float64)) for layer in layers]).mean(dim=0)
    if name == "rkv":
        repeats = torch.tensor([redundancy(keys)[0] for _, keys in absorbed]).mean(dim=0)
        sigma = make_policy(name).params.sigma
        exact = sigma * exact - (1 - sigma) * repeats[: TOKENS - WINDOW]
    assert off(found, exact) < 2e-6

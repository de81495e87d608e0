"""A lean Llama for training: the same function as `LlamaForCausalLM`, fewer and fatter matmuls.

`to_hf_state` splits the fused matrices into the names that Transformers and SGLang load.
Shapes: B rows, T tokens, D hidden, Hq query heads, Hkv key/value heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOOK_BACK = (1, 2)
"""Offsets that the first heads of the first layer start with: looking a result up by its name
needs the tokens before it, and a model this small finds that out late."""
LOOK_BACK_SCALE = (7.0, 7.0, 6.0, 5.0, 4.0, 3.0)
"""Amplitudes on the fastest rotary pairs."""


MATCH_WRITE = 0.02
MATCH_READ = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model. Heads of 64 and grouped queries, as GPU attention kernels want."""

    vocab: int
    hidden: int = 192
    layers: int = 4
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 512
    # Half of the pairs hardly turn within a trace: they match names at any distance.
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    max_positions: int = 32768

    def hf_config(self, end_id: int, pad_id: int, dtype: str) -> dict[str, Any]:
        """The `config.json` of the exported model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": end_id,
            "pad_token_id": pad_id,
            "torch_dtype": dtype,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> Shape:
        """The sizes that a `config.json` gives."""
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            query_heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            feed_forward=config["intermediate_size"],
            rope_theta=config["rope_theta"],
            norm_eps=config["rms_norm_eps"],
            max_positions=config["max_position_embeddings"],
        )


def rope_table(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 [length, d], in the half-split layout that Llama uses."""
    index = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    frequency = shape.rope_theta ** (-index / shape.head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [..., T, d]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Block(nn.Module):
    """One pre-norm layer: grouped-query attention, then SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_size = shape.query_heads * shape.head_dim
        self.kv_size = shape.kv_heads * shape.head_dim
        self.norm_in = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.norm_mid = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden, self.q_size + 2 * self.kv_size)
        self.out = nn.Linear(self.q_size, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    @torch.no_grad()
    def look_back(self, offsets: tuple[int, ...]) -> None:
        """Let the heads of the first groups start by reading the token `offset` places back.

        q = R(-offset) u and k = u give q . k = sum_i a_i^2 cos(w_i (distance - offset)), which is
        largest where the distance is the offset. It is a start, not a constraint.
        """
        shape = self.shape
        groups = shape.query_heads // shape.kv_heads
        u = torch.zeros(shape.head_dim)
        u[: len(LOOK_BACK_SCALE)] = torch.tensor(LOOK_BACK_SCALE)
        cos, sin = rope_table(shape, max(offsets) + 1, torch.device("cpu"))
        query, key, _ = self.qkv.bias.split((self.q_size, self.kv_size, self.kv_size))
        for head, offset in enumerate(offsets):
            turned = rotate(u, cos[offset], -sin[offset])
            query[head * shape.head_dim : (head + 1) * shape.head_dim] = turned
            group = head // groups
            key[group * shape.head_dim : (group + 1) * shape.head_dim] = u

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Hq, T, d] and keys, values [B, Hkv, T, d]; queries and keys rotated."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_in(x)).split((self.q_size, self.kv_size, self.kv_size), -1)
        head_dim = self.shape.head_dim
        q = rotate(q.view(batch, length, -1, head_dim).transpose(1, 2), cos, sin)
        k = rotate(k.view(batch, length, -1, head_dim).transpose(1, 2), cos, sin)
        return q, k, v.view(batch, length, -1, head_dim).transpose(1, 2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention output [B, Hq, T, d] and the feed-forward to the residual stream."""
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mid(x)).chunk(2, dim=-1)
        written: Tensor = x + self.down(F.silu(gate) * up)
        return written

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """x [B, T, D] -> [B, T, D], causal; or bool [B, 1, T, T] says which keys a query sees."""
        q, k, v = self.project(x, cos, sin)
        groups = self.shape.query_heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None
        )
        return self.finish(x, attended)


@torch.no_grad()
def match_names(first: Block, second: Block) -> None:
    """Let the first head of the second layer start by matching what the first layer brought back.

    Its query holds what stands one token back, its key what stands two tokens back, both as the
    first layer wrote them, on the rotary pairs that hardly turn: in `Name = value`, a value is
    found by its name at any distance. A start, too, not a constraint.
    """
    size, width = first.shape.head_dim, first.shape.hidden
    slow = torch.arange(size // 4, size // 2)
    slow = torch.cat((slow, slow + size // 2))
    basis = torch.linalg.qr(torch.randn(width, width)).Q
    read, one, two = basis[:, :size], basis[:, size : 2 * size], basis[:, 2 * size : 3 * size]
    _, _, value = first.qkv.weight.split((first.q_size, first.kv_size, first.kv_size))
    value[:size] = read.T
    first.out.weight[:, :size] = one * MATCH_WRITE
    first.out.weight[:, size : 2 * size] = two * MATCH_WRITE
    query, key, _ = second.qkv.weight.split((first.q_size, first.kv_size, first.kv_size))
    query[:size], key[:size] = 0.0, 0.0
    query[slow] = one.T[: len(slow)] * MATCH_READ
    key[slow] = two.T[: len(slow)] * MATCH_READ


class Reasoner(nn.Module):
    """The transformer with tied input and output embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm_out = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Depth-scaled writes into the residual stream keep its size at the start.
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if writes else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        first = self.blocks[0]
        assert isinstance(first, Block)
        second = self.blocks[1]
        assert isinstance(second, Block)
        first.look_back(LOOK_BACK)
        match_names(first, second)

    def hidden(self, ids: Tensor, visible: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm: ids [B, T] -> [B, T, D]."""
        cos, sin = rope_table(self.shape, ids.shape[1], ids.device)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin, visible)
        hidden: Tensor = self.norm_out(x)
        return hidden

    def forward(self, ids: Tensor, visible: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of ids [B, T]; ``visible`` as in `Block.forward`."""
        return F.linear(self.hidden(ids, visible), self.embed.weight)

    def to_hf_state(self) -> dict[str, Tensor]:
        """The weights under the names of `LlamaForCausalLM` (the head is tied, so not listed)."""
        state = {name: part.detach().clone().contiguous() for name, part in self._hf_parts()}
        # A Llama whose attention has biases has one on its output, too; here that is zero.
        return state | {
            name.replace(".weight", ".bias"): part.new_zeros(len(part))
            for name, part in state.items()
            if name.endswith("o_proj.weight")
        }

    def load_hf_state(self, state: dict[str, Tensor]) -> None:
        """Take over weights that carry the names of `LlamaForCausalLM`, with biases or without."""
        parts = dict(self._hf_parts())
        state = {name: part for name, part in state.items() if not name.endswith("o_proj.bias")}
        if not any(name.endswith(".bias") for name in state):
            state |= {
                name: torch.zeros_like(part) for name, part in parts.items() if "bias" in name
            }
        assert parts.keys() == state.keys(), f"weights differ: {parts.keys() ^ state.keys()}"
        with torch.no_grad():
            for name, part in parts.items():
                part.copy_(state[name])

    def _hf_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the weights, fused ones split, with their names outside."""
        yield "model.embed_tokens.weight", self.embed.weight
        yield "model.norm.weight", self.norm_out.weight
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            q, k, v = torch.split(block.qkv.weight, [block.q_size, block.kv_size, block.kv_size])
            gate, up = block.gate_up.weight.chunk(2)
            q_bias, k_bias, v_bias = torch.split(
                block.qkv.bias, [block.q_size, block.kv_size, block.kv_size]
            )
            layer = {
                "input_layernorm": block.norm_in.weight,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": block.out.weight,
                "post_attention_layernorm": block.norm_mid.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": block.down.weight,
            }
            for name, part in layer.items():
                yield f"model.layers.{index}.{name}.weight", part
            for name, part in (("q", q_bias), ("k", k_bias), ("v", v_bias)):
                yield f"model.layers.{index}.self_attn.{name}_proj.bias", part

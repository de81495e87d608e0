"""A decoder of a given size with random weights: one decode step over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.decode.attention import DecodeAttention, Heads
from sgl_skipkv.recording.recorder import Recorder

EPS, ROPE_BASE = 1e-6, 10_000.0


@dataclass(frozen=True)
class Size:
    """What of a model decides how long a step takes."""

    layers: int
    hidden_size: int
    heads: Heads
    mlp_size: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """Numbers that every step multiplies with: all but the embedding's, which are looked up."""
        attention = 2 * (self.heads.query + self.heads.kv) * self.heads.dim
        layer = (attention + 3 * self.mlp_size) * self.hidden_size
        return self.layers * layer + self.vocabulary * self.hidden_size

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.heads.kv * self.heads.dim * dtype.itemsize


SIZES = {
    "r1-qwen-7b": Size(28, 3584, Heads(28, 4, 128), 18944, 152064),
    "r1-llama-8b": Size(32, 4096, Heads(32, 8, 128), 14336, 128256),
    "tiny": Size(2, 64, Heads(4, 2, 16), 128, 160),
}


class KVPool:
    """Random keys and values of every layer, [slots + 1, Hkv, d]; slot 0 is nobody's."""

    def __init__(self, size: Size, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (slots + 1, size.heads.kv, size.heads.dim)
        self.k, self.v = (
            [torch.randn(shape, dtype=dtype, device=device) for _ in range(size.layers)]
            for _ in range(2)
        )


class DecodeModel:
    """Weights, and the step that they make: embedding, layers, final norm, next tokens."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        heads, hidden = size.heads, size.hidden_size
        self.embedding = self._matrix(size.vocabulary, hidden)
        self.head = self._matrix(size.vocabulary, hidden)
        self.norm = torch.ones(hidden, dtype=dtype, device=device)
        rows = (heads.query + 2 * heads.kv) * heads.dim
        self.layers = [
            (
                self._matrix(rows, hidden),
                self._matrix(hidden, heads.query * heads.dim),
                self._matrix(2 * size.mlp_size, hidden),
                self._matrix(hidden, size.mlp_size),
            )
            for _ in range(size.layers)
        ]
        exponents = torch.arange(0, heads.dim, 2, device=device) / heads.dim
        self._frequencies = ROPE_BASE**-exponents

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        pool: KVPool,
        attention: DecodeAttention,
        recorder: Recorder | None,
        rows: Tensor,
    ) -> Tensor:
        """One token per request, as the plugin sees it: queries and final hidden states recorded.

        Args:
            token_ids, positions: int64 [B]. slots: int64 [B], where their KV goes.
            recorder: None where nothing is evicted. rows: int64 [B], of the page table.

        Returns:
            int64 [B], the most likely next tokens.
        """
        heads, recording = self.size.heads, None
        if recorder is not None:
            recording = recorder.decode_recording(rows, positions)
        angles = positions[:, None, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding[token_ids]
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            rows = F.linear(self._normed(x), qkv).view(len(x), -1, heads.dim)
            q, k, v = rows.split([heads.query, heads.kv, heads.kv], dim=1)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            pool.k[i][slots], pool.v[i][slots] = k, v
            if recorder is not None and recording is not None:
                recorder.record_queries(recording, i, q)
            seen = attention.run(q, pool.k[i], pool.v[i])
            x = x + F.linear(seen.flatten(1), out)
            gate, up = F.linear(self._normed(x), gate_up).chunk(2, dim=1)
            x = x + F.linear(F.silu(gate) * up, down)
        x = self._normed(x)
        if recorder is not None and recording is not None:
            recorder.record_hidden(recording, token_ids, x)
        return F.linear(x, self.head).argmax(dim=1)

    def _matrix(self, rows: int, columns: int) -> Tensor:
        weights = torch.randn(rows, columns, dtype=self.dtype, device=self.device)
        return weights.mul_(columns**-0.5)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.norm.shape, self.norm, EPS)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, d], each half turned against the other."""
    first, second = x.float().chunk(2, dim=2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
    return turned.to(x.dtype)

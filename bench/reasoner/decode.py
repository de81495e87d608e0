"""Batched greedy decoding with a KV cache from which tokens can be evicted.

Evicted entries are hidden by a mask and never come back, and positions are not re-indexed: what a
paged engine does when it frees the slots. This is the check without a server; it is exact in what
is visible to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from model import Block, Reasoner, rope_table
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Trace:
    """What one row has cached when its generated part is over budget, in cache order.

    tokens: int64 [n] ids; alive: bool [n], False where evicted before; hidden: fp32 [n, D] after
    the final norm; prompt: number of prompt tokens.
    """

    tokens: Tensor
    alive: Tensor
    hidden: Tensor
    prompt: int


Evictor = Callable[[Trace, int], Tensor]
"""(trace, budget) -> bool [n - prompt]: which generated tokens stay; a subset of the alive."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """When and how to evict: down to `budget` once `interval` more tokens are cached."""

    evictor: Evictor
    budget: int
    interval: int = 128


class _Rows:
    """The running rows of a batch: their caches, ids and masks. T is the capacity."""

    def __init__(self, model: Reasoner, prompts: Sequence[list[int]], capacity: int) -> None:
        shape, device = model.shape, model.embed.weight.device
        dtype = model.embed.weight.dtype
        rows = len(prompts)
        self.ids = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.prompt = torch.tensor([len(prompt) for prompt in prompts], device=device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        self.length = self.prompt.clone()
        place = torch.arange(capacity, device=device)
        self.alive = place[None, :] < self.prompt[:, None]
        self.hidden = torch.zeros(rows, capacity, shape.hidden, device=device)
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.number = torch.arange(rows, device=device)

    def select(self, keep: Tensor) -> None:
        """Drop the rows that are finished."""
        for name in ("ids", "prompt", "length", "alive", "hidden", "number"):
            setattr(self, name, getattr(self, name)[keep])
        self.keys, self.values = self.keys[:, keep], self.values[:, keep]


@torch.inference_mode()
def generate(
    model: Reasoner,
    prompts: Sequence[list[int]],
    end_id: int,
    max_new: int,
    eviction: Eviction | None = None,
) -> list[list[int]]:
    """Greedy continuations, without the prompts and without `end_id`."""
    capacity = max(len(prompt) for prompt in prompts) + max_new
    rows = _Rows(model, prompts, capacity)
    cos, sin = rope_table(model.shape, capacity, model.embed.weight.device)
    cos, sin = cos.to(model.embed.weight.dtype), sin.to(model.embed.weight.dtype)
    token = _prefill(model, rows, cos, sin)
    done: dict[int, list[int]] = {}
    while len(done) < len(prompts):
        every = torch.arange(len(token), device=token.device)
        rows.ids[every, rows.length] = token
        ended = (token == end_id) | (rows.length + 1 >= capacity)
        if bool(ended.any()):
            for row in ended.nonzero().flatten().tolist():
                start, stop = int(rows.prompt[row]), int(rows.length[row])
                done[int(rows.number[row])] = rows.ids[row, start:stop].tolist()
            rows.select(~ended)
            token = token[~ended]
            if not len(token):
                break
        if eviction is not None:
            _evict(rows, eviction)
        token = _step(model, rows, token, cos, sin)
    return [done[index] for index in range(len(prompts))]


def _prefill(model: Reasoner, rows: _Rows, cos: Tensor, sin: Tensor) -> Tensor:
    """Fill the caches from the prompts; returns the first generated token of each row [B].

    Padding on the right is harmless: causal attention never reads it, and its cache entries are
    not alive until a real token overwrites them.
    """
    longest = int(rows.prompt.max())
    x = model.embed(rows.ids[:, :longest])
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        q, k, v = block.project(x, cos[:longest], sin[:longest])
        rows.keys[index, :, :, :longest], rows.values[index, :, :, :longest] = k, v
        groups = model.shape.query_heads // model.shape.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        x = block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    hidden = model.norm_out(x)
    rows.hidden[:, :longest] = hidden.float()
    every = torch.arange(len(rows.prompt), device=x.device)
    return F.linear(hidden[every, rows.prompt - 1], model.embed.weight).argmax(-1)


def _step(model: Reasoner, rows: _Rows, token: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Feed one token per row at its own position; returns the next token of each row [B]."""
    shape = model.shape
    every = torch.arange(len(token), device=token.device)
    rows.alive[every, rows.length] = True
    used = int(rows.length.max()) + 1
    mask = rows.alive[:, None, None, :used]
    here_cos, here_sin = cos[rows.length][:, None, None], sin[rows.length][:, None, None]
    x = model.embed(token)[:, None]
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        q, k, v = block.project(x, here_cos, here_sin)
        rows.keys[index, every, :, rows.length] = k[:, :, 0]
        rows.values[index, every, :, rows.length] = v[:, :, 0]
        # The query heads of a group share their keys: let them stand as queries of one head.
        grouped = q.view(len(token), shape.kv_heads, -1, shape.head_dim)
        attended = F.scaled_dot_product_attention(
            grouped,
            rows.keys[index, :, :, :used],
            rows.values[index, :, :, :used],
            attn_mask=mask,
        )
        x = block.finish(x, attended.reshape(len(token), shape.query_heads, 1, shape.head_dim))
    hidden = model.norm_out(x[:, 0])
    rows.hidden[every, rows.length] = hidden.float()
    rows.length = rows.length + 1
    return F.linear(hidden, model.embed.weight).argmax(-1)


def _evict(rows: _Rows, eviction: Eviction) -> None:
    """Compact every row whose generated part has outgrown its budget by the interval."""
    held = rows.alive.sum(1) - rows.prompt
    for row in (held >= eviction.budget + eviction.interval).nonzero().flatten().tolist():
        start, stop = int(rows.prompt[row]), int(rows.length[row])
        trace = Trace(
            tokens=rows.ids[row, :stop],
            alive=rows.alive[row, :stop],
            hidden=rows.hidden[row, :stop],
            prompt=start,
        )
        kept = eviction.evictor(trace, eviction.budget)
        assert int(kept.sum()) == eviction.budget, f"kept {int(kept.sum())} of {eviction.budget}"
        assert not bool((kept & ~trace.alive[start:]).any()), "an evicted token came back"
        rows.alive[row, start:stop] = kept

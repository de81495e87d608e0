"""What it costs, in accuracy, that all heads of a request keep the same tokens.

    python -m bench.accuracy.heads
    python -m bench.accuracy.heads --problems 50 --levels hard

A slot of SGLang's KV cache holds a token's keys and values of all layers and heads, so this package
keeps one set per request. Most papers keep one per layer and KV head. Here both run on right traces
of ``examples/reasoner``, without a server: masks say what each head still sees, and a trace is
right if every token of it is the most likely one, as with a full cache. ``random`` draws once per
compaction, or once per head; ``rkv`` keeps the best of the mean score, or each head its own best.
The prompt stays on top of the budget. One row per cell in bench/rows/heads.csv; cells on record are
not run again.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.lib.cells import run_cells
from bench.lib.forced import (
    REASONER_MODEL,
    forced_model,
    outcome,
    reasoner_task,
    reasoner_trace,
)
from bench.reasoner.model import Block
from bench.reasoner.problems import LEVELS
from sgl_skipkv.kernels.reference import key_redundancy, window_attention
from sgl_skipkv.policy.rkv import RKVParams

INTERVAL, WINDOW, SINK = 32, 8, 4
SHARES = (0.15, 0.25, 0.35, 0.5)


@dataclass(frozen=True)
class Cell:
    """One policy, per head or shared, on the first held-out problems of one level."""

    level: str
    policy: str
    per_head: bool
    kv_budget: int
    problems: int


class Trace:
    """One right trace, of which every KV head sees its own tokens.

    Attributes:
        queries, keys: of every layer, [T, heads, d], as far as computed.
        seen: bool [L, Hkv, T], which tokens a head still has.
    """

    def __init__(self, ids: list[int], prompt_tokens: int, seed: int) -> None:
        shape = forced_model(REASONER_MODEL).model.shape
        self.ids, self.prompt_tokens, self.done = ids, prompt_tokens, 0
        size = (shape.layers, len(ids), shape.kv_heads, shape.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self.queries = torch.zeros(*size[:2], shape.query_heads, shape.head_dim)
        self.seen = torch.ones(shape.layers, shape.kv_heads, len(ids), dtype=torch.bool)
        self.draw = torch.Generator().manual_seed(seed)
        self.choices: list[int] = []

    def feed(self, stop: int) -> None:
        """Compute the tokens up to this one over what each head has."""
        forced, start = forced_model(REASONER_MODEL), self.done
        model, cos, sin = forced.model, forced.cos[start:stop], forced.sin[start:stop]
        causal = torch.arange(stop) <= torch.arange(start, stop)[:, None]
        x = model.embed(torch.tensor([self.ids[start:stop]]))
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            q, k, v = block.project(x, cos, sin)
            self.queries[layer, start:stop] = q[0].transpose(0, 1)
            self.keys[layer, start:stop] = k[0].transpose(0, 1)
            self.values[layer, start:stop] = v[0].transpose(0, 1)
            groups = model.shape.query_heads // model.shape.kv_heads
            visible = (self.seen[layer, :, None, :stop] & causal).repeat_interleave(groups, dim=0)
            k, v = (
                cached[layer, :stop].transpose(0, 1).repeat_interleave(groups, dim=0)[None]
                for cached in (self.keys, self.values)
            )
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=visible[None]))
        self.choices += F.linear(model.norm_out(x), model.embed.weight)[0].argmax(-1).tolist()
        self.done = stop

    def evict(self, cell: Cell) -> None:
        """Down to the budget: of the tokens between prompt or sinks and the window."""
        first, stop = max(self.prompt_tokens, SINK), self.done - WINDOW
        keep = cell.kv_budget - WINDOW
        score = self._random if cell.policy == "random" else self._rkv
        if cell.per_head:
            scores = score(self.seen)
        else:
            scores = score(self.seen[:1, :1]).expand_as(self.seen)
        for layer, head in ((m, h) for m in range(len(scores)) for h in range(scores.shape[1])):
            candidates = scores[layer, head, first:stop].masked_fill(
                ~self.seen[layer, head, first:stop], -torch.inf
            )
            self.seen[layer, head, first:stop] = False
            self.seen[layer, head, candidates.topk(keep).indices + first] = True

    def _random(self, sets: Tensor) -> Tensor:
        """float32 [layers, heads, T], one draw for each set."""
        return torch.rand(sets.shape, generator=self.draw)

    def _rkv(self, sets: Tensor) -> Tensor:
        """As above: each head's own score, or the mean over all of them where one set is asked."""
        scores = torch.full((*self.seen.shape[:2], len(self.ids)), -torch.inf)
        params = RKVParams()
        for layer in range(len(self.seen)):
            for head in range(self.seen.shape[1]):
                at = self.seen[layer, head, : self.done].nonzero()[:, 0]
                groups = self.queries.shape[2] // self.keys.shape[2]
                asking = self.queries[layer, self.done - WINDOW : self.done]
                asking = asking[:, head * groups : (head + 1) * groups]
                k = self.keys[layer, at, head : head + 1]
                important = window_attention(asking, k, kernel=params.kernel)[0]
                redundant = key_redundancy(k, threshold=params.threshold)[0, : len(important)]
                combined = params.sigma * important - (1 - params.sigma) * redundant
                scores[layer, head, at[: len(combined)]] = combined
        shared = sets.shape[:2] == (1, 1)
        return scores.mean(dim=(0, 1), keepdim=True) if shared else scores


@torch.inference_mode()
def run(cell: Cell) -> dict[str, float]:
    """Its row, without the setting."""
    forced, right, wrong = forced_model(REASONER_MODEL), 0, 0
    for index in range(cell.problems):
        ids, prompt = reasoner_trace(forced, cell.level, index)
        trace = Trace(ids, prompt, index)
        trace.feed(min(prompt + cell.kv_budget + INTERVAL, len(ids) - 1))
        while trace.done < len(ids) - 1:
            trace.evict(cell)
            trace.feed(min(trace.done + INTERVAL, len(ids) - 1))
        others = (at for at in range(prompt, len(ids)) if trace.choices[at - 1] != ids[at])
        missed = forced.missed(ids, others)
        right, wrong = right + (not missed), wrong + missed
    return outcome(right, wrong, cell.problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=[*LEVELS], default=[*LEVELS])
    parser.add_argument("--problems", type=int, default=40, help="of each level")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    forced, cells, count = forced_model(REASONER_MODEL), [], arguments.problems
    for level in arguments.levels:
        solutions = [reasoner_task(level, i).solution for i in range(count)]
        trace_tokens = (
            sum(len(forced.tokenizer.encode(solution).ids) for solution in solutions) / count
        )
        cells += [
            Cell(level, policy, per_head, round(share * trace_tokens), count)
            for share in SHARES
            for policy in ("random", "rkv")
            for per_head in (False, True)
        ]
    run_cells("heads", cells, run, arguments.workers)


if __name__ == "__main__":
    main()

"""The kernels of a compaction on made-up inputs, and the same in plain torch on the same inputs.

A run returns what it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.floors import Shape
from sgl_skipkv.eviction import select
from sgl_skipkv.eviction.page_table import RowRewrite
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels.distinct_values import distinct_values
from sgl_skipkv.kernels.key_redundancy import key_redundancy
from sgl_skipkv.kernels.kv_move import SlotBuffers, move_kv
from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.kernels.paged_keys import PagedKeys
from sgl_skipkv.kernels.row_compaction import compact_rows
from sgl_skipkv.kernels.sentence_redundancy import sentence_redundancy
from sgl_skipkv.kernels.sentence_scores import sentence_scores
from sgl_skipkv.kernels.step_attention import step_attention
from sgl_skipkv.kernels.window_attention import window_attention
from sgl_skipkv.policy.distinct import middle_layers
from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.policy.skipkv import sentence_penalty
from sgl_skipkv.policy.skipkv_plus import SkipKVPlusParams

Run = Callable[[], tuple[Tensor, ...]]
POOL_WIDTH, THRESHOLD = 7, 0.5
CLUSTERS, NOISE = 64, 0.5


class Case(NamedTuple):
    """One kernel on its inputs.

    Attributes:
        launches, references: the kernel, and plain torch, on each set of buffers.
        graph_safe: both may be captured in a CUDA graph.
        per: what one request serves.
    """

    launches: list[Run]
    references: list[Run]
    graph_safe: bool
    per: str


class Cache:
    """Keys and recent queries of a batch, in slots in random order.

    Args:
        clustered: every key is near one of 64, so that each repeats others; otherwise none does,
            and every search for a similar key walks all of them.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, clustered: bool
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        width = shape.tokens + shape.interval
        slots, heads = shape.requests * width, (shape.kv_heads, shape.head_dim)
        self.k = [self.random(slots + 1, *heads) for _ in range(shape.layers)]
        if clustered:
            for k in self.k:
                near = torch.randint(CLUSTERS, (slots + 1,), device=device)
                k.mul_(NOISE).add_(self.random(CLUSTERS, *heads)[near])
        order = torch.randperm(slots, device=device) + 1
        self.req_to_token = order.view(shape.requests, width).int()
        self.queries = self.random(
            *(shape.layers, shape.requests + 1, shape.window),
            *(shape.query_heads, shape.head_dim),
        )
        self.k_ptrs = device_tensor([k.data_ptr() for k in self.k], device)
        self.tracks = torch.arange(1, shape.requests + 1, device=device)

    def random(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(sizes, dtype=dtype or self.dtype, device=self.device)

    def paged(self, tokens: int) -> PagedKeys:
        """Every request with this many cached tokens."""
        counts = [tokens] * self.shape.requests
        offsets = device_tensor([0, *accumulate(counts)], self.device)
        return PagedKeys(
            *(self.k[0], self.k_ptrs, self.req_to_token, self.tracks - 1, counts, offsets)
        )

    def mean_over_layers(self, score: Callable[[int, int, Tensor], Tensor], tokens: int) -> Tensor:
        """[B m], of ``score(layer, request, keys)`` [Hkv, m], request after request."""
        rows = [row[:tokens].long() for row in self.req_to_token]
        return torch.cat(
            [
                torch.stack(
                    [score(layer, b, k[row]).mean(dim=0) for layer, k in enumerate(self.k)]
                ).mean(dim=0)
                for b, row in enumerate(rows)
            ]
        )


def importance(cache: Cache) -> Case:
    shape, paged = cache.shape, cache.paged(cache.shape.tokens)
    last = torch.full((shape.requests,), shape.tokens - 1, device=cache.device)
    options = {"window": shape.window, "width": POOL_WIDTH, "scale": shape.head_dim**-0.5}

    def launch() -> tuple[Tensor, ...]:
        return (window_attention(paged, cache.queries, cache.tracks, last, **options),)

    def plain() -> tuple[Tensor, ...]:
        def score(layer: int, request: int, keys: Tensor) -> Tensor:
            q = cache.queries[layer, request + 1]
            return reference.window_attention(q, keys, kernel=POOL_WIDTH)

        return (cache.mean_over_layers(score, shape.tokens),)

    return Case([launch], [plain], False, "compaction")


def steps(cache: Cache) -> Case:
    """The last ``window`` steps of every request."""
    shape, paged = cache.shape, cache.paged(cache.shape.tokens)
    newest = shape.tokens - 1
    last = torch.full((shape.requests,), newest, device=cache.device)
    counts, firsts = [shape.window] * shape.requests, [0] * shape.requests

    def launch() -> tuple[Tensor, ...]:
        queries, scale = (cache.queries, cache.tracks, last), shape.head_dim**-0.5
        return (step_attention(paged, *queries, counts, firsts, causal=True, scale=scale),)

    def plain() -> tuple[Tensor, ...]:
        oldest_first = [p % shape.window for p in range(newest - shape.window + 1, newest + 1)]
        found = []
        for b, row in enumerate(cache.req_to_token):
            slots = row[: shape.tokens].long()
            of_layer = [
                reference.causal_attention(cache.queries[layer, b + 1, oldest_first], k[slots])
                for layer, k in enumerate(cache.k)
            ]
            found.append(torch.stack(of_layer).mean(dim=0))
        return (torch.cat(found, dim=1),)

    return Case([launch], [plain], False, "compaction")


def redundancy(cache: Cache) -> Case:
    tokens = cache.shape.tokens + cache.shape.interval
    thresholds = torch.full((cache.shape.requests,), THRESHOLD, device=cache.device)
    paged = cache.paged(tokens)

    def launch() -> tuple[Tensor, ...]:
        return (key_redundancy(paged, thresholds),)

    def plain() -> tuple[Tensor, ...]:
        def score(layer: int, request: int, keys: Tensor) -> Tensor:
            return reference.key_redundancy(keys, threshold=THRESHOLD)

        return (cache.mean_over_layers(score, tokens),)

    return Case([launch], [plain], False, "compaction")


def values(cache: Cache) -> Case:
    """Of values that lie where the keys do."""
    tokens, compared = cache.shape.tokens + cache.shape.interval, middle_layers(cache.shape.layers)
    firsts, paged = torch.zeros_like(cache.tracks), cache.paged(tokens)
    heads = cache.shape.layers, cache.shape.kv_heads
    weights = torch.full(heads, 1 / math.prod(heads), device=firsts.device)

    def launch() -> tuple[Tensor, ...]:
        return distinct_values(
            paged, firsts, most_compared=tokens, weights=weights, compared=compared
        )

    def plain() -> tuple[Tensor, ...]:
        rows = [row[:tokens].long() for row in cache.req_to_token]
        parts = [
            reference.distinct_values(
                [v[row] for v in cache.k], 0, weights=weights, compared=compared
            )
            for row in rows
        ]
        return tuple(torch.cat(one) for one in zip(*parts, strict=True))

    return Case([launch], [plain], False, "compaction")


def sentences(cache: Cache) -> Case:
    shape, count = cache.shape, cache.shape.sentences
    vectors = cache.random(shape.requests + 1, count, shape.hidden_size)
    counts = torch.full_like(cache.tracks, count)

    def launch() -> tuple[Tensor, ...]:
        return (sentence_redundancy(vectors, cache.tracks, counts, max_count=count),)

    def plain() -> tuple[Tensor, ...]:
        return (torch.stack([reference.sentence_redundancy(own) for own in vectors[1:]]),)

    return Case([launch], [plain], False, "compaction")


def scores(cache: Cache) -> Case:
    """SkipKV+'s, of requests whose sentences are equally long."""
    shape, device = cache.shape, cache.device
    tokens, count = shape.tokens + shape.interval, shape.sentences
    important = cache.random(shape.requests, tokens - shape.window, dtype=torch.float32)
    repeated = cache.random(shape.requests, tokens, dtype=torch.float32)
    similarity = cache.random(shape.requests, count, dtype=torch.float32)
    positions = torch.arange(tokens, device=device).repeat(shape.requests, 1)
    bounds = torch.linspace(0, tokens, count + 1, device=device).long()
    starts, stops = (one.repeat(shape.requests, 1) for one in (bounds[:-1], bounds[1:]))
    params = SkipKVPlusParams(window=shape.window, tau=0.5)
    options = {"window": params.window, "sigma": params.sigma, "tau": params.tau}
    options["ending"] = params.ending

    def launch() -> tuple[Tensor, ...]:
        rows, of_sentences = [tokens] * shape.requests, [count] * shape.requests
        tokenwise = (important.view(-1), repeated.view(-1), positions.view(-1), rows)
        sentencewise = (starts.view(-1), stops.view(-1), similarity.view(-1), of_sentences)
        return (sentence_scores(*tokenwise, *sentencewise, **options),)

    def plain() -> tuple[Tensor, ...]:
        found = []
        for b in range(shape.requests):
            rest = params.sigma * important[b] - (1 - params.sigma) * repeated[b, : -params.window]
            own = Sentences(starts[b], stops[b], similarity[b])
            penalty = sentence_penalty(positions[b], own, params.tau)
            bonus = own.places(positions[b]).ending_bonus(params.ending)
            found.append(F.pad(rest, (0, params.window)) - penalty + bonus)
        return (torch.cat(found),)

    return Case([launch], [plain], False, "compaction")


def selections(cache: Cache) -> Case:
    shape = cache.shape
    tokens = shape.tokens + shape.interval
    own = list(cache.random(shape.requests, tokens, dtype=torch.float32))
    protected = [[(0, 4), (tokens - shape.window, tokens)]] * shape.requests
    keep = [shape.tokens] * shape.requests

    def chosen(choose: Callable[..., tuple[list[Selection], Tensor]]) -> tuple[Tensor, ...]:
        found, finite = choose(own, protected, keep)
        return *(torch.cat([one[half] for one in found]) for half in (0, 1)), finite

    return Case(
        [lambda: chosen(select.by_kernel)], [lambda: chosen(select.by_sort)], False, "compaction"
    )


def chosen_at_random(cache: Cache) -> list[Selection]:
    """Of every request as many entries as it keeps."""
    shape, tokens = cache.shape, cache.shape.tokens
    orders = [
        torch.randperm(tokens + shape.interval, device=cache.device) for _ in range(shape.requests)
    ]
    return [Selection(one[:tokens].sort().values, one[tokens:].sort().values) for one in orders]


def rows(cache: Cache) -> Case:
    shape, device = cache.shape, cache.device
    tokens, table = shape.tokens + shape.interval, cache.req_to_token.clone()
    positions = torch.arange(tokens, device=device).repeat(shape.requests)
    parts = chosen_at_random(cache)
    kept, evicted = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    starts = torch.arange(shape.requests + 1, device=device)
    bounds = (starts * shape.tokens, starts * shape.interval)

    def launch() -> tuple[Tensor, ...]:
        freed, stay = torch.empty_like(evicted), torch.empty_like(kept)
        halves = (kept, bounds[0], evicted, bounds[1])
        compact_rows(table, cache.tracks - 1, *halves, positions, freed, stay)
        return freed, stay, table

    def plain() -> tuple[Tensor, ...]:
        rewrite = RowRewrite(table, range(shape.requests), parts, positions.split(tokens))
        rewrite.write()
        return torch.cat(rewrite.vacated), rewrite.kept_positions, table

    return Case([launch], [plain], False, "compaction")


def moves(cache: Cache) -> Case:
    """Keys and values of all layers; nothing is certain to stay where it is."""
    shape, device, table = cache.shape, cache.device, cache.req_to_token
    buffers = [*cache.k, *(cache.random(*k.shape) for k in cache.k)]
    parts = [kept for kept, _ in chosen_at_random(cache)]
    kept, firsts = torch.cat(parts), torch.zeros_like(cache.tracks)
    offsets = torch.arange(shape.requests + 1, device=device) * shape.tokens
    targets = table[:, : shape.tokens].reshape(-1).long()
    sources = table.gather(1, torch.stack(parts)).reshape(-1).long()
    alike = SlotBuffers.of(buffers, device)

    def launch() -> tuple[Tensor, ...]:
        move_kv(alike, table, cache.tracks - 1, firsts, kept, offsets)
        return tuple(buffers)

    def plain() -> tuple[Tensor, ...]:
        for buffer in buffers:
            buffer[targets] = buffer[sources]
        return tuple(buffers)

    return Case([launch], [plain], False, "compaction")


#: as in ``floors.works``
COMPACTION_CASES: dict[str, Callable[[Cache], Case]] = {
    "window_attention": importance,
    "step_attention": steps,
    "key_redundancy": redundancy,
    "distinct_values": values,
    "sentence_redundancy": sentences,
    "sentence_scores": scores,
    "selection": selections,
    "row_compaction": rows,
    "kv_move": moves,
}

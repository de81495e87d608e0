"""The kernels of a decode step on made-up inputs, and the same in plain torch on the same inputs.

Each has one set of buffers per layer, so that no run of a replay finds its inputs in a cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.kernels.cases import Cache, Case
from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels.ring_write import ring_write
from sgl_skipkv.kernels.sentence_step import sentence_step
from sgl_skipkv.kernels.steering_add import steering_add

GAMMA = 0.02
CAPACITY = 16  # sentences of a table in which one is closed; only a stride


def ring(cache: Cache) -> Case:
    shape, launches, references = cache.shape, [], []
    size = (shape.query_heads, shape.head_dim)
    positions = torch.randint(shape.tokens, (shape.requests,), device=cache.device)
    for _ in range(shape.layers):
        q = cache.random(shape.requests, *size)
        own = cache.random(shape.requests + 1, shape.window, *size)

        def launch(q: Tensor = q, own: Tensor = own) -> tuple[Tensor, ...]:
            ring_write(q, cache.tracks, positions, own)
            return (own,)

        def plain(q: Tensor = q, own: Tensor = own) -> tuple[Tensor, ...]:
            own[cache.tracks, positions % shape.window] = q
            return (own,)

        launches.append(launch)
        references.append(plain)
    return Case(launches, references, True, "layer of a step")


def delimiters(cache: Cache) -> tuple[Tensor, Tensor]:
    """uint8 [2], class of each token; int64 [B], the delimiter 1 at every 16th request, else 0."""
    closes = torch.arange(cache.shape.requests, device=cache.device) % 16 == 0
    bits = torch.arange(2, dtype=torch.uint8, device=cache.device) * reference.DELIMITER
    return bits, closes.long()


def open_sentences(cache: Cache) -> Case:
    shape, launches, references = cache.shape, [], []
    bits, token_ids = delimiters(cache)
    tracked = shape.requests + 1
    preset = torch.ones(tracked, dtype=torch.uint8, device=cache.device)
    for _ in range(shape.layers):
        hidden = cache.random(shape.requests, shape.hidden_size)
        tables = {
            "total": cache.random(tracked, shape.hidden_size, dtype=torch.float32),
            "length": torch.full((tracked,), 3.0, device=cache.device),
            "index": torch.ones(tracked, dtype=torch.int64, device=cache.device),
            "after_delimiter": torch.zeros(tracked, dtype=torch.bool, device=cache.device),
            "vectors": cache.random(tracked, CAPACITY, shape.hidden_size),
        }

        def launch(
            hidden: Tensor = hidden, tables: dict[str, Tensor] = tables
        ) -> tuple[Tensor, ...]:
            sentence_step(hidden, cache.tracks, token_ids, bits=bits, preset=preset, **tables)
            return tuple(tables.values())

        def plain(
            hidden: Tensor = hidden, tables: dict[str, Tensor] = tables
        ) -> tuple[Tensor, ...]:
            is_delimiter = (bits[token_ids] & preset[cache.tracks]) != 0
            reference.sentence_step(hidden, cache.tracks, is_delimiter, **tables)
            return tuple(tables.values())

        launches.append(launch)
        references.append(plain)
    return Case(launches, references, True, "step")


def steering(cache: Cache) -> Case:
    shape, launches, references = cache.shape, [], []
    bits, token_ids = delimiters(cache)
    which = cache.tracks - 1
    vector = cache.random(shape.hidden_size, dtype=torch.float32)
    for _ in range(shape.layers):
        residual = cache.random(shape.requests, shape.hidden_size)
        tables = {
            "steered": torch.ones_like(which, dtype=torch.bool),
            "alpha_0": torch.ones_like(which, dtype=torch.float32),
            "nonexecution": torch.ones_like(which, dtype=torch.int32),
            "keyword_seen": torch.zeros_like(which, dtype=torch.bool),
            "thinking": torch.ones_like(which, dtype=torch.bool),
        }

        def launch(
            residual: Tensor = residual, tables: dict[str, Tensor] = tables
        ) -> tuple[Tensor, ...]:
            steering_add(residual, vector, which, token_ids, bits=bits, gamma=GAMMA, **tables)
            return (residual, *tables.values())

        def plain(
            residual: Tensor = residual, tables: dict[str, Tensor] = tables
        ) -> tuple[Tensor, ...]:
            classes = bits[token_ids]
            reference.steering_step(residual, vector, which, classes, gamma=GAMMA, **tables)
            return (residual, *tables.values())

        launches.append(launch)
        references.append(plain)
    return Case(launches, references, True, "step")


#: as in ``floors.works``
STEP_CASES: dict[str, Callable[[Cache], Case]] = {
    "ring_write": ring,
    "sentence_step": open_sentences,
    "steering_add": steering,
}

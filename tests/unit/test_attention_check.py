"""A model whose attention is not that of what is recorded and cached is found in one prefill."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sgl_skipkv.patches.startup import attention_check
from sgl_skipkv.patches.startup.attention_check import (
    AttentionCheck,
    AttentionMismatch,
    attention_gap,
)

HEADS, KV_HEADS, WIDTH, TOKENS, LAYERS, SCALE = 4, 2, 16, 80, 3, 0.25


def attended(q: Tensor, k: Tensor, v: Tensor, window: int = TOKENS, sink: float = 0.0) -> Tensor:
    """Query by query and head by head in float64; a sink adds to the denominator."""
    out = torch.zeros(len(q), HEADS, WIDTH, dtype=torch.float64)
    for t in range(len(q)):
        for head in range(HEADS):
            seen = slice(max(t - window, 0), t + 1), head // (HEADS // KV_HEADS)
            logits = k[seen].double() @ q[t, head].double() * SCALE
            weights = logits.exp()
            out[t, head] = weights @ v[seen].double() / (weights.sum() + sink)
    return out.float()


def drawn(seed: int, heads: int) -> Tensor:
    return torch.randn(TOKENS, heads, WIDTH, generator=torch.Generator().manual_seed(seed))


def turned(x: Tensor) -> Tensor:
    """Rotated by position, half by half."""
    angle = torch.arange(len(x))[:, None, None] * 10000 ** -(torch.arange(WIDTH // 2) / WIDTH * 2)
    low, high = x.chunk(2, dim=-1)
    parts = low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("window", [0, 1, 20])
def test_the_formula(window: int) -> None:
    q, k, v = drawn(1, HEADS), drawn(2, KV_HEADS), drawn(3, KV_HEADS)
    output = attended(q, k, v, window or TOKENS)
    assert attention_gap(q[-7:], k, v, output[-7:], SCALE, window) < 1e-5
    assert attention_gap(q[-7:], k, v, output[-7:], SCALE, window + 1) > 0.1
    halved = attention_gap(q[-7:], k, v, 2 * output[-7:], SCALE, window)
    assert math.isclose(float(halved), 0.5, rel_tol=1e-4)


def test_the_formula_with_sinks() -> None:
    """One logit per query head more, without a value."""
    q, k, v = drawn(1, HEADS), drawn(2, KV_HEADS), drawn(3, KV_HEADS)
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16()
    parts = [attended(q, k, v, sink=float(sink.double().exp())) for sink in sinks]
    output = torch.stack([part[:, head] for head, part in enumerate(parts)], dim=1)
    assert attention_gap(q[-7:], k, v, output[-7:], SCALE, sinks=sinks) < 1e-5
    assert attention_gap(q[-7:], k, v, output[-7:], SCALE) > 0.1
    assert attention_gap(q[-7:], k, v, output[-7:], SCALE, sinks=sinks.flip(0)) > 0.1


def test_half_precision_is_far_within_the_limit() -> None:
    q, k, v = (part.bfloat16() for part in (5 * drawn(1, HEADS), drawn(2, 2), drawn(3, 2)))
    output = attended(q, k, v).bfloat16()
    assert attention_gap(q[-16:], k, v, output[-16:], SCALE) < 0.1 * attention_check._MOST_OFF


Layer = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def layer_module(number: int) -> Any:
    return SimpleNamespace(layer_id=number, head_dim=WIDTH, sliding_window_size=-1)


def checked(
    *layers: Layer, dtype: torch.dtype = torch.float32, padding: int = 0, **handed: Any
) -> AttentionCheck:
    """After a prefill of layers that say what is recorded, what is cached, and their output.
    ``padding``: tokens behind the prefill's own. ``handed``: what the model gives its attention by
    keyword."""
    buffers = [torch.zeros(2 * TOKENS, KV_HEADS, WIDTH) for _ in range(2 * len(layers))]
    cached_keys, cached_values = buffers[: len(layers)], buffers[len(layers) :]
    pool = SimpleNamespace(get_kv_buffer=lambda i: (cached_keys[i], cached_values[i]))
    runner = SimpleNamespace(kv_cache_dtype=dtype, dtype=torch.float32)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
    )
    check = AttentionCheck(scheduler, SCALE, TOKENS)
    slots = torch.randperm(2 * TOKENS)[:TOKENS]
    batch = SimpleNamespace(out_cache_loc=pad(slots, (0, padding)))
    for number, layer in enumerate(layers):
        module = layer_module(number)
        values = drawn(3 + number, KV_HEADS)
        q, cached, output = layer(drawn(1 + number, HEADS), drawn(2 + number, KV_HEADS), values)
        q, output = (pad(part.flatten(1), (0, 0, 0, padding), value=9) for part in (q, output))
        args = (q, None, None, batch)
        check.before(module, args, {})
        cached_keys[number][slots] = cached
        cached_values[number][slots] = values
        q.zero_()  # a backend may do with its queries as it likes
        check.after(module, args, handed, output)
    return check


def right(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = turned(q), turned(k)
    return q, k, attended(q, k, v)


def rotated_later(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, turned(k), attended(turned(q), turned(k), v)


def cached_unrotated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return turned(q), k, attended(turned(q), turned(k), v)


def with_a_sink(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = turned(q), turned(k)
    return q, k, attended(q, k, v, sink=30.0)


def without_numbers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, output = right(q, k, v)
    return q, k, output * math.nan


@pytest.mark.parametrize("padding", [0, 3])
def test_a_model_whose_layers_ask_what_is_cached(padding: int) -> None:
    check = checked(*[right] * LAYERS, padding=padding)
    assert len(check.gaps) == LAYERS
    check.conclude()


@pytest.mark.parametrize(
    "other",
    [rotated_later, cached_unrotated, with_a_sink, without_numbers],
    ids=lambda f: f.__name__,
)
def test_one_other_layer_is_enough(other: Layer) -> None:
    with pytest.raises(AttentionMismatch, match="attention layer 1 is not that of its recorded"):
        checked(right, other, right).conclude()


def test_sinks_that_a_model_hands_to_its_attention_count() -> None:
    sinks = torch.full((HEADS,), 30.0).log()
    checked(with_a_sink, with_a_sink, sinks=sinks).conclude()
    with pytest.raises(AttentionMismatch, match="attention layer 1"):
        checked(with_a_sink, right, sinks=sinks).conclude()


def test_an_attention_of_two_outputs_is_refused() -> None:
    check = checked(right)
    module = layer_module(0)
    queries = drawn(1, HEADS).flatten(1)
    check.before(module, (queries,), {})
    check.after(module, (queries,), {}, (queries, queries))
    with pytest.raises(AttentionMismatch, match="attention layer 0"):
        check.conclude()


def test_quantised_keys_are_not_compared() -> None:
    check = checked(rotated_later, dtype=torch.float8_e4m3fn)
    assert check.gaps == {}
    check.conclude()


def test_a_rank_that_is_off_is_off_on_all() -> None:
    class Two:
        def gathered(self, part: Tensor) -> Tensor:
            return torch.stack([part, part + 0.5 * (torch.arange(len(part)) == 2)])

    ranks: Any = Two()
    with pytest.raises(AttentionMismatch, match=r"attention layer 2 .* off by 50%"):
        checked(*[right] * LAYERS).conclude(ranks)

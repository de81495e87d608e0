"""The reference formulas against the same formulas written as loops over Python floats (fp64)."""

from __future__ import annotations

import math

import pytest
import torch
from loops import assert_near, attention, cosine_matrix, importance, redundancy
from torch import Tensor
from triton_tools import assert_as_close

from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels.reference import (
    causal_attention,
    key_redundancy,
    selector_attention,
    sentence_redundancy,
    sentence_similarity,
    window_attention,
)


def random(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def repetitive_keys(seed: int, n: int, heads: int, width: int) -> Tensor:
    """Keys in a few clusters, so that many pairs are similar and many are not."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, heads, width, generator=generator)
    noise = 0.4 * torch.randn(n, heads, width, generator=generator)
    return centres[torch.randint(4, (n,), generator=generator)] + noise


# -- attention, step by step


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 3])
def test_causal_attention(steps: int, group: int) -> None:
    """Row t is the softmax over what was cached at step t, the mean over heads."""
    n, kv_heads, width = 20, 2, 7
    q, k = random(1, steps, kv_heads * group, width), random(2, n, kv_heads, width)
    keys, exact = k.double(), []
    for t in range(steps):
        seen, row = n - steps + 1 + t, [0.0] * n
        for head in range(kv_heads * group):
            columns = keys[:seen, head // group].tolist()
            for i, got in enumerate(attention(q[t, head].double().tolist(), columns, 0.3)):
                row[i] += got / (kv_heads * group)
        exact.append(row)
    assert_near(causal_attention(q, k, scale=0.3), exact)


def test_attention_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="no more than 3 queries"):
        causal_attention(random(1, 4, 2, 8), random(2, 3, 2, 8))
    with pytest.raises(ValueError, match="multiple of Hkv"):
        causal_attention(random(1, 2, 3, 8), random(2, 3, 2, 8))
    with pytest.raises(ValueError, match="odd number"):
        selector_attention(random(1, 2, 2, 8), random(2, 9, 2, 8), kernel=4)
    with pytest.raises(ValueError, match=r"first: expected an integer in \[0, 7\)"):
        selector_attention(random(1, 2, 2, 8), random(2, 9, 2, 8), first=7)


# -- importance


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("n", "window", "kv_heads", "width"),
    [(40, 8, 2, 16), (33, 5, 3, 7), (9, 8, 1, 1), (2, 1, 2, 3)],
)
def test_window_attention(group: int, n: int, window: int, kv_heads: int, width: int) -> None:
    q = random(1, window, kv_heads * group, width, scale=2.0)
    k = random(2, n, kv_heads, width)
    assert_near(window_attention(q, k), importance(q, k))


@pytest.mark.parametrize("kernel", [1, 3, 7, 63])
@pytest.mark.parametrize("scale", [None, 1.0, 0.01])
def test_window_attention_parameters(kernel: int, scale: float | None) -> None:
    q, k = random(3, 4, 4, 8), random(4, 30, 2, 8)
    found = window_attention(q, k, kernel=kernel, scale=scale)
    assert_near(found, importance(q, k, kernel, scale))


@pytest.mark.parametrize(
    ("q", "k", "kernel"),
    [
        ((8, 4, 16), (8, 2, 16), 7),  # nothing outside the window
        ((8, 4, 16), (5, 2, 16), 7),
        ((8, 5, 16), (40, 2, 16), 7),  # heads do not divide
        ((8, 2, 16), (40, 4, 16), 7),  # fewer query heads than KV heads
        ((8, 4, 16), (40, 2, 8), 7),  # another head size
        ((8, 4, 16), (40, 2, 16), 4),  # no middle
        ((8, 4, 16), (40, 2, 16), 0),
    ],
)
def test_window_attention_refuses(q: tuple[int, ...], k: tuple[int, ...], kernel: int) -> None:
    with pytest.raises(ValueError, match=r"expected .* got"):
        window_attention(torch.zeros(q), torch.zeros(k), kernel=kernel)


# -- redundancy


@pytest.mark.parametrize(
    ("n", "heads", "width"), [(40, 2, 16), (31, 3, 5), (17, 1, 2), (2, 2, 4), (1, 1, 4)]
)
@pytest.mark.parametrize("threshold", [0.5, -1.0, 0.9, 1.0])
def test_key_redundancy(n: int, heads: int, width: int, threshold: float) -> None:
    for k in (random(13, n, heads, width), repetitive_keys(14, n, heads, width)):
        assert_near(key_redundancy(k, threshold=threshold), redundancy(k, threshold))


def test_the_most_recent_similar_key_is_left_out() -> None:
    """Keys 0, 2, 4 alike, 1 and 3 unlike all: rows 0 and 2 leave out 4, row 4 leaves out 2."""
    k = torch.eye(3)[[0, 1, 0, 2, 0]].unsqueeze(1)
    mean = torch.tensor([2.0, 0.0, 1.0, 0.0, 0.0]) / 5  # of 0: rows 2, 4; of 2: row 0; of 4: none
    assert torch.allclose(key_redundancy(k)[0], mean.softmax(dim=0), atol=1e-7)


def test_a_row_without_a_similar_key_leaves_nothing_out() -> None:
    """Column 0 least of all, which the published code zeroes by accident."""
    angle = torch.tensor([0.0, 1.2, 2.4])  # neighbours at cosine 0.36, below the threshold
    k = torch.stack([angle.cos(), angle.sin()], dim=1).unsqueeze(1)
    cosine = [[math.cos(a - b) if a != b else 0.0 for b in angle.tolist()] for a in angle.tolist()]
    mean = torch.tensor(cosine).sum(dim=0) / 3
    assert torch.allclose(key_redundancy(k)[0], mean.softmax(dim=0), atol=1e-6)


def test_similarity_at_the_threshold_does_not_count() -> None:
    k = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).unsqueeze(1)  # cosine exactly 1
    strict = key_redundancy(k, threshold=1.0)[0]
    assert torch.allclose(strict, torch.tensor([0.5, 0.5]))
    assert torch.allclose(key_redundancy(k, threshold=0.99)[0], torch.tensor([0.5, 0.5]))
    k = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]).unsqueeze(1)
    assert not torch.allclose(key_redundancy(k, threshold=0.99), key_redundancy(k, threshold=1.0))


@pytest.mark.parametrize("rows", [1, 2, 7, 40, 41])
def test_blocks_of_rows_do_not_show(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    k = repetitive_keys(15, 40, 2, 16)
    whole = key_redundancy(k)
    monkeypatch.setattr(reference, "_BLOCK_ROWS", rows)
    assert torch.allclose(key_redundancy(k), whole, atol=1e-8, rtol=1e-6)
    assert_near(key_redundancy(k), redundancy(k))


# -- both: degenerate keys and number formats


@pytest.mark.parametrize("value", [0.0, 3.0, 1e-30, 1e15])
def test_equal_keys_are_equally_important_and_finite(value: float) -> None:
    k = torch.full((24, 2, 8), value)
    attention = window_attention(random(16, 4, 4, 8), k)
    assert torch.allclose(attention, torch.full((2, 20), 1 / 20), atol=1e-6)
    assert key_redundancy(k).isfinite().all()


def test_zero_keys_repeat_nothing() -> None:
    assert torch.allclose(key_redundancy(torch.zeros(10, 2, 4)), torch.full((2, 10), 0.1))
    mixed = repetitive_keys(17, 20, 2, 8)
    mixed[::3] = 0.0
    assert_near(key_redundancy(mixed), redundancy(mixed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inputs_of_any_precision_give_float32(dtype: torch.dtype) -> None:
    """Half-precision inputs are widened first: the result is that of their exact values."""
    q, k = random(18, 4, 4, 16).to(dtype), repetitive_keys(19, 30, 2, 16).to(dtype)
    assert_near(window_attention(q, k), importance(q, k))
    assert_near(key_redundancy(k), redundancy(k))
    assert_near(sentence_redundancy(k[:, 0]), best_later(k[:, 0]))


# -- sentences


def best_later(v: Tensor) -> list[float]:
    rows = cosine_matrix(v.double().tolist())
    return [max(row[i + 1 :], default=-1.0) for i, row in enumerate(rows)]


@pytest.mark.parametrize(("count", "width"), [(1, 4), (2, 1), (13, 7), (50, 64)])
def test_sentence_similarity(count: int, width: int) -> None:
    v = random(22, count, width, scale=5.0)
    found = sentence_similarity(v)
    assert_near(found, cosine_matrix(v.double().tolist()))
    assert torch.allclose(found, found.T, atol=1e-6)


def test_sentence_similarity_of_nothing_and_of_zeros() -> None:
    assert sentence_similarity(torch.zeros(0, 8)).shape == (0, 0)
    assert torch.equal(sentence_similarity(torch.zeros(3, 8)), torch.zeros(3, 3))


@pytest.mark.parametrize(("count", "width"), [(1, 4), (2, 1), (13, 7), (50, 64)])
def test_sentence_redundancy(count: int, width: int) -> None:
    v = random(22, count, width, scale=5.0)
    assert_near(sentence_redundancy(v), best_later(v))


def test_sentence_redundancy_of_zeros() -> None:
    assert sentence_redundancy(torch.zeros(3, 8)).tolist() == [0.0, 0.0, -1.0]


def test_what_is_too_far_off_is_seen() -> None:
    """By what all kernel tests hold their results against."""
    truth = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    assert_as_close(truth.float(), truth.float(), truth)
    for wrong in (1e-6, float("nan")):
        with pytest.raises(AssertionError):
            assert_as_close(truth.float() + wrong, truth.float(), truth)

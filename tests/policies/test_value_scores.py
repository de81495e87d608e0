"""As ``test_policy_scores.py``, of policies that ask keys, values or queries to come."""

from __future__ import annotations

import cmath
import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loops import TOLERANCE, assert_near, attention, dot
from score_inputs import all_values, score_input, some_sentences
from torch import Tensor

from sgl_skipkv.policy import make_policy, policy_class, vase, with_params
from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.distinct import Distinct
from sgl_skipkv.policy.inputs import values_of_ranks
from sgl_skipkv.policy.inputs.joined_requests import joined_sentences
from sgl_skipkv.policy.inputs.query_centres import QueryCentres, Rotation
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.policy.vase import largest_range

#: which coordinates are one band, what both are multiplied with, and how many are rotated
LAYOUTS = [(True, 1.0, 8), (False, 1.0, 8), (True, 1.3, 4), (False, 1.0, 4)]


@pytest.mark.parametrize(("power", "layers"), [(4.0, 3), (1.0, 4), (0.0, 1)])
def test_distinct_scores(power: float, layers: int) -> None:
    """Token by token in float64: all of three layers are compared, the second and third of four.
    A protected prompt is not compared."""
    first = int(score_input(seed=5).positions[20])
    closed = some_sentences((first, first + 30, -1.0))
    inputs = score_input(seed=5, layers=layers, sentences=closed)
    policy = make_policy("distinct", power=power, ending=8, window=8)
    v = all_values(inputs).double()
    _, n, heads, _ = v.shape
    units = v / v.norm(dim=3)[:, inputs.prompt_tokens :].mean(dim=1)[:, None, :, None]
    reach, compared = inputs.reach.double(), units[1:3] if layers == 4 else units
    expected = []
    for i, position in enumerate(inputs.positions.tolist()):
        gaps = [(compared[:, i] - compared[:, j]).square().sum().item() for j in range(i + 1, n)]
        gap = min(gaps, default=0.0) if i >= inputs.prompt_tokens else 0.0
        distance = math.sqrt(gap / (len(compared) * heads))
        size = sum(
            float(reach[m, h]) * units[m, i, h].norm().item()
            for m in range(layers)
            for h in range(heads)
        )
        back = first + 29 - position  # from the delimiter
        near = 2 - (back - 1) / 8 if 1 <= back <= 8 else 1.0
        expected.append(distance * (size / float(reach.sum())) ** power * near)
    truth = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(policy.scores(inputs).double(), truth, rtol=1e-5)
    assert any(1 <= first + 29 - position <= 8 for position in inputs.positions.tolist())


def test_distinct_keeps_the_later_of_two_equal_values_and_the_larger_of_two() -> None:
    inputs = score_input(seed=5)
    values = all_values(inputs).clone()
    values[:, 40], values[:, 30] = values[:, 20], 2 * values[:, 31]
    scores = make_policy("distinct").scores(
        dataclasses.replace(inputs, values=lambda layer: values[layer])
    )
    assert scores[20] < 1e-2 < scores[40] and scores[30] > scores[31]


def test_repetitions_are_found_where_a_gpu_multiplies_ten_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TF32 takes what a product of equal vectors lacks for a distance."""
    inputs = score_input(seed=5)
    values = all_values(inputs).clone()
    values[:, 40] = values[:, 20]
    inputs = dataclasses.replace(inputs, values=lambda layer: values[layer])
    plain = make_policy("distinct").scores(inputs)

    def ten_bits(rows: Tensor, columns: Tensor) -> Tensor:
        rows, columns = (
            (x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (rows, columns)
        )
        return torch.mm(rows, columns)

    def scored(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(values_of_ranks, "exact_product", product)
            patch.setattr(Tensor, "__matmul__", ten_bits)
            return make_policy("distinct").scores(inputs)

    scores = scored(values_of_ranks.product_in_parts)
    assert scores[20] == plain[20] == 0 and torch.allclose(scores, plain, rtol=1e-4)
    assert scored(lambda rows, columns: rows @ columns.T)[20] > 0


@pytest.mark.parametrize(("kept", "newer"), [(38, 3), (58, 6), (12, 1), (5000, 24)])
@pytest.mark.parametrize("beginning", [2, 3])
def test_distinct_evicts_the_beginnings_of_old_sentences_first(
    beginning: int, kept: int, newer: int
) -> None:
    """So many tokens of each sentence, of one token that one. One sentence is not old for every
    eight tokens that are kept behind the prompt, of 10 tokens."""
    positions = score_input(seed=5).positions.tolist()
    starts = [positions[at] for at in (12, 20, 26, 27, 33, 38, 42, 47, 51)]
    spans = [(start, stop, -1.0) for start, stop in itertools.pairwise([*starts, positions[56]])]
    inputs = score_input(seed=5, sentences=some_sentences(*spans))
    inputs = dataclasses.replace(inputs, keep_tokens=kept)
    plain, asked = (make_policy("distinct", beginning=n).scores(inputs) for n in (0, beginning))
    factor, old = torch.ones(len(positions)), 0
    for i, position in enumerate(positions):
        for start, stop, _ in spans[:-newer]:
            if start <= position < min(start + beginning, stop):
                near = max(4 - (stop - 1 - position), 0) if position < stop - 1 else 0
                factor[i], old = 2.0**-20 / (1 + near / 3), old + 1  # in place of the ending's
    assert old >= len(spans[:-newer]) == max(9 - newer, 0)
    assert torch.equal(asked[factor == 1], plain[factor == 1])
    assert torch.allclose(asked, plain * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("protect_prompt", "count_prompt", "newer"),
    [(True, False, 4), (True, True, 4), (False, False, 4), (False, True, 5)],
)
def test_distinct_counts_newer_sentences_by_the_budget(
    protect_prompt: bool, count_prompt: bool, newer: int
) -> None:
    """42 tokens are kept. Without the 10 of a prompt that is kept, or is not counted: 32."""
    spans = [(position, position + 1, -1.0) for position in range(900, 930)]
    inputs = score_input(seed=5, sentences=some_sentences(*spans))
    inputs = dataclasses.replace(inputs, keep_tokens=42)
    policy = make_policy("distinct", protect_prompt=protect_prompt, count_prompt=count_prompt)
    assert isinstance(policy, Distinct)
    assert policy._old(inputs) == [True] * (30 - newer) + [False] * newer


def test_distinct_leaves_beginnings_alone_that_users_wrote() -> None:
    """Of nine sentences the first six are old; users wrote the first, the third and the last."""
    positions = score_input(seed=5).positions.tolist()
    starts = [positions[at] for at in range(12, 57, 5)]
    spans = [(start, start + 5, -1.0) for start in starts]
    inputs = score_input(seed=5, sentences=some_sentences(*spans))
    asked = dataclasses.replace(inputs, input_sentences=frozenset({0, 2, 8}))
    left, plain = (make_policy("distinct", beginning=n).scores(asked) for n in (3, 0))
    evicted = [left[i] < plain[i] for i in range(len(positions))]
    begins = [
        any(start <= position < start + 3 for start in (starts[1], *starts[3:6]))
        for position in positions
    ]
    assert evicted == begins and sum(begins) >= 2
    assert torch.equal(left[~torch.tensor(begins)], plain[~torch.tensor(begins)])


def test_places_of_joined_requests_are_their_own() -> None:
    """Ten, none, two and nine sentences, gaps between them and one of a single token."""
    spans = [(at, at + 1 + at % 9, -1.0) for at in range(0, 100, 11)]
    requests = [
        score_input(seed, sentences=some_sentences(*spans[:n]) if n else None)
        for seed, n in enumerate((10, 0, 2, 9))
    ]
    joined, positions, _ = joined_sentences(requests)
    together, begun = joined.places(positions), 0
    for i, one in enumerate(requests):
        assert one.sentences is not None
        alone, own = one.sentences.places(one.positions), slice(60 * i, 60 * i + 60)
        assert torch.equal(together.begins(3)[own], alone.begins(3))
        assert torch.equal(together.ending_bonus(4)[own], alone.ending_bonus(4))
        begun += int(alone.begins(3).sum())
        inside = alone.begins(100)
        first = sum(len(before.sentences.starts) for before in requests[:i] if before.sentences)
        assert torch.equal((together.sentence[own] - first)[inside], alone.sentence[inside])
    assert begun > 10


@pytest.mark.parametrize("seed", range(2))
def test_keydiff_scores(seed: int) -> None:
    """Minus the cosine to the mean unit key; 0 where all keys are 0, -1 where all are the same."""
    inputs = score_input(seed)
    n, exact = len(inputs.positions), [0.0] * len(inputs.positions)
    for layer in range(inputs.layers):
        keys = inputs.keys(layer).double().tolist()
        heads = len(keys[0])
        for head in range(heads):
            units = [[x / math.sqrt(dot(key[head], key[head])) for x in key[head]] for key in keys]
            mean = [math.fsum(column) / n for column in zip(*units, strict=True)]
            length = math.sqrt(dot(mean, mean))
            for i, unit in enumerate(units):
                exact[i] -= dot(unit, mean) / length / heads / inputs.layers
    policy = make_policy("keydiff")
    assert_near(policy.scores(inputs), exact)
    for value, expected in ((0.0, 0.0), (3.0, -1.0)):
        same = dataclasses.replace(inputs, keys=lambda _, x=value: torch.full((n, 2, 8), x))
        assert policy.scores(same).tolist() == pytest.approx([expected] * n, abs=1e-6)


def vase_attention(inputs: ScoreInput, first: int, kernel: int) -> list[float]:
    """Of each token in ``[first, n - W)``, mean over all queries, heads and layers."""
    n, (window, heads) = len(inputs.positions), inputs.queries().shape[1:3]
    received = [0.0] * (n - window - first)
    for layer in range(inputs.layers):
        keys = inputs.keys(layer).double()
        for w in range(window):
            for head in range(heads):
                query = inputs.queries()[layer, w, head].double().tolist()
                columns = keys[first : n - window, head * keys.shape[1] // heads].tolist()
                for i, got in enumerate(attention(query, columns, inputs.scale)):
                    received[i] += got / heads / window / inputs.layers
    reach = kernel // 2
    return [
        math.fsum(received[max(i - reach, 0) : i + reach + 1]) / kernel
        for i in range(len(received))
    ]


@pytest.mark.parametrize("protect_prompt", [True, False])
@pytest.mark.parametrize(("large", "kernel"), [(0.25, 5), (0.0, 1), (1.0, 5)])
def test_vase_scores(protect_prompt: bool, large: float, kernel: int) -> None:
    """The largest ranges first; ``log a`` and Gumbel's noise, up to a constant of the request."""
    inputs = score_input(6)
    first, last = 10 if protect_prompt else 4, 60 - 8
    ranges = [0] * (last - first)
    for layer in range(inputs.layers):
        for head in inputs.values(layer)[first:last].double().unbind(dim=1):
            spread = [max(one) - min(one) for one in head.tolist()]
            mean = math.fsum(spread) / len(spread)
            steps = [math.floor(2048 * one / mean) for one in spread]
            ranges = [max(pair) for pair in zip(ranges, steps, strict=True)]
    count = int(large * (38 - first - 8))
    largest = set(sorted(range(last - first), key=ranges.__getitem__)[last - first - count :])
    draws = np.random.Generator(np.random.PCG64(inputs.seed)).random(last - first)
    exact = [
        math.log(a) - math.log(-math.log(u)) + (1000.0 if i in largest else 0.0)
        for i, (a, u) in enumerate(zip(vase_attention(inputs, first, kernel), draws, strict=True))
    ]
    found = make_policy("vase", protect_prompt=protect_prompt, large=large, kernel=kernel)
    scores = found.scores(inputs).double()
    assert not scores[:first].any() and not scores[last:].any()
    shift = scores[first:last] - torch.tensor(exact, dtype=torch.float64)
    assert (shift - math.log(8)).abs().max() <= 2e-4  # of numbers around 1000


def test_distinct_holds_the_values_of_one_layer() -> None:
    """Where no kernel reads them in place. The workspace of a compaction counts a block of their
    products."""
    taken, inputs = list[weakref.ref[torch.Tensor]](), score_input(seed=5, layers=4)

    def values(layer: int) -> torch.Tensor:
        assert all(one() is None for one in taken)
        found = inputs.values(layer).clone()
        taken.append(weakref.ref(found))
        return found

    scores = make_policy("distinct").scores(dataclasses.replace(inputs, values=values))
    assert torch.equal(scores, make_policy("distinct").scores(inputs)) and len(taken) == 4 + 2


def test_vase_holds_the_values_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace of a compaction counts one."""
    taken, one_by_one = list[weakref.ref[torch.Tensor]](), list[bool]()

    def values(layer: int) -> torch.Tensor:
        assert all(one() is None for one in taken)
        found = torch.rand(9, 2, 8)
        taken.append(weakref.ref(found))
        return found

    def spied(layers: Any, *others: Any) -> torch.Tensor:
        one_by_one.append(iter(layers) is layers)
        return largest_range(layers, *others)

    owner = torch.zeros(9, dtype=torch.int64)
    assert largest_range(map(values, range(4)), owner, [9]).shape == (9,) and len(taken) == 4
    monkeypatch.setattr(vase, "largest_range", spied)
    make_policy("vase").scores_together([score_input(seed=5)])
    assert one_by_one == [True]


WINDOW = 20  # of the model


def with_model_window(name: str, **parameters: Any) -> Policy:
    return with_params(policy_class(name), parameters, model_window_tokens=WINDOW)


def test_vase_counts_what_a_models_window_leaves() -> None:
    """A share of what is chosen is large, not a share of what the window keeps in any case."""
    inputs = score_input(6)
    scores = with_model_window("vase", large=0.5).scores(inputs)
    first, last = 10, 60 - WINDOW
    assert not scores[:first].any() and not scores[last:].any()
    assert int((scores > 500).sum()) == (inputs.keep_tokens - first - WINDOW) // 2 > 0
    received = vase_attention(inputs, first, 5)[: last - first]
    draws = np.random.Generator(np.random.PCG64(inputs.seed)).random(last - first)
    exact = torch.log(torch.tensor(received)) - torch.log(-torch.log(torch.tensor(draws)))
    large = 1000.0 * (scores[first:last] > 500)
    off = scores[first:last].double() - large - exact
    assert (off - math.log(8)).abs().max() <= 2e-4


@pytest.mark.parametrize("name", ["triattention", "expected"])
def test_candidates_end_where_a_models_window_begins(name: str) -> None:
    """Their scores are shares of all candidates, or deviations from their mean."""
    rotation = Rotation.of(torch.tensor([1.0, 0.1]), 8)
    centres = QueryCentres.measured(rotation, torch.rand(3, 6, 4, 8))
    inputs = dataclasses.replace(score_input(5), centres=centres)
    scores, last = with_model_window(name).scores(inputs), 60 - WINDOW
    assert not scores[:10].any() and not scores[last:].any()
    # The same row, cut behind the candidates and as many tokens as a policy pins by itself.
    cut = dataclasses.replace(
        inputs,
        positions=inputs.positions[: last + 8],
        keys=lambda layer: inputs.keys(layer)[: last + 8],
        values=lambda layer: all_values(inputs)[layer, : last + 8],
    )
    assert torch.equal(scores[:last], make_policy(name).scores(cut)[:last])


def test_vase_draws_in_proportion_to_attention() -> None:
    """One token of ten, drawn four thousand times; and the second of a draw of two."""
    inputs = dataclasses.replace(score_input(3, n=15, window=1), prompt_tokens=4)
    policy = make_policy("vase", window=1, large=0.0, kernel=1)
    weights = vase_attention(inputs, 4, 1)
    total, draws, hits = math.fsum(weights), 4000, [[0] * 10 for _ in range(2)]
    for seed in range(draws):
        order = policy.scores(dataclasses.replace(inputs, seed=seed))[4:14].argsort()
        for place in range(2):
            hits[place][int(order[-1 - place])] += 1
    likely = [one / total for one in weights]
    second = [
        math.fsum(p * q / (1 - p) for j, p in enumerate(likely) if j != i)
        for i, q in enumerate(likely)
    ]
    for counted, expected in zip(hits, (likely, second), strict=True):
        for hit, share in zip(counted, expected, strict=True):
            assert abs(hit / draws - share) < 4 * math.sqrt(share * (1 - share) / draws) + 1e-3


@pytest.mark.parametrize(("halves", "scale", "rotated"), LAYOUTS)
def test_triattention_scores(halves: bool, scale: float, rotated: int) -> None:
    """The definition: cosines of un-rotated keys, offset by offset, band by band."""
    frequencies = 100.0 ** (-torch.arange(rotated // 2) / (rotated // 2))
    rotation = Rotation.of(frequencies, 8, scale=scale, halves=halves)
    draw = torch.Generator().manual_seed(4)
    queries = torch.randn(3, 20, 4, 8, generator=draw) + torch.randn(3, 1, 4, 8, generator=draw)
    centres = QueryCentres.measured(rotation, queries)
    inputs = dataclasses.replace(score_input(5), centres=centres)
    angle = [*(float(w) for w in frequencies), *[0.0] * (4 - rotated // 2)]
    pairs = [(f, f + rotated // 2) if halves else (2 * f, 2 * f + 1) for f in range(rotated // 2)]
    rest = (8 - rotated) // 2
    pairs += [(rotated + f, rotated + rest + f) for f in range(rest)]

    def plain(vector: list[float], position: int) -> list[complex]:
        """Band by band, un-rotated."""
        return [
            complex(vector[x], vector[y]) * cmath.exp(-1j * position * w) / scale
            for (x, y), w in zip(pairs, angle, strict=True)
        ]

    first, last, now = 10, 60 - 8, inputs.logical_tokens
    best = [-math.inf] * (last - first)
    for layer, head in itertools.product(range(3), range(4)):
        asked = [plain(q, p) for p, q in enumerate(queries[layer, :, head].double().tolist())]
        centre = [sum(column) / 20 for column in zip(*asked, strict=True)]
        size = [math.fsum(map(abs, column)) / 20 for column in zip(*asked, strict=True)]
        row = []
        keys = inputs.keys(layer)[first:last, head // 2].double().tolist()
        for p, key in zip(inputs.positions[first:last].tolist(), keys, strict=True):
            k, score = plain(key, p), 0.0
            for c, a, band, w in zip(centre, size, k, angle, strict=True):
                score += (a - abs(c)) * abs(band)
                turned = cmath.phase(c * band.conjugate())
                for power in range(17):
                    wave = math.cos((now + 2**power - p) * w + turned)
                    score += abs(c) * abs(band) * wave / 17
            row.append(score * scale**2)
        mean = math.fsum(row) / len(row)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in row) / len(row))
        best = [max(b, (x - mean) / deviation) for b, x in zip(best, row, strict=True)]
    scores = make_policy("triattention").scores(inputs).double()
    assert not scores[:first].any() and not scores[last:].any()
    assert (scores[first:last] - torch.tensor(best, dtype=torch.float64)).abs().max() <= 1e-4


@pytest.mark.parametrize(("halves", "scale", "rotated"), LAYOUTS)
def test_expected_scores(halves: bool, scale: float, rotated: int) -> None:
    """Mean and covariance of un-rotated queries, turned by the mean rotation of what is to come, as
    matrices."""
    frequencies = 100.0 ** (-torch.arange(rotated // 2) / (rotated // 2))
    rotation = Rotation.of(frequencies, 8, scale=scale, halves=halves)
    centres = QueryCentres.measured(rotation, torch.ones(3, 1, 4, 8))
    inputs = dataclasses.replace(score_input(5), centres=centres)
    pairs = [(f, f + rotated // 2) if halves else (2 * f, 2 * f + 1) for f in range(rotated // 2)]

    def turn(position: int) -> Tensor:
        """float64 [8, 8], without the factor of the embedding."""
        matrix = torch.eye(8, dtype=torch.float64)
        for (x, y), w in zip(pairs, frequencies.double().tolist(), strict=True):
            cosine, sine = math.cos(position * w), math.sin(position * w)
            matrix[x, x] = matrix[y, y] = cosine
            matrix[y, x], matrix[x, y] = sine, -sine
        return matrix

    now, first, last = inputs.logical_tokens, 10, 60 - 8
    horizon = 40
    ahead = torch.stack([turn(now + j) for j in range(horizon)]).mean(dim=0)
    exact = torch.zeros(last - first, dtype=torch.float64)
    for layer, head in itertools.product(range(3), range(2)):
        k, attended = inputs.keys(layer)[first:last, head].double(), torch.zeros(last - first)
        for query_head in (2 * head, 2 * head + 1):
            recent = inputs.queries()[layer, :, query_head].double()
            plain = torch.stack([turn(now - 1 - i).T @ q for i, q in enumerate(recent)])
            mean = ahead @ plain.mean(dim=0)
            spread = ahead @ (plain - plain.mean(dim=0)).T.cov(correction=0) @ ahead.T
            logits = inputs.scale * (k @ mean)
            logits += inputs.scale**2 * torch.einsum("ni,ij,nj->n", k, spread, k) / 2
            attended = attended + logits.softmax(dim=0) / 2
        exact += attended * inputs.values(layer)[first:last, head].double().norm(dim=1) / 6
    scores = make_policy("expected", horizon=horizon).scores(inputs).double()
    assert not scores[:first].any() and not scores[last:].any()
    assert (scores[first:last] - exact).abs().max() <= TOLERANCE


def test_triattention_of_equal_keys_is_0() -> None:
    inputs = dataclasses.replace(score_input(1), keys=lambda _: torch.full((60, 2, 8), 0.7))
    assert make_policy("triattention").scores(inputs).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["triattention", "expected"])
def test_layers_in_parts_score_as_all_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have more layers than are held at once."""
    inputs, scores = score_input(2, layers=5), []
    for together in (5, 2, 1):
        monkeypatch.setattr(f"sgl_skipkv.policy.{name}._LAYERS_TOGETHER", together)
        scores.append(make_policy(name).scores(inputs))
    assert scores[0].any()
    for found in scores[1:]:
        assert torch.allclose(found, scores[0], rtol=1e-5, atol=1e-6)


def test_a_sentence_begins_with_no_token_behind_it() -> None:
    """A turn may end within a sentence, behind one that is shorter than a beginning."""
    places = some_sentences((1, 3, -1.0), (7, 11, -1.0)).places(torch.arange(12))
    assert [i for i, begins in enumerate(places.begins(3).tolist()) if begins] == [1, 2, 7, 8, 9]

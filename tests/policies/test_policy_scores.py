"""Scores of policies against their formulas, written once more as loops over floats.

Those that ask keys and values are in ``test_value_scores.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from loops import TOLERANCE, assert_near, attention, redundancy, rkv_scores
from score_inputs import all_keys, score_input, some_sentences

from sgl_skipkv.policy import make_policy, policy_class, with_params
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Steps
from sgl_skipkv.policy.skipkv import sentence_penalty


def exact_rkv(inputs: ScoreInput, **parameters: float) -> list[float]:
    return rkv_scores(inputs.queries(), all_keys(inputs), inputs.scale, **parameters)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("rkv", {}), ("rkv", {"sigma": 0.0}), ("rkv", {"sigma": 1.0})),
        ("rkv", {"kernel": 1, "threshold": 0.2, "sigma": 0.5}),
        *(("snapkv", {}), ("snapkv", {"kernel": 1})),
    ],
)
def test_rkv_and_snapkv_scores(seed: int, name: str, parameters: dict[str, Any]) -> None:
    """SnapKV's are R-KV's with sigma 1: importance alone."""
    inputs = score_input(seed)
    found = make_policy(name, **parameters).scores(inputs)
    settings = parameters if name == "rkv" else {**parameters, "sigma": 1.0}
    assert_near(found, exact_rkv(inputs, **settings))
    assert not found[-8:].any()


def penalties(inputs: ScoreInput, tau: float) -> list[float]:
    """lambda of the sentence that holds each token, where it is redundant and longer than one."""
    found = [0.0] * len(inputs.positions)
    spans = zip(*(one.tolist() for one in vars(inputs.sentences).values()), strict=True)
    for start, stop, likeness in spans:
        for i, position in enumerate(inputs.positions.tolist()):
            if start <= position < stop and likeness > tau and stop - start > 1:
                found[i] = likeness
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tau", [0.95, 0.99, 0.0])
def test_skipkv_scores(seed: int, tau: float) -> None:
    sentences = some_sentences(
        (20, 45, 0.97), (45, 46, 0.999), (50, 90, 0.2), (90, 120, 0.9951), (120, 160, -1.0)
    )
    inputs = score_input(seed, sentences=sentences)
    lost = penalties(inputs, tau)
    exact = [z - one for z, one in zip(exact_rkv(inputs), lost, strict=True)]
    assert_near(make_policy("skipkv", tau=tau).scores(inputs), exact)
    assert any(lost)


@pytest.mark.parametrize("ending", [0, 1, 4, 30])
def test_skipkv_plus_scores(ending: int) -> None:
    """``e`` counts down from the delimiter, in every closed sentence and nowhere else."""
    spans = (20, 45, 0.97), (45, 46, 0.999), (50, 90, 0.2), (90, 120, 0.9951), (120, 150, -1.0)
    inputs = score_input(1, sentences=some_sentences(*spans))
    exact = make_policy("skipkv").scores(inputs).double()
    for start, stop, _ in spans:
        for back in range(1, ending + 1):  # tokens before the delimiter
            if stop - 1 - back >= start:
                exact[inputs.positions == stop - 1 - back] += ending + 1 - back
    found = make_policy("skipkv+", ending=ending).scores(inputs)
    assert_near(found, exact.tolist(), ending * 2**-23 + TOLERANCE)


def test_endings_go_after_bodies_and_from_their_far_side() -> None:
    redundant, other = (10, 30, 0.96), (30, 50, 0.3)
    inputs = score_input(4, sentences=some_sentences(redundant, other))
    inputs = dataclasses.replace(inputs, positions=torch.arange(60))
    scores = make_policy("skipkv+", ending=2).scores(inputs)
    # Ends of a sentence: ..., far, near, delimiter. Each group is evicted before the next.
    groups = [[*range(10, 27), 29], [*range(30, 47), 49], *([27], [47], [28], [48])]
    for first, then in itertools.pairwise(groups):
        assert scores[first].max() < scores[then].min()


def test_similarity_at_tau_is_not_redundant() -> None:
    positions = torch.arange(6)
    sentences = some_sentences((0, 3, 0.5), (3, 6, 0.75))
    assert sentence_penalty(positions, sentences, 0.5).tolist() == [0, 0, 0, 0.75, 0.75, 0.75]


def test_streaming_scores_are_positions() -> None:
    inputs = score_input(5)
    found = make_policy("streaming").scores(inputs)
    assert found.tolist() == [float(p) for p in inputs.positions.tolist()]


def test_random_draws() -> None:
    """By prompt, compaction and seed; not by content, order of requests or the global generator."""
    first = make_policy("random").scores(score_input(1))
    torch.manual_seed(99)
    assert torch.equal(first, make_policy("random").scores(score_input(2)))
    again = make_policy("random").scores(score_input(1, compaction_seed=12))
    seeded = make_policy("random", seed=1).scores(score_input(1))
    assert not torch.equal(first, again) and not torch.equal(first, seeded)
    assert not torch.equal(again, seeded)
    assert (first >= 0).all() and (first < 1).all() and first.unique().numel() > 55


@pytest.mark.parametrize("seed", range(2))
def test_tova_scores(seed: int) -> None:
    inputs = score_input(seed)
    exact = [0.0] * len(inputs.positions)
    heads = inputs.queries().shape[2]
    for layer in range(inputs.layers):
        keys = inputs.keys(layer).double()
        for head in range(heads):
            query = inputs.queries()[layer, 0, head].double().tolist()  # the newest
            group = head * keys.shape[1] // heads
            row = attention(query, keys[:, group].tolist(), inputs.scale)
            exact = [a + b / heads / inputs.layers for a, b in zip(exact, row, strict=True)]
    assert_near(make_policy("tova").scores(inputs), exact)


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_gkv_scores(sigma: float) -> None:
    """Two compactions of two requests: what was attended to fades, new tokens begin with 0."""
    policy = make_policy("gkv", sigma=sigma, decay=0.7, threshold=0.2)
    draw, lengths = torch.Generator().manual_seed(3), (31, 60)
    inputs = [score_input(seed, n=n) for seed, n in enumerate(lengths)]
    carried: list[list[float]] = [[], []]
    statistics = policy.initial_statistics(torch.arange(0))
    known = (0, 0)
    for now in ((20, 40), lengths):
        attention = torch.rand(4, sum(now), generator=draw) ** 3
        parts = torch.split(statistics["attended"], known)
        new = [
            policy.initial_statistics(torch.arange(n - m)) for n, m in zip(now, known, strict=True)
        ]
        joined = [x for part, one in zip(parts, new, strict=True) for x in (part, one["attended"])]
        statistics = policy.follow(
            {"attended": torch.cat(joined)},
            Steps(attention, torch.ones(4, sum(now)).long(), now),
        )
        for r, own in enumerate(torch.split(attention.double().sum(0), now)):
            before = [*carried[r], *[0.0] * (now[r] - known[r])]
            received = [*own.tolist()[:-8], *[0.0] * 8]  # none yet in the window
            top = max(received)
            carried[r] = [max(0.7 * a, x / top) for a, x in zip(before, received, strict=True)]
        known = now
    parts = torch.split(statistics["attended"], known)
    inputs = [
        dataclasses.replace(one, statistics={"attended": part})
        for one, part in zip(inputs, parts, strict=True)
    ]
    for one, own, found in zip(inputs, carried, policy.scores_together(inputs), strict=True):
        heads = [head for layer in range(3) for head in redundancy(one.keys(layer), 0.2)]
        repeats = [math.fsum(column) for column in zip(*heads, strict=True)]
        exact = [
            sigma * a - (1 - sigma) * r / max(repeats[:-8])
            for a, r in zip(own, repeats, strict=True)
        ]
        assert_near(found[:-8], exact[:-8])
        assert torch.equal(found, policy.scores(one))


def test_crystal_scores() -> None:
    """By brute force over the steps of looks; in one piece or in two it is the same credit."""
    policy = make_policy("crystal", alpha=0.5, decay=0.6)
    draw, steps, n = torch.Generator().manual_seed(5), 300, 40
    attention = torch.rand(steps, n, generator=draw) ** 8
    attention[:, 7] = 0.0
    attention[1:, 8] = 0.0  # one look, far back
    attention[0, 8] = 0.9
    inputs = score_input(2, n=n, window=1)
    inputs = dataclasses.replace(inputs, positions=torch.arange(steps - n, steps))
    exact = []
    for column in (attention > 0.5).T.tolist():
        credit = math.fsum(0.6 ** (steps - 1 - t) for t in range(steps) if column[t])
        exact.append(math.log(credit) if credit else -1e30)
    times = torch.arange(steps)[:, None].expand(steps, n)
    for cuts in ([steps], [120, 180], [8] * 37 + [4]):
        statistics = policy.initial_statistics(torch.zeros(n))
        for part, at in zip(attention.split(cuts), times.split(cuts), strict=True):
            statistics = policy.follow(statistics, Steps(part, at, [n]))
        found = policy.scores(dataclasses.replace(inputs, statistics=statistics))
        assert found.tolist() == pytest.approx(exact, rel=1e-5, abs=1e-5)
    assert exact[7] == -1e30 and exact[8] == pytest.approx(299 * math.log(0.6))


@pytest.mark.parametrize("protect_prompt", [True, False])
@pytest.mark.parametrize("kernel", [1, 5])
def test_rpc_scores(protect_prompt: bool, kernel: int) -> None:
    """Eq. 2, with the prompt left out of the softmax where it is pinned."""
    inputs = score_input(6)
    n, heads = len(inputs.positions), inputs.queries().shape[2]
    first, last = inputs.prompt_tokens if protect_prompt else 0, n - 8
    exact = [0.0] * n
    for layer in range(inputs.layers):
        keys = inputs.keys(layer).double()
        received = [0.0] * n
        for w in range(8):
            for head in range(heads):
                query = inputs.queries()[layer, w, head].double().tolist()
                columns = keys[first:last, head * keys.shape[1] // heads].tolist()
                for i, got in enumerate(attention(query, columns, inputs.scale)):
                    received[first + i] += got / heads
        reach = kernel // 2
        for i in range(first, last):
            near = [received[j] for j in range(i - reach, i + reach + 1) if first <= j < last]
            exact[i] += sum(near) / kernel / inputs.layers
    policy = make_policy("rpc", kernel=kernel, protect_prompt=protect_prompt)
    assert_near(policy.scores(inputs), exact, 8 * TOLERANCE)


def test_rpc_budget_grows_up_to_its_ceiling() -> None:
    """P = 1024, R = 32, c = 4: the paper's cache after each compaction."""
    policy = make_policy("rpc", interval=1024, window=32, ratio=4)
    assert [policy.budget_after(4096, n) for n in range(4)] == [32, 288, 544, 800]
    assert policy.budget_after(600, 3) == 600
    assert make_policy("rkv").budget_after(600, 3) == 600
    windows = with_params(policy_class("rpc"), {"interval": 128}, model_window_tokens=1024)
    assert [windows.budget_after(4096, n) for n in range(1, 4)] == [1056, 1088, 1120]


def test_lazy_scores() -> None:
    """H1 falls with overdue tokens, H2 with long gaps; both are 0 for a token never active again.

    The numbers are of the authors' program, but for the first and the last token.
    """
    inputs = score_input(1, n=4, window=1)
    now = inputs.positions[-1].float()
    statistics = {
        "last_active": torch.stack([now - 5, now - 5, now - 50, now]),
        "longest_gap": torch.tensor([0.0, 5.0, 5.0, 0.0]),
    }
    inputs = dataclasses.replace(inputs, statistics=statistics)
    found = make_policy("lazy").scores(inputs).tolist()
    often = 2 / (1 + math.exp(4))
    expected = [0.0, 2 / (1 + math.exp(2)) + often, 2 / (1 + math.exp(11)) + often, 0.0]
    assert found == pytest.approx(expected, rel=1e-6)

"""Quotas of sentences: seats given one by one, and whatever the policy's own score is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from score_inputs import score_input, some_sentences
from torch import Tensor

from sgl_skipkv.config import SettingError
from sgl_skipkv.eviction.select import select_together
from sgl_skipkv.policy import make_policy, names, policy_class
from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Steps

SPANS = (15, 45, -1.0), (45, 46, -1.0), (60, 90, -1.0), (90, 140, -1.0)
WITHOUT = ("skipkv", "skipkv+", "h2o", "raas", "lazy", "gkv", "crystal", "full")
WRAPPED = tuple(name for name in names() if name not in WITHOUT)


def requests(policy: Policy, *lengths: int) -> list[ScoreInput]:
    """After two compactions, the second of which has a step less."""
    inputs = [score_input(i, n=n, sentences=some_sentences(*SPANS)) for i, n in enumerate(lengths)]
    draw = torch.Generator().manual_seed(9)
    found = []
    for one in inputs:
        n, statistics = len(one.positions), policy.initial_statistics(one.positions)
        for steps in (4, 3):
            attention = torch.rand(4, n, generator=draw) ** 4
            attention[steps:] = 0.0
            seen = torch.arange(4)[:, None].expand(4, n).where(attention > 0, -1)
            statistics = policy.follow(statistics, Steps(attention, seen, (n,)))
        found.append(dataclasses.replace(one, statistics=statistics))
    return found


def sentence_of(position: int) -> int:
    """An index of its own for each sentence and each gap."""
    return sum(position >= end for start, stop, _ in SPANS for end in (start, stop))


def seats(masses: dict[int, float], sizes: dict[int, int], free: int) -> dict[int, int]:
    """Eight each, round by round and the heaviest first; then to the highest average."""
    given = dict.fromkeys(masses, 0)
    heaviest = sorted(masses, key=lambda one: masses[one], reverse=True)
    rounds = [one for taken in range(8) for one in heaviest if sizes[one] > taken]
    for one in rounds[:free]:
        given[one] += 1
    for _ in range(free - len(rounds)):
        open_ones = [one for one in masses if given[one] < sizes[one]]
        given[max(open_ones, key=lambda one: masses[one] / (given[one] - 8 + 0.5))] += 1
    return given


def chosen(policy: Policy, scores: Sequence[Tensor], inputs: Sequence[ScoreInput]) -> list[Tensor]:
    """Kept tokens of each request's candidates."""
    ranges = [
        [(0, first), (stop, len(one.positions))]
        for one in inputs
        for first, stop in [policy.candidates(one)]
    ]
    keep = [one.keep_tokens for one in inputs]
    selections, finite = select_together(scores, ranges, keep)
    assert finite.all()
    return [selection.kept for selection in selections]


@pytest.mark.parametrize("keep", [25, 38, 52])
@pytest.mark.parametrize("name", WRAPPED)
def test_every_sentence_keeps_its_quota_of_the_policys_best(name: str, keep: int) -> None:
    policy = make_policy(name, quotas=True)
    inputs = [dataclasses.replace(one, keep_tokens=keep) for one in requests(policy, 60, 75)]
    kept = chosen(policy, policy.scores_together(inputs), inputs)
    for one, rows in zip(inputs, kept, strict=True):
        (own,) = make_policy(name).scores_together([one])
        first, stop = policy.candidates(one)
        shares = [one.statistics[key][first:stop].double() for key in ("recent", "credit")]
        share = 0.7 * shares[0] / shares[0].sum() + 0.3 * shares[1] / shares[1].sum()
        members: dict[int, list[int]] = {}
        for i, position in enumerate(one.positions.tolist()[first:stop]):
            members.setdefault(sentence_of(position), []).append(i)
        masses = {at: float(share[own_ones].sum()) for at, own_ones in members.items()}
        sizes = {at: len(own_ones) for at, own_ones in members.items()}
        assert len(masses) > 3
        given = seats(masses, sizes, keep - first - policy.params.window)
        best = [
            first + i
            for at, own_ones in members.items()
            for i in sorted(own_ones, key=lambda i: (float(own[first + i]), i))[::-1][: given[at]]
        ]
        assert sorted(best) == [i for i in rows.tolist() if first <= i < stop]


@pytest.mark.parametrize("name", WRAPPED)
def test_a_request_gets_the_same_scores_alone(name: str) -> None:
    policy = make_policy(name, quotas=True)
    inputs = requests(policy, 60, 31, 75)
    for one, found in zip(inputs, policy.scores_together(inputs), strict=True):
        assert torch.equal(found, policy.scores_together([one])[0])


def test_without_sentences_it_is_the_policys_own_choice() -> None:
    inputs = [
        dataclasses.replace(one, sentences=some_sentences((500, 501, -1.0)))
        for one in requests(make_policy("rkv", quotas=True), 60)
    ]
    plain, quotas = make_policy("rkv"), make_policy("rkv", quotas=True)
    own, wrapped = (
        chosen(policy, policy.scores_together(inputs), inputs) for policy in (plain, quotas)
    )
    assert torch.equal(own[0], wrapped[0])


def test_credit_fades_and_new_tokens_have_none() -> None:
    policy = make_policy("keydiff", quotas=True)
    statistics = policy.initial_statistics(torch.arange(2))
    first = Steps(torch.tensor([[0.5, 0.1], [0.3, 0.1]]), torch.tensor([[3, 3], [4, 4]]), (2,))
    then = Steps(torch.tensor([[0.0, 0.4], [0.0, 0.0]]), torch.tensor([[9, 9], [-1, -1]]), (2,))
    for seen in (first, then):
        statistics = policy.follow(statistics, seen)
    expected = {"recent": [0.0, 0.4], "credit": [0.8 * 0.2 * 0.4, 0.8 * 0.2 * 0.1 + 0.2 * 0.4]}
    for name, values in expected.items():
        assert torch.allclose(statistics[name], torch.tensor(values))


def test_a_score_that_is_no_number_stays_none() -> None:
    policy = make_policy("rkv", quotas=True)
    (one,) = requests(policy, 60)
    keys = [one.keys(layer).clone() for layer in range(one.layers)]
    keys[1][20, 0, 0] = torch.nan
    (found,) = policy.scores_together([dataclasses.replace(one, keys=lambda layer: keys[layer])])
    assert not found.isfinite().all()


@pytest.mark.parametrize("name", names())
def test_policies_that_score_more_than_tokens_refuse_quotas(name: str) -> None:
    if name not in WITHOUT:
        assert type(make_policy(name, quotas=True)) is type(make_policy(name, quotas=True))
        assert isinstance(make_policy(name, quotas=True), policy_class(name))
        return
    with pytest.raises(SettingError, match=r"kv_params\.quotas: expected false with .*choices"):
        make_policy(name, quotas=True)

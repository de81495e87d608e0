"""Selection: how many is exact, ties go to the later position, protected tokens stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_on_cpu import on_triton
from row_rewrites import select

from sgl_skipkv.eviction.select import select_together

Ranges = list[tuple[int, int]]


@pytest.fixture(scope="module", autouse=True, params=["torch", "kernel"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """In plain torch, and with the kernel interpreted."""
    with on_triton() if request.param == "kernel" else nullcontext():
        yield request.param


def drawn(*strategies: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """300 examples in plain torch, 10 for the kernel, which takes its time."""

    def decorated(test: Any) -> Any:
        def run(way: str) -> None:
            examples = settings(max_examples=10 if way == "kernel" else 300)
            examples(given(*strategies)(test))()

        return run

    return decorated


# Few distinct values make many ties; the others are what arithmetic can produce.
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-30, 1e30, -math.inf, math.inf])


@st.composite
def problems(
    draw: st.DrawFn, values: st.SearchStrategy[float] = VALUES
) -> tuple[list[float], Ranges, int]:
    """Scores, protected ranges (overlapping, empty, sticking out), and a count that can be met."""
    n = draw(st.integers(0, 40))
    scores = draw(st.lists(values, min_size=n, max_size=n))
    edges = st.tuples(st.integers(0, n + 3), st.integers(0, n + 3)).map(sorted).map(tuple)
    protected = draw(st.lists(edges, max_size=4))
    covered = len(covered_positions(protected, n))
    return scores, protected, draw(st.just(covered) | st.integers(covered, n))


def covered_positions(protected: Sequence[Sequence[int]], n: int) -> set[int]:
    return {i for start, stop in protected for i in range(start, min(stop, n))}


def sort_oracle(scores: Sequence[float], protected: Ranges, keep: int) -> list[int]:
    """Sort by (protected, score, position), best last; Python's floats compare -0.0 == 0.0."""
    pinned = covered_positions(protected, len(scores))
    ranked = sorted(range(len(scores)), key=lambda i: (i in pinned, scores[i], i))
    return sorted(ranked[len(scores) - keep :])


@drawn(problems(VALUES | st.just(math.nan)))
def test_protected_tokens_are_kept_whatever_any_score_is(
    problem: tuple[list[float], Ranges, int],
) -> None:
    """NaN and infinity included: what is protected may belong to somebody else."""
    scores, protected, keep = problem
    kept, evicted = select(torch.tensor(scores), protected, keep)
    assert covered_positions(protected, len(scores)) <= set(kept.tolist())
    assert len(kept) == keep and len(kept) + len(evicted) == len(scores)


@drawn(problems())
def test_equals_a_sort_by_score_and_position(problem: tuple[list[float], Ranges, int]) -> None:
    """And what is kept and what is not are a partition, each in order."""
    scores, protected, keep = problem
    scores = [min(score, 3e38) for score in scores]
    kept, evicted = select(torch.tensor(scores), protected, keep)
    assert kept.dtype == evicted.dtype == torch.int64
    assert kept.tolist() == sort_oracle(scores, protected, keep)
    assert evicted.tolist() == sorted({*range(len(scores))} - {*kept.tolist()})


@drawn(problems(), st.integers(1, 5))
def test_the_same_scores_give_the_same_set(
    problem: tuple[list[float], Ranges, int], times: int
) -> None:
    """Again, as a view with strides, in half the precision that holds the values exactly."""
    scores, protected, keep = problem
    first = select(torch.tensor(scores), protected, keep).kept
    strided = torch.tensor(scores).repeat_interleave(times)[::times]
    assert torch.equal(select(strided, protected, keep).kept, first)
    assert torch.equal(select(torch.tensor(scores), [*protected, *protected], keep).kept, first)
    doubled = torch.tensor(scores, dtype=torch.float64)
    assert torch.equal(select(doubled, protected, keep).kept, first)


def test_scores_are_not_changed() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0])
    select(scores, [(1, 2)], 2)
    assert scores.tolist() == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("protected", "keep"),
    [([], -1), ([], 6), ([(0, 3)], 2), ([(0, 2), (1, 3), (4, 5)], 3), ([(0, 99)], 4)],
)
def test_a_count_that_cannot_be_met(protected: Ranges, keep: int) -> None:
    with pytest.raises(ValueError, match=rf"keep_tokens: .*got {keep}$"):
        select(torch.zeros(5), protected, keep)


@drawn(st.lists(problems(VALUES | st.just(math.nan)), min_size=1, max_size=4))
def test_each_of_several_requests_keeps_what_it_keeps_alone(
    together: list[tuple[list[float], Ranges, int]],
) -> None:
    scores = [torch.tensor(values) for values, _, _ in together]
    found, finite = select_together(
        scores, [ranges for _, ranges, _ in together], [keep for _, _, keep in together]
    )
    assert finite.tolist() == [bool(one.isfinite().all()) for one in scores]
    for (_, ranges, keep), own, selection in zip(together, scores, found, strict=True):
        alone = select(own, ranges, keep)
        assert torch.equal(selection.kept, alone.kept)
        assert torch.equal(selection.evicted, alone.evicted)

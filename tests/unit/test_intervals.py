"""Intervals of means of scores, and of differences of pairs: against SciPy, and by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest, multinomial

from sgl_skipkv.cli.tune.intervals import (
    least_difference,
    paired_interval,
    pairs_for,
    pairs_to_bound,
    quantile,
    wilson,
)

Z = quantile(0.975)


@pytest.mark.parametrize("n", [1, 7, 40, 102, 200])
def test_wilson_is_that_of_scipy(n: int) -> None:
    for right in range(n + 1):
        expected = binomtest(right, n).proportion_ci(method="wilson")
        low, high = wilson(right, n)
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
        assert low >= 0 and high <= 1


def likeliest_losses(losses: int, gains: int, n: int, difference: float) -> float:
    """Of all shares of losses that go with this difference, the likeliest; found by search."""

    def unlikely(q: float) -> float:
        shares = (q, q + difference, 1 - 2 * q - difference)
        counts = (losses, gains, n - losses - gains)
        logs = (c * math.log(max(p, 1e-300)) for c, p in zip(counts, shares, strict=True) if c)
        return -sum(logs)

    low, high = max(0.0, -difference), (1 - difference) / 2
    return float(minimize_scalar(unlikely, bounds=(low, high), options={"xatol": 1e-12}).x)


@pytest.mark.parametrize(
    ("losses", "gains", "n"), [(1, 0, 40), (3, 1, 40), (0, 2, 25), (9, 1, 44), (20, 3, 40)]
)
def test_the_ends_of_a_paired_interval(losses: int, gains: int, n: int) -> None:
    """At both ends the score statistic, from a searched maximum of the likelihood, is z."""
    for end, sign in zip(paired_interval(losses, gains, n, Z), (1, -1), strict=True):
        q = likeliest_losses(losses, gains, n, end)
        spread = math.sqrt(n * (2 * q + end - end**2))
        assert (gains - losses - n * end) / spread == pytest.approx(sign * Z, abs=1e-3)


def test_a_paired_interval_of_equal_scores() -> None:
    for n in (5, 40, 1000):
        expected = Z**2 / (n + Z**2)
        assert paired_interval(0, 0, n, Z) == pytest.approx((-expected, expected), abs=1e-6)
        assert least_difference(n, Z) == pytest.approx(expected)
    enough = pairs_for(0.02, Z)
    assert least_difference(enough, Z) <= 0.02 < least_difference(enough - 1, Z)
    assert pairs_to_bound(0, 0, 0.02, Z) == enough and pairs_to_bound(0.1, 0, 0.1, Z) is None
    at_a_rate = pairs_to_bound(0.05, 0.01, 0.1, Z)
    assert at_a_rate is not None
    assert paired_interval(0.05 * at_a_rate, 0.01 * at_a_rate, at_a_rate, Z)[0] >= -0.1
    low, high = paired_interval(12, 0, 12, Z)
    assert low == -1.0 and -1 < high < -0.5
    low, high = paired_interval(3, 1, 40, Z)
    assert paired_interval(1, 3, 40, Z) == pytest.approx((-high, -low))


def test_how_often_a_paired_interval_is_right() -> None:
    """By enumeration: losses that a user would fear are missed at most as often as promised, within
    a point."""
    n = 40
    ends = {
        (losses, gains): paired_interval(losses, gains, n, Z)[0]
        for losses in range(n + 1)
        for gains in range(n + 1 - losses)
    }
    for loss, gain in itertools.product((0.0, 0.02, 0.05, 0.1, 0.2, 0.3), (0.0, 0.02, 0.1)):
        chance = multinomial(n, [loss, gain, 1 - loss - gain])
        covered = sum(
            chance.pmf([*counts, n - sum(counts)])
            for counts, low in ends.items()
            if low <= gain - loss + 1e-9
        )
        assert covered >= 0.965, (loss, gain)


def test_shares_have_wider_intervals_than_counts() -> None:
    """Losses of half a score are covered at least as often as whole ones."""
    n, loss = 12, 0.4
    for half in (0.2, 0.6, 1.0):  # of the pairs lose a half, the others nothing
        covered = sum(
            math.comb(n, k) * half**k * (1 - half) ** (n - k)
            for k in range(n + 1)
            if paired_interval(k / 2, 0, n, Z)[0] <= -half / 2 + 1e-9
        )
        assert covered >= 0.975, (half, loss)

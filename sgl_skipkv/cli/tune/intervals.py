"""How sure a mean of scores from 0 to 1 is, and the difference of two such means.

A score is 1 or 0 where an answer is right or wrong, and may be a share. The variance of numbers
from 0 to 1 is at most that of zeros and ones with the same mean, so the intervals of counts hold
for shares as well, and are then wider than need be.
"""

from __future__ import annotations

from math import ceil, sqrt
from statistics import NormalDist


def quantile(confidence: float) -> float:
    """The standard normal quantile of a one-sided confidence."""
    return NormalDist().inv_cdf(confidence)


def wilson(total: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a mean.

    ``(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)``, p = total / n.

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927).

    Args:
        total: sum of n scores; the number of right answers.
    """
    p, z = total / n, quantile(0.975)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    middle, scale = p + z * z / (2 * n), 1 + z * z / n
    # Rounding must put neither the mean outside nor an end below 0 or above 1.
    low, high = max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)
    return min(low, p), max(high, p)


def paired_interval(losses: float, gains: float, n: int, z: float) -> tuple[float, float]:
    """Tango's score interval of the mean difference of n pairs of scores, ``(gains - losses) / n``.

    It holds every difference d at which ``|gains - losses - n d| <= z sqrt(n (2 q + d - d^2))``, q
    the likeliest share of losses if d is true. Without any loss or gain it is ``z^2 / (n + z^2)``
    to both sides, where a bootstrap would claim to be certain.

    Source: Tango, Statistics in Medicine 17 (1998).

    Args:
        losses: sum of the positive parts of (reference - score).
        gains: sum of the positive parts of (score - reference).
    """
    return _lower(losses, gains, n, z), -_lower(gains, losses, n, z)


def _lower(losses: float, gains: float, n: int, z: float) -> float:
    from scipy.optimize import brentq

    observed = (gains - losses) / n
    # Where all pairs are alike the observed difference is a second root.
    inside = observed - 1e-9
    if inside <= -1:
        return -1.0

    def beyond(d: float) -> float:
        """Falls in d, and is zero at the bound."""
        b = (2 * n - gains + losses) * d - gains - losses
        q = (sqrt(b * b + 8 * n * losses * d * (1 - d)) - b) / (4 * n)
        return n * (observed - d) - z * sqrt(n * max(2 * q + d - d * d, 0.0))

    return float(brentq(beyond, -1.0, inside, xtol=1e-9))


def least_difference(n: int, z: float) -> float:
    """The largest difference that n pairs of equal scores leave possible."""
    return z * z / (n + z * z)


def pairs_for(difference: float, z: float) -> int:
    """The fewest pairs that can show, if all are equal, that no larger difference is possible."""
    return ceil(z * z * (1 - difference) / difference - 1e-9)


def pairs_to_bound(lost: float, gained: float, bound: float, z: float) -> int | None:
    """About how many pairs show a loss of at most ``bound`` if scores go on being lost and gained
    at these rates; None if no number does.
    """
    if lost - gained >= bound:
        return None
    n = pairs_for(bound, z)
    while paired_interval(lost * n, gained * n, n, z)[0] < -bound:
        n += ceil(n / 20)
    return n

"""Confidence intervals and tests of significance of few repetitions.

Student's t-distribution is computed here by the incomplete beta function, because SciPy is no
dependency of the package. Tests compare with SciPy where it is installed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Terms of the continued fraction; 30 suffice for all degrees of freedom below 1,000.
_TERMS = 300
#: Relative change of the fraction below which further terms are rounding.
_EPSILON = 1e-15
#: Stands for 0 in divisions (Lentz).
_TINY = 1e-300
#: Probability with which an interval contains the expected value.
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """Mean with its confidence interval.

    Attributes:
        mean: of the values.
        half_width: mean ± half_width is the interval; None with one value.
        count: number of values.
    """

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        """Lower end."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half_width is None else self.mean + self.half_width


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of independent values with its confidence interval by the t-distribution.

    >>> round(mean_interval([1.0, 2.0, 3.0]).half_width, 4)  # 4.3027 / sqrt(3)
    2.4841

    Args:
        values: independent, of one normal distribution.

    Returns:
        The interval, which contains the expected value with probability `LEVEL`; None without
        values.
    """
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, 1)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, t_quantile((1 + LEVEL) / 2, len(values) - 1) * error, len(values))


def mean_of(interval: Interval | None) -> float | None:
    """Return the mean of an interval, or None without one."""
    return None if interval is None else interval.mean


def half_width_of(interval: Interval | None) -> float | None:
    """Return the half width of an interval, or None without one."""
    return None if interval is None else interval.half_width


def welch(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the two-sided p-value of Welch's t-test: the probability of means at least this
    different if the expected values were equal. Variances may differ.

    Returns:
        The p-value, or None if a side has fewer than two values or neither varies.

    Source: Welch 1947, "The generalization of Student's problem when several different population
    variances are involved".
    """
    if min(len(first), len(second)) < 2:
        return None
    shares = [statistics.variance(values) / len(values) for values in (first, second)]
    if not sum(shares):
        return None
    difference = statistics.fmean(first) - statistics.fmean(second)
    t = difference / math.sqrt(sum(shares))
    degrees = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True)
    )
    return 2 * (1 - t_cumulative(abs(t), degrees))


def t_cumulative(t: float, degrees: float) -> float:
    """Return the probability that a value of Student's t-distribution is below `t`."""
    tail = 0.5 * incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)
    return 1 - tail if t > 0 else tail


def t_quantile(probability: float, degrees: float) -> float:
    """Return the value below which Student's t-distribution is with a probability of at least a
    half, by bisection.
    """
    low, high = 0.0, 1.0
    while t_cumulative(high, degrees) < probability:
        high *= 2
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        if middle in (low, high):  # no double is in between
            break
        if t_cumulative(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function by Lentz's continued fraction.

    Source: Press et al., "Numerical Recipes", 3rd edition, section 6.4.
    """
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # The fraction converges quickly on this side only.
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _beta_fraction(1 - x, b, a) / b
    return front * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of the incomplete beta function."""
    # Ratios of successive numerators (c) and denominators (1 / d) of the fraction.
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 / _nonzero(1 + numerator * d)
            c = _nonzero(1 + numerator / c)
            value *= c * d
        if abs(c * d - 1) < _EPSILON:
            break
    return value


def _nonzero(value: float) -> float:
    """Return a value that can be divided by."""
    return value if abs(value) > _TINY else _TINY

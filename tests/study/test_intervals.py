"""Student's t and Welch's test, against SciPy and against textbook values."""

from __future__ import annotations

import math
import statistics

import pytest

from penstock.study.intervals import mean_interval, t_cumulative, t_quantile, welch

#: 97.5 % quantiles of Student's t by degrees of freedom, from a printed table.
TABLE = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "quantile"), TABLE.items())
def test_quantiles_are_those_of_the_printed_table(degrees, quantile):
    """An interval of few repetitions is mostly this number."""
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize("degrees", [1, 1.7, 3, 8.5, 60, 500])
@pytest.mark.parametrize("t", [-40.0, -2.0, -0.1, 0.0, 0.3, 1.0, 7.0])
def test_the_distribution_is_scipys(t, degrees):
    """Every p-value is two tails of it."""
    stats = pytest.importorskip("scipy.stats")
    assert t_cumulative(t, degrees) == pytest.approx(stats.t.cdf(t, degrees), abs=1e-12)


def test_welchs_test_is_scipys():
    """With unequal numbers and unequal variances."""
    stats = pytest.importorskip("scipy.stats")
    first, second = [1.0, 1.2, 0.9, 1.4], [1.5, 1.55, 1.52, 1.51, 1.49, 1.6]
    expected = stats.ttest_ind(first, second, equal_var=False).pvalue
    assert welch(first, second) == pytest.approx(expected, rel=1e-9)


def test_an_interval_has_the_mean_and_t_times_the_standard_error():
    """By the formula, independently."""
    values = [3.0, 5.0, 4.0, 8.0]
    interval = mean_interval(values)
    error = statistics.stdev(values) / math.sqrt(4)
    assert interval.mean == 5.0
    assert interval.half_width == pytest.approx(3.1824 * error, rel=1e-4)
    assert (interval.low, interval.high) == pytest.approx(
        (5 - 3.1824 * error, 5 + 3.1824 * error), rel=1e-4
    )


def test_what_cannot_be_said_of_few_values_is_none():
    """One run has no spread, and no run has no mean."""
    assert mean_interval([]) is None
    assert mean_interval([2.0]).half_width is None
    assert welch([1.0], [2.0, 3.0]) is None
    assert welch([1.0, 1.0], [1.0, 1.0]) is None

"""Scales and ticks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.report.axis import Axis, is_on_scale, tick_text

numbers = st.floats(-1e299, 1e299, allow_nan=False)
positive = st.floats(1e-290, 1e290)


@given(st.lists(numbers, min_size=1, max_size=20), st.integers(2, 10), st.booleans())
def test_all_values_and_ticks_are_between_the_ends(values, tick_count, from_zero):
    """A point outside of the axes would be drawn over the labels."""
    axis = Axis.of(values, log=False, tick_count=tick_count, from_zero=from_zero)
    assert axis.low < axis.high
    shares = [axis.share(value) for value in (*values, *axis.ticks)]
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
    assert len(axis.ticks) <= tick_count + 1
    if from_zero:
        assert 0 <= axis.share(0.0) <= 1


@given(st.lists(positive, min_size=1, max_size=20), st.integers(2, 10))
def test_all_values_are_on_a_logarithmic_axis(values, tick_count):
    """Its ends are round values beyond the smallest and the largest."""
    axis = Axis.of(values, log=True, tick_count=tick_count, from_zero=False)
    assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
    assert axis.ticks
    assert len(axis.ticks) <= tick_count


@pytest.mark.parametrize(
    ("value", "log", "shown"),
    [(1.0, True, True), (0.0, True, False), (-1.0, True, False), (0.0, False, True),
     (math.nan, False, False), (math.inf, False, False)],
)  # fmt: skip
def test_values_without_a_place_are_not_shown(value, log, shown):
    """A logarithmic axis has no place for 0."""
    assert is_on_scale(value, log) is shown


@pytest.mark.parametrize("log", [False, True])
def test_an_axis_without_values_exists(log):
    """A chart may have only values that are not finite."""
    axis = Axis.of([math.nan], log, 5, from_zero=False)
    assert axis.low < axis.high


@pytest.mark.parametrize(
    ("values", "log", "texts"),
    [
        ([0, 0.3], False, ["0.0", "0.1", "0.2", "0.3"]),
        ([0, 4e6], False, ["0", "1e6", "2e6", "3e6", "4e6"]),
        ([1, 100], True, ["1", "10", "100"]),
        ([0.01, 0.02], True, ["0.01", "0.02"]),
        ([-1, 1], False, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_labels_have_the_digits_of_the_distance_between_ticks(values, log, texts):
    """Labels of the same axis are written alike."""
    axis = Axis.of(values, log, 5, from_zero=False)
    assert [tick_text(value, axis) for value in axis.ticks] == texts

"""Seconds and bytes as texts, and costs of stages from those of ranks."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.explore.quantities import (
    MAX_SECONDS,
    bandwidth_text,
    bytes_text,
    parse_bandwidth,
    parse_list,
    seconds_text,
    spread_over_boundaries,
    spread_over_stages,
)
from penstock.units import parse_bytes, parse_seconds

amounts = st.floats(0, 1e9, allow_nan=False, allow_subnormal=False)


@given(amounts)
def test_seconds_are_read_back_as_they_were(seconds):
    """A link that changes a number shows another pipeline."""
    assert parse_seconds(seconds_text(seconds)) == seconds


@given(st.integers(0, 2**53))
def test_bytes_are_read_back_as_they_were(count):
    """Likewise for bytes, and for bytes per second."""
    assert parse_bytes(bytes_text(float(count))) == float(count)
    if count:
        assert parse_bandwidth(bandwidth_text(float(count))) == float(count)


@pytest.mark.parametrize(
    ("text", "message"),
    [("1,,2", "is not a quantity"), ("x", "is not a quantity"), ("1e10", "too large")],
)
def test_a_bad_list_is_refused(text, message):
    """Every value of a list is checked."""
    with pytest.raises(SettingError, match=message):
        parse_list(text, parse_seconds, MAX_SECONDS)


def test_a_link_without_speed_is_refused():
    """Its messages would never arrive."""
    with pytest.raises(SettingError, match="never delivers"):
        parse_bandwidth("0")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data())
def test_stages_share_the_parts_of_the_model(ranks, parts_per_rank, stages_per_rank, data):
    """Independent reference: the integral of a step function in exact fractions."""
    count, stages = ranks * parts_per_rank, ranks * stages_per_rank
    integers = st.lists(st.integers(0, 100), min_size=count, max_size=count)
    values = data.draw(integers)
    if count == 1:
        return
    expected = []
    for stage in range(stages):
        total = Fraction(0)
        for part, value in enumerate(values):
            start = max(Fraction(stage, stages), Fraction(part, count))
            end = min(Fraction(stage + 1, stages), Fraction(part + 1, count))
            total += max(end - start, Fraction(0)) * count * value
        expected.append(float(total))
    assert spread_over_stages(values, ranks, stages, "forward") == pytest.approx(expected)


@given(st.integers(1, 64), st.integers(1, 4))
def test_one_value_is_that_of_every_rank(ranks, stages_per_rank):
    """The time of the model does not depend on the number of stages per rank."""
    stages = ranks * stages_per_rank
    spread = spread_over_stages([3.0], ranks, stages, "forward")
    assert len(spread) == stages
    assert sum(spread) == pytest.approx(3.0 * ranks)


def test_another_number_of_values_is_refused():
    """It would be unclear which rank a missing value belongs to."""
    with pytest.raises(SettingError, match="forward has 3 values for 4 ranks"):
        spread_over_stages([1, 2, 3], 4, 4, "forward")
    with pytest.raises(SettingError, match="boundary_bytes has 2 values for 4 ranks"):
        spread_over_boundaries([1, 2], 4, 8, "boundary_bytes")


def test_boundaries_within_a_rank_take_the_value_of_the_next_between_ranks():
    """A profile of parts says nothing about places within a part."""
    assert spread_over_boundaries([5.0], 2, 4, "b") == (5.0, 5.0, 5.0)
    assert spread_over_boundaries([5.0, 7.0], 3, 3, "b") == (5.0, 7.0)
    assert spread_over_boundaries([5.0, 7.0], 3, 6, "b") == (5.0, 5.0, 7.0, 7.0, 7.0)
    assert spread_over_boundaries([5.0, 7.0], 1, 1, "b") == ()

"""Units of axes."""

from __future__ import annotations

import pytest

from penstock.report.scaled import scaled_bytes, scaled_seconds


@pytest.mark.parametrize(
    ("values", "unit"), [([], "bytes"), ([0], "bytes"), ([2048], "KiB"), ([1, 2**31], "GiB")]
)
def test_the_largest_value_chooses_the_unit_of_bytes(values, unit):
    """Labels have few digits."""
    assert scaled_bytes(values)[0] == unit


@pytest.mark.parametrize(("values", "unit"), [([], "ns"), ([2e-6], "us"), ([0.5, 3], "s")])
def test_the_largest_value_chooses_the_unit_of_seconds(values, unit):
    """Labels have few digits."""
    assert scaled_seconds(values)[0] == unit

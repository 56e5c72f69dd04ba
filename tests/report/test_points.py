"""Points of a series."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.report.document import Series
from penstock.report.points import interval_of, point_text, select_extremes


def test_a_point_is_written_with_its_interval():
    """The text appears at the pointer."""
    series = Series("flush", (3.0,), (0.25,), (0.2,), (0.3,))
    assert point_text(series, 0, with_x=True) == "flush: 3, 0.25 (0.2 to 0.3)"
    assert interval_of(Series("a", (1.0,), (2.0,)), 0) is None


@pytest.mark.parametrize("count", [1, 40, 41, 5000])
def test_selected_points_keep_the_extremes_of_every_column(count):
    """A peak that lasts one step of many thousands is still seen."""
    generator = random.Random(0)
    x = [10 * index / count for index in range(count)]
    y = [generator.random() for _ in range(count)]
    selected = select_extremes(np.array(x), np.array(y), 10)
    assert len(selected) <= 40
    assert selected == sorted(set(selected))
    for column in range(10):
        all_values = [value for place, value in zip(x, y, strict=True) if int(place) == column]
        values = [y[index] for index in selected if int(x[index]) == column]
        assert (min(values, default=None), max(values, default=None)) == (
            min(all_values, default=None),
            max(all_values, default=None),
        )
    assert {0, count - 1} <= set(selected)

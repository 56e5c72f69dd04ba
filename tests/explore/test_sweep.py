"""The chart of the bubble over micro-batches."""

from __future__ import annotations

import pytest

from penstock.explore.state import parse_state
from penstock.explore.sweep import HEIGHT, WIDTH, chart, sweep


def test_points_are_bubbles_of_the_schedules():
    """GPipe and 1F1B: (p - 1) / (m + p - 1)."""
    first, second = sweep(parse_state("ranks=4&micro_batches=7&a=gpipe&b=1f1b"))
    assert dict(first.points) == pytest.approx({m: 3 / (m + 3) for m, _ in first.points})
    assert dict(second.points) == pytest.approx(dict(first.points))
    assert {1, 4, 7, 64} <= dict(first.points).keys()


def test_numbers_that_a_schedule_refuses_have_no_points():
    """Chimera takes even multiples; a chart of one curve is still a chart."""
    first, second = sweep(parse_state("ranks=3&a=chimera&b=1f1b"))
    assert first.points == ()
    assert len(chart((first, second)).lines[1][3]) == len(second.points)
    assert chart((first,)) is None


def test_everything_lies_within_the_chart():
    """Also bubbles of more than 80 % and of 0."""
    for query in ("ranks=8&a=naive&b=gems", "ranks=1&a=1f1b"):
        drawing = chart(sweep(parse_state(query)))
        for _, _, _, markers in drawing.lines:
            assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y, _ in markers)
        assert all(0 < y < HEIGHT for y, _ in drawing.y_ticks)

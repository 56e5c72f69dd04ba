"""Units and ticks."""

from __future__ import annotations

from itertools import islice

import pytest

from penstock.draw.scale import Clock, common_unit, format_number
from penstock.event import Event, Timeline
from penstock.schedule.op import Kind, Op


def of(*lengths, kind=Kind.F, source="simulated"):
    """A timeline of one rank whose ops follow each other."""
    events, now = [], 0.0
    for m, length in enumerate(lengths):
        events.append(Event(0, Op(kind, 0, m), now, now + length))
        now += length
    return Timeline.of(events, 1, 1, source=source)


@pytest.mark.parametrize(("lengths", "unit"), [((1, 2, 2), 1.0), ((2, 3), 1.0), ((0.1,) * 40, 0.1), ((4, 6), 2.0),
                                               ((1, 1.2345), None), ((), None), ((0,), None)])  # fmt: skip
def test_the_common_unit_is_the_largest_length_that_all_ops_are_multiples_of(lengths, unit):
    """Only then can cells take whole columns; sums of 0.1 must not fail by their rounding."""
    assert common_unit([of(*lengths)]) == (unit if unit is None else pytest.approx(unit))


def test_plain_units_survive_rounding_and_short_updates():
    """1.3 + 1 - 1.3 is not 1, and an update of 0.1 does not make F = 1 a second."""
    shifted = Timeline(
        (Event(0, Op(Kind.F, 0, 0), 1.3, 2.3), Event(0, Op(Kind.U, 0, 1), 2.3, 2.4)), 1, 1
    )
    assert Clock.of([shifted]).unit == ""


@pytest.mark.parametrize(
    ("length", "unit"), [(3.0, "s"), (0.02, "ms"), (0.00002, "us"), (2e-9, "ns"), (1e-12, "s")]
)
def test_the_axis_has_the_unit_of_the_whole(length, unit):
    """Ticks from 0.000 02 to 0.000 1 s are not read, they are counted."""
    assert Clock.of([of(length, source="measured")]).unit == unit


def test_ticks_are_one_two_and_five_times_powers_of_ten():
    """Steps such as 3.7 are hard to read."""
    assert list(islice(Clock(1e-3, "ms").steps(0.0011), 4)) == pytest.approx(
        [0.002, 0.005, 0.01, 0.02]
    )
    assert list(islice(Clock(1.0, "").steps(0.3), 4)) == [1, 2, 5, 10]


def test_numbers_lose_zeros_after_the_point_only():
    """100 is not 1."""
    assert [format_number(value, 2) for value in (100, 0.5, 1.005, -0.001, 1e6)] == [
        "100",
        "0.5",
        "1",
        "0",
        "1000000",
    ]

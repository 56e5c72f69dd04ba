"""Intervals between checkpoints, as users write them."""

from __future__ import annotations

import pytest

from penstock.checkpoint.interval import Interval, parse_interval
from penstock.errors import SettingError


@pytest.mark.parametrize(
    ("value", "interval"),
    [
        (None, Interval()),
        (500, Interval(steps=500)),
        (" 7 ", Interval(steps=7)),
        (1, Interval(steps=1)),
        ("9" * 18, Interval(steps=10**18 - 1)),
        ("1s", Interval(seconds=1.0)),
        ("10min", Interval(seconds=600.0)),
        ("1.5 h", Interval(seconds=5400.0)),
    ],
)
def test_a_number_is_steps_and_a_quantity_is_a_time(value, interval):
    """`checkpoint_every: 500`, `checkpoint_every: 10min`."""
    assert parse_interval(value) == interval


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        "0",
        "0s",
        "",
        "1.5",
        "often",
        "-3min",
        "1e999h",
        True,
        "²",
        "9" * 19,
        10**18,
        "9" * 5000,
    ],
)
def test_everything_else_is_refused_with_both_forms(value):
    """A time without its unit could be steps."""
    with pytest.raises(
        SettingError, match=r"is no interval between checkpoints: .*'10min'"
    ) as refusal:
        parse_interval(value)
    assert len(str(refusal.value)) < 300


def test_multiples_are_due_wherever_a_run_has_begun():
    """A resumed run saves at the steps at which an uninterrupted one does."""
    interval = parse_interval(10)
    assert [step for step in range(1, 31) if interval.passes(step - 1, step)] == [10, 20, 30]
    assert interval.passes(8, 12)
    assert interval.passes(0, 35)
    assert not interval.passes(10, 19)
    assert not interval.passes(10, 10)
    assert all(parse_interval(1).passes(step, step + 1) for step in range(5))
    assert not parse_interval(None).passes(0, 1000)
    assert not parse_interval("1min").passes(0, 1000)

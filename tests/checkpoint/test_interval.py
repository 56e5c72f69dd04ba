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
        ("10min", Interval(seconds=600.0)),
        ("1.5 h", Interval(seconds=5400.0)),
    ],
)
def test_a_number_is_steps_and_a_quantity_is_a_time(value, interval):
    """`checkpoint_every: 500`, `checkpoint_every: 10min`."""
    assert parse_interval(value) == interval


@pytest.mark.parametrize(
    "value", [0, -1, "0", "0s", "", "1.5", "often", "-3min", "1e999h", True, "²", "9" * 5000]
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
    assert not interval.passes(10, 19)
    assert not parse_interval("1min").passes(0, 1000)

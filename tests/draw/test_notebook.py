"""Schedules and timelines show themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.draw.draw import draw
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


def test_a_schedule_and_a_timeline_show_their_svg():
    """A notebook asks for `_repr_svg_`; the picture is what one wants to see of a schedule."""
    example = schedule("1f1b", stages=3, micro_batches=4)
    assert example._repr_svg_() == draw(example, format="svg")
    timeline = simulate_schedule(example, Costs(forward=0.003))
    assert timeline._repr_svg_() == draw(timeline, format="svg")


def test_a_schedule_that_never_finishes_shows_as_text():
    """It is looked at because it is wrong; an error instead of it would hide it."""
    assert Schedule.parse("0B0 0F0 0U1")._repr_svg_() is None


@pytest.mark.parametrize("way", ["penstock.schedule.op", "penstock"])
def test_drawing_is_imported_with_the_first_picture(way):
    """`import penstock` must be fast, and every schedule must have a picture in a notebook."""
    code = (
        f"import sys, {way}; from penstock.schedule.op import Schedule; example = Schedule.parse('0F0 0B0 0U1'); "
        "assert 'penstock.draw.svg' not in sys.modules; assert example._repr_svg_().startswith('<svg')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr

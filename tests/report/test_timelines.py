"""Timelines of a report."""

from __future__ import annotations

import importlib

from penstock.draw.draw import unit_timeline
from penstock.report.document import TimelineFigure
from penstock.report.timelines import timeline_html, timeline_svg
from penstock.schedule.catalogue import schedule


def figure():
    timelines = (
        unit_timeline(schedule("1f1b", 3, 4)),
        unit_timeline(schedule("gpipe", 3, 4)),
    )
    return TimelineFigure("steps", "Steps", timelines)


def test_the_picture_says_how_the_timelines_differ():
    """A reader of paper cannot measure with a pointer."""
    assert "as long as" in timeline_svg(figure())


def test_ids_of_two_figures_differ():
    """An arrow head of a figure that is hidden would not be drawn in any other."""
    first, second = timeline_html(figure(), "one"), timeline_html(figure(), "two")
    assert 'id="one--on"' in first
    assert 'id="two--on"' in second
    assert 'id="penstock-' not in first + second


def test_too_many_ops_are_a_static_picture(monkeypatch):
    """The data of a million ops would not load."""
    module = importlib.import_module("penstock.report.timelines")
    monkeypatch.setattr(module, "MAX_VIEWER_OPS", 10)
    page = timeline_html(figure(), "one")
    assert "<canvas" not in page
    assert page.count("<svg") == 1

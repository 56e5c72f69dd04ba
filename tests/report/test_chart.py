"""Charts as SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from penstock.report.chart import NARROW, WIDE, chart_svg, description
from penstock.report.document import Chart, Series

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def texts_of(drawing):
    root = ET.fromstring(drawing)
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_chart_is_well_formed_and_within_its_width(charts, width):
    """A label outside of the drawing is cut off."""
    for chart in charts:
        root = ET.fromstring(chart_svg(chart, width))
        height = float(root.get("height"))
        for element in root.iter():
            x, y = element.get("x"), element.get("y")
            if x is not None:
                assert 0 <= float(x) <= width
                assert 0 <= float(y) <= height


def test_hostile_names_are_text(charts):
    """A series may have the name of a model from a file of others."""
    for chart in charts:
        drawing = chart_svg(chart)
        assert "<script" not in drawing
        assert "<img" not in drawing


def test_a_logarithmic_axis_leaves_out_what_is_not_positive(charts):
    """Zero has no logarithm, and the other points are still worth seeing."""
    root = ET.fromstring(chart_svg(charts[2]))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["a: 100, 10", "b: 5, 0.001"]


def test_bars_stand_beside_their_categories(charts):
    """The length of a bar is its value, from 0."""
    root = ET.fromstring(chart_svg(charts[1]))
    widths = [
        float(element.get("width"))
        for element in root.iter("{http://www.w3.org/2000/svg}rect")
        if element.get("class") == "f0"
    ]
    assert widths[1] / widths[0] == pytest.approx(2.0 / 1.5, rel=0.01)
    assert "b" in texts_of(chart_svg(charts[1]))


def test_a_line_goes_through_its_points():
    """Equal distances in values are equal distances in the drawing."""
    chart = Chart("c", "c", "x", "y", (Series("", (0.0, 1.0, 2.0), (0.0, 10.0, 20.0)),))
    path = re.search(r'class="line c0" d="(.*?)"', chart_svg(chart))[1]
    x1, y1, x2, y2, x3, y3 = map(float, NUMBER.findall(path))
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.2)
    assert y3 < y1


def test_the_last_tick_of_an_axis_has_its_label():
    """At the right edge there is no room for the second half of a label that is centred."""
    series = Series("", (100.0, 1000.0), (1.0, 2.0))
    texts = texts_of(chart_svg(Chart("c", "c", "x", "y", (series,), log_x=True)))
    assert {"100", "200", "500", "1,000"} <= set(texts)


def test_a_long_line_stays_small():
    """A run of 100,000 steps has 100,000 losses; the file must not."""
    x = tuple(map(float, range(100_000)))
    y = tuple(1.0 if index == 77_777 else 0.0 for index in range(100_000))
    drawing = chart_svg(Chart("c", "c", "x", "y", (Series("", x, y),)))
    assert len(drawing) < 80_000


@pytest.mark.parametrize("kind", ["line", "bar", "scatter"])
@pytest.mark.parametrize("values", [(), (float("nan"),)])
def test_a_chart_without_values_is_drawn(kind, values):
    """All cases of a study may have failed."""
    series = Series("a", tuple(map(float, range(len(values)))), values)
    drawing = chart_svg(Chart("c", "c", "x", "y", (series,), kind=kind, categories=("a",)))
    assert ET.fromstring(drawing) is not None


def test_more_series_than_colours_have_other_markers():
    """Two series must not look alike."""
    series = tuple(Series(str(index), (1.0,), (float(index + 1),)) for index in range(12))
    drawing = chart_svg(Chart("c", "c", "x", "y", series, kind="scatter"))
    signs = re.findall(r'<path class="(f\d)" transform="[^"]*" d="([^"]*)"><title>', drawing)
    assert len(set(signs)) == 12


def test_the_description_has_the_range_of_every_series(charts):
    """It is what a screen reader reads."""
    text = description(charts[2])
    assert text.startswith("Candidates: step by memory. a: 2 values from 0 to 10, the last 10.")
    assert "b: 0.001." in text

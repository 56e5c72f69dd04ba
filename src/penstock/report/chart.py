"""Charts of a report as SVG: lines, points and bars, with intervals and logarithmic axes.

The SVG holds no script, no font and no external address, and has plain CSS classes, as the drawings
of timelines. Bars are horizontal, so that texts of any length stand beside them also on a phone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

import numpy as np

from penstock.draw.facts import clean
from penstock.draw.text_size import text_width
from penstock.report.axis import Axis, on_scale, tick_text
from penstock.report.bars import draw_bars
from penstock.report.chart_style import fill_class, line_attributes, line_class, marker
from penstock.report.document import Chart, Series
from penstock.report.plot_area import SMALL, Plot, coordinate
from penstock.report.points import interval_of, point_text, select_extremes
from penstock.schedule.arrays import Array

#: Widths of a chart in points: on a desk, and on a phone.
WIDE, NARROW = 720.0, 340.0
#: Lines with more points have no markers.
_MAX_MARKERS = 30
_MARKER_RADIUS = 3.6
#: Height of the plot as a share of its width, and its limits in points.
_HEIGHT_SHARE, _MIN_HEIGHT, _MAX_HEIGHT = 0.42, 200.0, 320.0
#: Height of a label of the vertical axis with the space around it.
_ROW = 34.0


def chart_svg(chart: Chart, width: float = WIDE) -> str:
    """Return a chart as SVG.

    Values that are not finite, and on a logarithmic axis those that are not positive, are left
    out. A line with many more points than the chart is wide shows the lowest and highest of the
    points that share a column.

    Args:
        chart: what to draw.
        width: of the drawing in points.
    """
    plot = Plot(width)
    if len(chart.series) > 1:
        plot.legend([series.name for series in chart.series], chart.kind)
    if chart.kind == "bar":
        draw_bars(plot, chart)
    else:
        _draw_series(plot, chart)
    return plot.document(escape(description(chart)))


def description(chart: Chart) -> str:
    """Return what a chart shows, as text for those who cannot see it."""
    parts = [f"{clean(chart.title)}: {clean(chart.y_label)} by {clean(chart.x_label)}."]
    for series in chart.series:
        numbers = np.asarray(series.y, float)
        values = numbers[on_scale(numbers, log=False)]
        name = clean(series.name) or clean(chart.y_label)
        if not len(values):
            parts.append(f"{name}: no values.")
        elif len(values) == 1:
            parts.append(f"{name}: {values[0]:.4g}.")
        else:
            parts.append(
                f"{name}: {len(values)} values from {values.min():.4g} to {values.max():.4g}, "
                f"the last {values[-1]:.4g}."
            )
    return " ".join(parts)


@dataclass(frozen=True)
class _Scales:
    """The two axes of a chart and their place in the drawing."""

    plot: Plot
    x_axis: Axis
    y_axis: Axis
    top: float
    bottom: float

    def x(self, values: Array) -> Array:
        """Return the horizontal positions of values."""
        return self.plot.left + (self.plot.right - self.plot.left) * self.x_axis.shares(values)

    def y(self, values: Array) -> Array:
        """Return the vertical positions of values."""
        return self.bottom - (self.bottom - self.top) * self.y_axis.shares(values)

    def points(self, series: Series) -> _Points:
        """Return the points of a series that are on both scales."""
        x, y = np.asarray(series.x, float), np.asarray(series.y, float)
        mask = on_scale(x, self.x_axis.log) & on_scale(y, self.y_axis.log)
        return _Points(np.flatnonzero(mask), self.x(x[mask]), self.y(y[mask]))

    def interval(self, series: Series, point: int) -> tuple[float, float] | None:
        """Return the vertical positions of a point's interval, if it has one on the scale."""
        interval = interval_of(series, point)
        if interval is None:
            return None
        limits = np.array(interval)
        if not on_scale(limits, self.y_axis.log).all():
            return None
        low, high = self.y(limits).tolist()
        return low, high


@dataclass(frozen=True)
class _Points:
    """Points of a series, by their index in it and their position in the drawing."""

    index: Array
    x: Array
    y: Array


def _draw_series(plot: Plot, chart: Chart) -> None:
    """Draw lines or points with both axes."""
    plot.caption(chart.y_label)
    height = min(max(_HEIGHT_SHARE * plot.width, _MIN_HEIGHT), _MAX_HEIGHT)
    top, bottom = plot.y, plot.y + height
    y_values = _all_values(chart, ("y", "low", "high"))
    y_axis = Axis.of(y_values, chart.log_y, int(height / _ROW), from_zero=False)
    plot.vertical_axis(y_axis, top, bottom)
    x_axis = _x_axis(plot, chart)
    plot.horizontal_axis(x_axis, bottom, chart.x_label, grid_top=bottom)
    scales = _Scales(plot, x_axis, y_axis, top, bottom)
    for index, series in enumerate(chart.series):
        if chart.kind == "line":
            _draw_line(scales, series, index)
        else:
            _draw_scatter(scales, series, index)


def _all_values(chart: Chart, names: Iterable[str]) -> list[float]:
    """Return the values of some fields of all series."""
    values: list[float] = []
    for series in chart.series:
        for name in names:
            values += getattr(series, name)
    return values


def _x_axis(plot: Plot, chart: Chart) -> Axis:
    """Return the horizontal axis with as many ticks as have room for their labels."""
    values = _all_values(chart, ("x",))
    length = plot.right - plot.left
    # A first axis, to know how wide the labels of these values are.
    axis = Axis.of(values, chart.log_x, 6, from_zero=False)
    widest = max(text_width(tick_text(value, axis), SMALL) for value in axis.ticks)
    return Axis.of(values, chart.log_x, plot.tick_count(length, widest), from_zero=False)


def _draw_line(scales: _Scales, series: Series, index: int) -> None:
    """Draw a line with a band for its intervals, and markers if its points are few."""
    points = scales.points(series)
    selected = select_extremes(points.x, points.y, int(scales.plot.width))
    _draw_band(scales, series, index, points, selected)
    x, y = points.x.tolist(), points.y.tolist()
    steps = [f"{coordinate(x[place])} {coordinate(y[place])}" for place in selected]
    if len(steps) > 1:
        scales.plot.parts.append(f'<path {line_attributes(index)} d="M{"L".join(steps)}"/>')
    if len(x) <= _MAX_MARKERS:
        _draw_markers(scales, series, index, points)


def _draw_band(
    scales: _Scales, series: Series, index: int, points: _Points, selected: list[int]
) -> None:
    """Draw the intervals of the selected points of a line as an area."""
    upper, lower = [], []
    for place in selected:
        interval = scales.interval(series, int(points.index[place]))
        if interval is None:
            continue
        x = coordinate(points.x[place])
        lower.append(f"{x} {coordinate(interval[0])}")
        upper.append(f"{x} {coordinate(interval[1])}")
    if len(upper) > 1:
        outline = "L".join([*upper, *reversed(lower)])
        scales.plot.parts.append(f'<path class="band {fill_class(index)}" d="M{outline}Z"/>')


def _draw_scatter(scales: _Scales, series: Series, index: int) -> None:
    """Draw points with their intervals as whiskers."""
    points = scales.points(series)
    for place, point in enumerate(points.index.tolist()):
        interval = scales.interval(series, point)
        if interval is None:
            continue
        x = coordinate(points.x[place])
        low, high = map(coordinate, interval)
        scales.plot.parts.append(
            f'<path class="whisker {line_class(index)}" '
            f'd="M{x} {low}V{high}M{x} {low}m-3 0h6M{x} {high}m-3 0h6"/>'
        )
    _draw_markers(scales, series, index, points)


def _draw_markers(scales: _Scales, series: Series, index: int, points: _Points) -> None:
    """Draw the markers of some points, with their values for the pointer."""
    positions = zip(points.index.tolist(), points.x.tolist(), points.y.tolist(), strict=True)
    for point, x, y in positions:
        title = escape(point_text(series, point, with_x=True))
        scales.plot.parts.append(marker(index, coordinate(x), coordinate(y), _MARKER_RADIUS, title))

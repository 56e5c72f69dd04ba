"""Bar charts: horizontal bars, grouped by category."""

from __future__ import annotations

from html import escape

from penstock.draw.facts import clean
from penstock.draw.text_size import text_width, wrap_text
from penstock.report.axis import Axis, is_on_scale
from penstock.report.chart_style import fill_class
from penstock.report.document import Chart, Series
from penstock.report.plot_area import SMALL, Plot, coordinate
from penstock.report.points import interval_of, point_text

_BAR, _CATEGORY_GAP = 14.0, 12.0
#: Most of the width that the names of categories take.
_MAX_NAME_SHARE = 0.36
_MAX_NAME_LINES = 3


def draw_bars(plot: Plot, chart: Chart) -> None:
    """Draw the bars of a chart, one group per category, from top to bottom."""
    names = [clean(name) for name in chart.categories] or [""]
    widest = max(text_width(name, SMALL) for name in names)
    name_width = min(widest, _MAX_NAME_SHARE * plot.width)
    plot.left += name_width + 8
    if chart.x_label:
        plot.caption(chart.x_label)
    values = []
    for series in chart.series:
        values += [*series.y, *series.low, *series.high]
    length = plot.right - plot.left
    count = plot.tick_count(length, text_width("0,000", SMALL))
    axis = Axis.of(values, chart.log_y, count, from_zero=True)
    top = plot.y
    for number, name in enumerate(names):
        _draw_group(plot, chart, number, _name_lines(name, name_width), axis)
    plot.horizontal_axis(axis, plot.y + 2, chart.y_label, grid_top=top)


def _name_lines(name: str, width: float) -> list[str]:
    """Return the name of a category in at most three lines."""
    lines = wrap_text(name, SMALL, width + 1)
    if len(lines) > _MAX_NAME_LINES:
        lines = [*lines[: _MAX_NAME_LINES - 1], f"{lines[_MAX_NAME_LINES - 1][:-1]}…"]
    return lines


def _draw_group(plot: Plot, chart: Chart, number: int, lines: list[str], axis: Axis) -> None:
    """Draw the name and the bars of category `number`."""
    bars_height = _BAR * len(chart.series)
    height = max(bars_height, (SMALL + 2) * len(lines))
    first_line = plot.y + (height - (SMALL + 2) * len(lines)) / 2 + SMALL
    for index, line in enumerate(lines):
        plot.text(plot.left - 8, first_line + (SMALL + 2) * index, line, "end")
    top = plot.y + (height - bars_height) / 2
    for index, series in enumerate(chart.series):
        _draw_bar(plot, series, index, number, top + index * _BAR, axis)
    plot.y += height + _CATEGORY_GAP


def _draw_bar(plot: Plot, series: Series, index: int, number: int, top: float, axis: Axis) -> None:
    """Draw the bar of one series in category `number`, with its interval."""
    length = plot.right - plot.left
    # A logarithmic axis has no zero: its bars begin at the left end.
    zero = plot.left + length * (0.0 if axis.log else axis.share(0.0))
    for point, position in enumerate(series.x):
        value = series.y[point]
        if round(position) != number or not is_on_scale(value, axis.log):
            continue
        end = plot.left + length * axis.share(value)
        title = escape(point_text(series, point, with_x=False))
        plot.parts.append(
            f'<rect class="{fill_class(index)}" x="{coordinate(min(zero, end))}" '
            f'y="{coordinate(top + 1)}" width="{coordinate(abs(end - zero))}" '
            f'height="{coordinate(_BAR - 2)}"><title>{title}</title></rect>'
        )
        interval = interval_of(series, point)
        if interval is None or not all(is_on_scale(limit, axis.log) for limit in interval):
            continue
        low, high = (plot.left + length * axis.share(limit) for limit in interval)
        middle = top + _BAR / 2
        plot.parts.append(
            f'<path class="axis" d="M{coordinate(low)} {coordinate(middle)}H{coordinate(high)}'
            f"M{coordinate(low)} {coordinate(middle - 3)}v6"
            f'M{coordinate(high)} {coordinate(middle - 3)}v6"/>'
        )

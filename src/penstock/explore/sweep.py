"""Bubble ratio of the page's schedules over the number of micro-batches, as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.errors import PenstockError
from penstock.explore.choices import choice
from penstock.explore.evaluate import result_of
from penstock.explore.state import MAX_MICRO_BATCHES, Choice, State

#: Stages x micro-batches of one point at most: a point takes some milliseconds.
_MAX_FORWARDS: Final = 4_096
#: Numbers of micro-batches in multiples of the number of ranks, so that schedules that need such
#: multiples have points.
_MULTIPLES: Final = (1, 2, 3, 4, 6, 8, 12, 16)

# The chart, in points: its size, and the plot within.
WIDTH, HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 40


@dataclass(frozen=True)
class Curve:
    """The bubble ratio of a schedule.

    Attributes:
        panel: "a" or "b".
        name: of the schedule.
        points: (micro-batches, bubble ratio), where the schedule supports the number.
    """

    panel: str
    name: str
    points: tuple[tuple[int, float], ...]


def sweep(state: State) -> tuple[Curve, ...]:
    """Return the bubble ratio of both schedules over the number of micro-batches.

    Schedules that are searched for have no points: every point would be a search.
    """
    multiples = {state.ranks * multiple for multiple in _MULTIPLES}
    numbers = sorted({*multiples, state.micro_batches, 1})
    curves = []
    for panel, selected in (("a", state.a), ("b", state.b)):
        if selected is not None:
            curves.append(Curve(panel, selected.schedule, _points(state, selected, numbers)))
    return tuple(curves)


def _points(
    state: State, selected: Choice, numbers: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Return the points of a curve."""
    points: list[tuple[int, float]] = []
    if choice(selected.schedule).defaults:
        return ()
    for number in numbers:
        if number > MAX_MICRO_BATCHES or number * state.ranks > _MAX_FORWARDS:
            continue
        try:
            result = result_of(replace(state, micro_batches=number), selected)
        except PenstockError:
            continue
        points.append((number, result.timeline.bubble_ratio))
    return tuple(points)


@dataclass(frozen=True)
class Chart:
    """Positions of everything in the chart, in points.

    Attributes:
        lines: per curve: its panel, its name, the points of a polyline, and its markers.
        x_ticks, y_ticks: position and text.
        left, right, top, bottom: edges of the plot.
    """

    lines: tuple[tuple[str, str, str, tuple[tuple[float, float, str], ...]], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def chart(curves: Sequence[Curve]) -> Chart | None:
    """Return the chart of curves, or None if they have no points."""
    numbers = sorted({number for curve in curves for number, _ in curve.points})
    if not numbers:
        return None
    largest = max(ratio for curve in curves for _, ratio in curve.points)
    top_percent = max(10, 10 * -(-int(100 * largest + 1) // 10))

    def x(number: int) -> float:
        """Return the horizontal position of a number of micro-batches."""
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * number / numbers[-1], 1)

    def y(ratio: float) -> float:
        """Return the vertical position of a bubble ratio."""
        height = HEIGHT - _BOTTOM - _TOP
        return round(HEIGHT - _BOTTOM - height * 100 * ratio / top_percent, 1)

    lines = []
    for curve in curves:
        markers = tuple(
            (x(number), y(ratio), f"{curve.name}, {number} micro-batches: {100 * ratio:.1f} %")
            for number, ratio in curve.points
        )
        path = " ".join(f"{left},{top}" for left, top, _ in markers)
        lines.append((curve.panel, curve.name, path, markers))
    x_ticks: list[tuple[float, str]] = []
    for number in numbers:
        # Numbers closer than this would overlap.
        if not x_ticks or x(number) - x_ticks[-1][0] >= 28:
            x_ticks.append((x(number), str(number)))
    step = 10 if top_percent <= 50 else 20
    y_ticks = tuple((y(value / 100), f"{value} %") for value in range(0, top_percent + 1, step))
    return Chart(tuple(lines), tuple(x_ticks), y_ticks)

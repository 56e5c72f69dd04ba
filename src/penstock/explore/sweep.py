"""Bubble ratio of the page's schedules over the number of micro-batches, as a chart."""

from __future__ import annotations

import math
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
#: The least distance of the ticks of the x axis: texts that are closer overlap.
_TICK_DISTANCE = 28


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
    largest_ratio = max(ratio for curve in curves for _, ratio in curve.points)
    scale = _Scale(numbers[-1], _top_percent(largest_ratio))
    lines = []
    for curve in curves:
        markers = []
        for number, ratio in curve.points:
            text = f"{curve.name}, {number} micro-batches: {100 * ratio:.1f} %"
            markers.append((scale.x(number), scale.y(ratio), text))
        path = " ".join(f"{x},{y}" for x, y, _ in markers)
        lines.append((curve.panel, curve.name, path, tuple(markers)))
    return Chart(tuple(lines), scale.x_ticks(numbers), scale.y_ticks())


@dataclass(frozen=True)
class _Scale:
    """The axes of the chart, which begin at 0.

    Attributes:
        last_number: the number of micro-batches at the right edge.
        top_percent: the bubble ratio at the upper edge, in percent.
    """

    last_number: int
    top_percent: int

    def x(self, number: int) -> float:
        """Return the horizontal position of a number of micro-batches."""
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * number / self.last_number, 1)

    def y(self, ratio: float) -> float:
        """Return the vertical position of a bubble ratio."""
        height = HEIGHT - _BOTTOM - _TOP
        return round(HEIGHT - _BOTTOM - height * 100 * ratio / self.top_percent, 1)

    def x_ticks(self, numbers: Sequence[int]) -> tuple[tuple[float, str], ...]:
        """Return the ticks at these numbers, without those whose texts would overlap."""
        ticks: list[tuple[float, str]] = []
        for number in numbers:
            x = self.x(number)
            if not ticks or x - ticks[-1][0] >= _TICK_DISTANCE:
                ticks.append((x, str(number)))
        return tuple(ticks)

    def y_ticks(self) -> tuple[tuple[float, str], ...]:
        """Return a tick every 10 %, or every 20 % on a long axis."""
        step = 10 if self.top_percent <= 50 else 20
        percents = range(0, self.top_percent + 1, step)
        return tuple((self.y(percent / 100), f"{percent} %") for percent in percents)


def _top_percent(largest_ratio: float) -> int:
    """Return the bubble ratio at the upper edge of the chart: the next multiple of 10 %."""
    percent = int(100 * largest_ratio + 1)
    return max(10, 10 * math.ceil(percent / 10))

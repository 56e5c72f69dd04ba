"""Points of a series: their intervals and texts, and a selection of them for a small picture."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.draw.facts import clean
from penstock.report.document import Series
from penstock.schedule.arrays import Array, runs


def interval_of(series: Series, point: int) -> tuple[float, float] | None:
    """Return the interval of a point, if the series has intervals."""
    if not series.low or not series.high:
        return None
    return series.low[point], series.high[point]


def point_text(series: Series, point: int, *, with_x: bool) -> str:
    """Return the values of a point as text: `flush: 3, 0.25 (0.2 to 0.3)`."""
    values = f"{series.y[point]:.4g}"
    if with_x:
        values = f"{series.x[point]:.4g}, {values}"
    interval = interval_of(series, point)
    if interval is not None:
        values += f" ({interval[0]:.4g} to {interval[1]:.4g})"
    name = clean(series.name)
    return f"{name}: {values}" if name else values


def select_extremes(x: Array, y: Array, columns: int) -> list[int]:
    """Return the indices of points that draw the same line as all points.

    Of the points within a column only the first, the lowest, the highest and the last are
    selected, so that no peak is lost.

    Args:
        x, y: the points in pixels, in order of x.
        columns: width of the picture. With at most four times as many points, all are selected.
    """
    if len(x) <= 4 * columns:
        return list(range(len(x)))
    starts = runs(np.floor(x).astype(np.int64))
    selected: set[int] = set()
    for start, end in pairwise([*starts.tolist(), len(x)]):
        lowest = start + int(np.argmin(y[start:end]))
        highest = start + int(np.argmax(y[start:end]))
        selected |= {start, lowest, highest, end - 1}
    return sorted(selected)

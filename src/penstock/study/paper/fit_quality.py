"""How good the fit of the simulation is, by distinct points.

At every number of micro-batches and devices the paper has four cells of the two libraries in one
process by two balances, which differ by a few percent and are one number in the simulation. They
are counted as one point, with the spread of the four.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.study.paper.published import PublishedCell, published_cells
from penstock.study.paper.simulated import is_fitted, simulated_seconds

#: A prediction within this share of the published time counts as close.
CLOSE = 0.10


@dataclass(frozen=True)
class Point:
    """One number of micro-batches and devices in one process.

    Attributes:
        micro_batches, gpus: of the point.
        published_s: geometric mean of its cells.
        spread: largest over smallest of its cells, less 1.
        simulated_s: of all its cells.
        fitted: whether a constant is fitted to one of its cells.
    """

    micro_batches: int
    gpus: int
    published_s: float
    spread: float
    simulated_s: float
    fitted: bool

    @property
    def error(self) -> float:
        """The larger of simulated and published over the other, less 1."""
        ratio = self.simulated_s / self.published_s
        return max(ratio, 1 / ratio) - 1


def distinct_points() -> list[Point]:
    """Return the points of torchgpipe and FairScale, sorted by micro-batches and devices."""
    cells_of_point: dict[tuple[int, int], list[PublishedCell]] = {}
    for cell in published_cells():
        if cell.library != "deepspeed":
            cells_of_point.setdefault(cell.point, []).append(cell)
    points = []
    for (micro_batches, gpus), cells in sorted(cells_of_point.items()):
        seconds = [cell.seconds for cell in cells]
        points.append(
            Point(
                micro_batches,
                gpus,
                statistics.geometric_mean(seconds),
                max(seconds) / min(seconds) - 1,
                simulated_seconds(cells[0]),
                any(is_fitted(cell) for cell in cells),
            )
        )
    return points


def r_squared(published: Sequence[float], simulated: Sequence[float]) -> float | None:
    """Return the share of the variance of the logarithms that a simulation explains; negative if
    the mean explains more; None without variance.
    """
    logarithms = [math.log(value) for value in published]
    mean = statistics.fmean(logarithms)
    total = sum((value - mean) ** 2 for value in logarithms)
    if not total:
        return None
    residual = sum(
        (value - math.log(prediction)) ** 2
        for value, prediction in zip(logarithms, simulated, strict=True)
    )
    return 1 - residual / total


def r_squared_within(points: Sequence[Point], micro_batches: int | None = None) -> float | None:
    """Return R² of the points with a number of micro-batches, or of all."""
    chosen = [point for point in points if micro_batches in (None, point.micro_batches)]
    return r_squared(
        [point.published_s for point in chosen], [point.simulated_s for point in chosen]
    )

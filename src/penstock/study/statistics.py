"""Statistics of few runs: spread over seeds, smoothed losses, and the probability that a difference
is due to chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Approximate number of points of a smoothed curve.
POINTS = 48


@dataclass(frozen=True)
class Spread:
    """A value per seed, and their mean and range."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return statistics.fmean(self.values)

    @property
    def low(self) -> float:
        """Smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Largest value."""
        return max(self.values)

    @property
    def width(self) -> float:
        """Difference of the largest and the smallest value."""
        return self.high - self.low


def is_separated(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether all values of `first` are below all of `second`, or all above.

    >>> is_separated([1.0, 2.0], [3.0, 4.0]), is_separated([1.0, 3.0], [2.0, 4.0])
    (True, False)
    """
    return max(first) < min(second) or min(first) > max(second)


def separation_probability(first: int, second: int) -> float:
    """Return the probability that all of `first` values are below all of `second` values that are
    drawn from the same distribution: 1 / binomial(first + second, first).

    >>> separation_probability(3, 3)
    0.05
    """
    return 1 / math.comb(first + second, first)


def window_length(batches: int) -> int:
    """Return the number of batches that one point of a smoothed curve averages."""
    return max(1, round(batches / POINTS))


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Average losses over consecutive windows; an incomplete last window is dropped.

    >>> smooth([4.0, 2.0, 1.0, 1.0, 9.0], 2)
    [3.0, 1.0]
    """
    return [
        statistics.fmean(losses[start : start + window])
        for start in range(0, len(losses) - window + 1, window)
    ]


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean loss of the last tenth of the batches."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def batches_to_loss(losses: Sequence[float], target: float, window: int) -> int | None:
    """Return after how many batches the mean of the last `window` losses is at most `target`; None
    if it never is.

    >>> batches_to_loss([4.0, 2.0, 1.0, 1.0], 1.5, 2)
    3
    """
    total = 0.0
    for index, loss in enumerate(losses):
        total += loss - (losses[index - window] if index >= window else 0.0)
        if index + 1 >= window and total / window <= target:
            return index + 1
    return None

"""Few numbers, shown whole: spreads over seeds, smoothed losses, and what difference could be
chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: A curve has about so many points.
POINTS = 48


@dataclass(frozen=True)
class Spread:
    """A number for each seed: all of them, since there are few."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return statistics.fmean(self.values)

    @property
    def low(self) -> float:
        """The least."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The most."""
        return max(self.values)

    @property
    def width(self) -> float:
        """How far the least and the most are apart."""
        return self.high - self.low


def apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether all of `one` are below all of `other`, or all above.

    >>> apart([1.0, 2.0], [3.0, 4.0]), apart([1.0, 3.0], [2.0, 4.0])
    (True, False)
    """
    return max(one) < min(other) or min(one) > max(other)


def chance(one: int, other: int) -> float:
    """How likely all of `one` numbers are below all of `other` if they are drawn alike: 1 in (one +
    other) over one.

    >>> chance(3, 3)
    0.05
    """
    return 1 / math.comb(one + other, one)


def window_of(batches: int) -> int:
    """How many batches a point of a curve stands for."""
    return max(1, round(batches / POINTS))


def curve(losses: Sequence[float], window: int) -> list[float]:
    """Means over `window` batches after another; what does not fill one at the end is left out.

    >>> curve([4.0, 2.0, 1.0, 1.0, 9.0], 2)
    [3.0, 1.0]
    """
    return [
        statistics.fmean(losses[start : start + window])
        for start in range(0, len(losses) - window + 1, window)
    ]


def ends_at(losses: Sequence[float]) -> float:
    """The mean loss of the last tenth of the batches."""
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def reaches(losses: Sequence[float], target: float, window: int) -> int | None:
    """After how many batches the mean over the last `window` is at `target` or below; None if it
    never is.

    >>> reaches([4.0, 2.0, 1.0, 1.0], 1.5, 2)
    3
    """
    total = 0.0
    for index, loss in enumerate(losses):
        total += loss - (losses[index - window] if index >= window else 0.0)
        if index + 1 >= window and total / window <= target:
            return index + 1
    return None

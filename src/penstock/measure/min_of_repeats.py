"""Reduce repeated times to one. Noise from other programs only ever adds to a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def undisturbed_seconds(seconds: Sequence[float]) -> float:
    """Return the lowest decile of repeated times: that of a run without interference.

    Other programs only ever add to a time. On a busy host most short messages wait for another
    process's time slice: of 20 that take 0.1 ms each, 15 were observed to take 2 ms, so that median
    and quartile describe the other processes and not the link.

    >>> undisturbed_seconds([3.0, 1.0, 2.0, 9.0, 8.0])
    1.0
    """
    return sorted(seconds)[len(seconds) // 10]


def non_decreasing(seconds: Sequence[float]) -> list[float]:
    """Lower times so that none exceeds that of a longer message.

    Times are in the order of rising sizes; a message takes at most as long as a longer one.

    >>> non_decreasing([2.0, 0.1, 3.0, 0.5])
    [0.1, 0.1, 0.5, 0.5]
    """
    return list(accumulate(reversed(seconds), min))[::-1]

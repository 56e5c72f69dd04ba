"""One time out of many: noise only ever adds to a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def quiet(seconds: Sequence[float]) -> float:
    """The time below which a tenth of the others is: what something takes when nothing else gets in
    between.

    Other programs only ever add to a time. On a busy host most short messages wait for somebody's
    time slice: of 20 that take 0.1 ms each, 15 were seen to take 2 ms, so that median and quartile
    tell of the others and not of the link.

    >>> quiet([3.0, 1.0, 2.0, 9.0, 8.0])
    1.0
    """
    return sorted(seconds)[len(seconds) // 10]


def rising(seconds: Sequence[float]) -> list[float]:
    """Times of messages from the shortest to the longest, none above a longer one's: what the
    longer one took, it took at most.

    >>> rising([2.0, 0.1, 3.0, 0.5])
    [0.1, 0.1, 0.5, 0.5]
    """
    return list(accumulate(reversed(seconds), min))[::-1]

"""One time out of many."""

from __future__ import annotations

from collections.abc import Sequence


def quiet(seconds: Sequence[float]) -> float:
    """The time below which a tenth of the others is: what something takes when nothing else gets in between.

    Other programs only ever add to a time. On a busy host most short messages wait for somebody's time slice: of 20 that take
    0.1 ms each, 15 were seen to take 2 ms, so that median and quartile tell of the others and not of the link.

    >>> quiet([3.0, 1.0, 2.0, 9.0, 8.0])
    1.0
    """
    return sorted(seconds)[len(seconds) // 10]

"""One time out of many."""

from __future__ import annotations

from collections.abc import Sequence


def quiet(seconds: Sequence[float]) -> float:
    """The lower quartile: what something takes when little else gets in between.

    Other programs only ever add to a time, so that a median moves with them; the least of all may be one lucky time.

    >>> quiet([3.0, 1.0, 2.0, 9.0, 8.0])
    2.0
    """
    return sorted(seconds)[len(seconds) // 4]

"""Units for the axes of charts."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def scaled_bytes(values: Sequence[float]) -> tuple[str, float]:
    """Return the unit for an axis with these bytes, and its size in bytes.

    >>> scaled_bytes([2 * 2**20, 2**12])
    ('MiB', 1048576.0)
    """
    return _unit(values, _BYTES)


def scaled_seconds(values: Sequence[float]) -> tuple[str, float]:
    """Return the unit for an axis with these seconds, and its length in seconds.

    >>> scaled_seconds([0.012, 0.5])
    ('ms', 0.001)
    """
    return _unit(values, _SECONDS)


def _unit(values: Sequence[float], units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the largest unit that is not above the largest value."""
    largest = max(values, default=0.0)
    return next((unit for unit in units if largest >= unit[1]), units[-1])

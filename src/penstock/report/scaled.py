"""Units for the axes of charts."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.units import BYTE_UNITS, TIME_UNITS


def scaled_bytes(values: Sequence[float]) -> tuple[str, float]:
    """Return the unit for an axis with these bytes, and its size in bytes.

    >>> scaled_bytes([2 * 2**20, 2**12])
    ('MiB', 1048576.0)
    """
    return _unit(values, [*BYTE_UNITS, ("bytes", 1.0)])


def scaled_seconds(values: Sequence[float]) -> tuple[str, float]:
    """Return the unit for an axis with these seconds, and its length in seconds.

    >>> scaled_seconds([0.012, 0.5])
    ('ms', 0.001)
    """
    return _unit(values, TIME_UNITS)


def _unit(values: Sequence[float], units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the largest unit that is not above the largest value."""
    largest = max(values, default=0.0)
    name, size = next((unit for unit in units if largest >= unit[1]), units[-1])
    return name, float(size)

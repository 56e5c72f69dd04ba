"""Axes of charts: linear or logarithmic scales and their ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.draw.scale import format_number
from penstock.schedule.arrays import Array

#: Ticks are 1, 2 or 5 times a power of ten apart.
_STEPS = (1.0, 2.0, 5.0, 10.0)
#: Share of the range that stays free on each side of the points.
_PADDING = 0.05
#: A linear axis begins at 0 if the smallest value is below this share of the largest.
_ZERO_SHARE = 0.4
#: Sizes beyond these have no place on an axis: their differences and logarithms would not be finite.
_MIN_SIZE, _MAX_SIZE = 1e-300, 1e300
#: A range below this share of the values cannot be divided by ticks with so few digits.
_SMALLEST_RANGE = 1e-9
#: Larger and smaller numbers are written with an exponent.
_MAX_PLAIN, _MIN_PLAIN = 1e6, 1e-4


@dataclass(frozen=True)
class Axis:
    """A scale from values to a length.

    Attributes:
        low, high: values at the two ends.
        log: whether the scale is logarithmic.
        ticks: values with a tick, in ascending order.
    """

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], log: bool, tick_count: int, from_zero: bool) -> Axis:
        """Return an axis that shows all values.

        Args:
            values: to be shown; those that are not finite, and on a logarithmic axis those that
                are not positive, are ignored.
            log: whether the scale is logarithmic.
            tick_count: most ticks.
            from_zero: whether 0 has to be on a linear axis, as for bars.
        """
        numbers = np.asarray(values, float)
        drawable = numbers[on_scale(numbers, log)]
        if not len(drawable):
            return cls(1.0, 10.0, True, (1.0, 10.0)) if log else cls(0.0, 1.0, False, (0.0, 1.0))
        low, high = float(drawable.min()), float(drawable.max())
        if log:
            return _log_axis(low, high, tick_count)
        return _linear_axis(low, high, tick_count, from_zero)

    def share(self, value: float) -> float:
        """Return the position of a value between the ends, from 0 to 1."""
        return float(self.shares(np.array([value]))[0])

    def shares(self, values: Array) -> Array:
        """Return the positions of several values."""
        if not self.log:
            return (values - self.low) / (self.high - self.low)
        # Differences of logarithms: the quotient of extreme values would not be finite.
        span = math.log(self.high) - math.log(self.low)
        return (np.log(values) - math.log(self.low)) / span


def on_scale(values: Array, log: bool) -> Array:
    """Return a mask of the values that can be shown."""
    mask: Array = np.abs(values) < _MAX_SIZE
    return mask & (values > _MIN_SIZE) if log else mask


def is_on_scale(value: float, log: bool) -> bool:
    """Return whether a value can be shown."""
    return bool(on_scale(np.array([value]), log)[0])


def _linear_axis(low: float, high: float, tick_count: int, from_zero: bool) -> Axis:
    """Return a linear axis with a free margin, except at 0."""
    if from_zero or 0 < low < _ZERO_SHARE * high:
        low = min(low, 0.0)
    if from_zero:
        high = max(high, 0.0)
    size = max(abs(low), abs(high))
    if high - low <= max(_SMALLEST_RANGE * size, _MIN_SIZE):
        # Equal values, up to rounding: the axis shows the surroundings of their value.
        low, high = (low - size / 2, high + size / 2) if size > _MIN_SIZE else (0.0, 1.0)
        return Axis(low, high, False, _linear_ticks(low, high, tick_count))
    margin = _PADDING * (high - low)
    low -= 0.0 if low == 0 else margin
    high += 0.0 if high == 0 else margin
    return Axis(low, high, False, _linear_ticks(low, high, tick_count))


def _linear_ticks(low: float, high: float, tick_count: int) -> tuple[float, ...]:
    """Return round values between two ends."""
    distance = (high - low) / max(tick_count, 1)
    power = 10.0 ** math.floor(math.log10(distance))
    step = power * next((step for step in _STEPS if step * power >= distance), _STEPS[-1])
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def _log_axis(low: float, high: float, tick_count: int) -> Axis:
    """Return a logarithmic axis whose ends are 1, 2 or 5 times a power of ten."""
    # The logarithm of a power of ten may be rounded to the other side of it.
    first = math.floor(math.log10(low) + 1e-9)
    last = math.ceil(math.log10(high) - 1e-9)
    candidates = []
    for power in range(first, last + 1):
        candidates += [step * 10.0**power for step in _STEPS[:-1]]
    ends_low = max((value for value in candidates if value <= low * (1 + 1e-9)), default=low)
    ends_high = min((value for value in candidates if value >= high * (1 - 1e-9)), default=high)
    if ends_low == ends_high:
        ends_low, ends_high = ends_low / 2, ends_high * 2
    ticks = [value for value in candidates if ends_low <= value <= ends_high * (1 + 1e-9)]
    if len(ticks) > tick_count:
        powers = [10.0**power for power in range(first, last + 1)]
        ticks = [value for value in powers if ends_low <= value <= ends_high * (1 + 1e-9)]
        ticks = ticks[:: math.ceil(len(ticks) / max(tick_count, 1))] or [ends_low]
    return Axis(ends_low, ends_high, True, tuple(ticks))


def tick_text(value: float, axis: Axis) -> str:
    """Return the label of a tick.

    >>> axis = Axis.of([0, 3000], log=False, tick_count=4, from_zero=False)
    >>> [tick_text(value, axis) for value in axis.ticks]
    ['0', '1,000', '2,000', '3,000']
    """
    size = abs(value)
    if value and not _MIN_PLAIN <= size < _MAX_PLAIN:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{format_number(float(mantissa), 2)}e{int(exponent)}"
    if axis.log:
        return f"{value:,.6g}" if size < 1000 else f"{value:,.0f}"
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else size or 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value + 0.0:,.{digits}f}"

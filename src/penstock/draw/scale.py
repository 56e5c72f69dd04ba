"""Units and ticks of the time axis, shared by all drawings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.event import Timeline
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind
from penstock.units import TIME_UNITS, format_seconds

#: Distances between ticks are 1, 2 or 5 times a power of ten.
_TICK_STEPS = (1.0, 2.0, 5.0)
#: A timeline has a common unit only if its shortest op lasts at most this many units.
_MAX_UNITS_OF_SHORTEST = 12
#: Ops of whole units may be divided into up to this many equal parts, since micro-batches are cut
#: into slices, and the work of a rank into stages.
_MAX_PARTS = 24
#: Relative tolerance for rounding errors of the simulator's sums.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Clock:
    """How times are written.

    Attributes:
        factor: length of a unit in seconds.
        unit: name of the unit; empty for a timeline in abstract units, such as F = 1 and B = 2.
    """

    factor: float
    unit: str

    @classmethod
    def of(cls, panels: Sequence[Timeline]) -> Clock:
        """Return abstract units for simulated timelines in units, and a unit of time otherwise.

        A timeline is in units if no op is shorter than 1, or if all ops are multiples of a
        fraction 1/n of the unit.
        """
        if all(panel.source != "measured" for panel in panels) and _in_units(panels):
            return cls(1.0, "")
        length = axis_seconds(panels)
        for unit, factor in TIME_UNITS:
            if length >= factor:
                return cls(factor, unit)
        return cls(1.0, "s")

    def exact(self, seconds: float) -> str:
        """Format a duration or moment with its unit: `3.2 ms`, or `3.2` in abstract units."""
        return format_seconds(seconds) if self.unit else format_number(seconds, 3)

    def tick(self, seconds: float) -> str:
        """Format the moment of a tick in the unit of the axis: `0.2 ms`."""
        return f"{self.tick_number(seconds)} {self.unit}".rstrip()

    def tick_number(self, seconds: float) -> str:
        """Format the moment of a tick without its unit, for an axis whose title has it."""
        return format_number(seconds / self.factor, 6)

    def steps(self, shortest: float) -> Iterator[float]:
        """Yield round distances between ticks in seconds, in ascending order.

        Args:
            shortest: lower limit of the distances in seconds. In abstract units, distances are
                also at least 1.
        """
        power = -9 if self.unit else 0
        while power < 300:
            for step in _TICK_STEPS:
                seconds = step * 10.0**power * self.factor
                if seconds >= shortest:
                    yield seconds
            power += 1


def format_number(value: float, digits: int) -> str:
    """Format `value` with at most `digits` decimals, without trailing zeros.

    >>> format_number(18.0, 3), format_number(0.12345, 2), format_number(-0.0001, 2)
    ('18', '0.12', '0')
    """
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"
    return "0" if text == "-0" else text


def axis_seconds(panels: Sequence[Timeline]) -> float:
    """Return the length of a common time axis: the longest makespan."""
    return max((panel.makespan for panel in panels), default=0.0)


def _in_units(panels: Sequence[Timeline]) -> bool:
    """Return whether the lengths of ops are abstract units rather than seconds."""
    shortest = min(op_lengths(panels).tolist(), default=1.0)
    if shortest > 1 - _TOLERANCE:
        return True
    unit = common_unit(panels)
    if unit is None:
        return False
    return any(_is_whole(unit * parts) for parts in range(1, _MAX_PARTS + 1))


def _is_whole(value: float) -> bool:
    """Return whether a value is a positive integer, but for rounding errors."""
    return round(value) >= 1 and abs(value - round(value)) < _TOLERANCE


def op_lengths(panels: Sequence[Timeline]) -> Array:
    """Return the durations in seconds of all ops that take time, without updates.

    Updates are left out because they are often the only short op of a timeline in units.
    """
    logs = [panel.log for panel in panels]
    lengths = [(log.end - log.start)[~log.ops.of_kind(Kind.U)] for log in logs]
    all_lengths = np.concatenate(lengths) if lengths else np.zeros(0)
    return all_lengths[all_lengths > 0]


def common_unit(panels: Sequence[Timeline]) -> float | None:
    """Return the largest time of which all starts and ends of ops are multiples, in seconds.

    With F = 2 and B = 3 it is 1. Returns None if the shortest op would last more than 12 units, as
    in measured timelines. Rounding errors of the simulator's sums are tolerated.
    """
    if not panels:
        return None
    logs = [panel.log for panel in panels]
    starts = np.concatenate([log.start for log in logs])
    ends = np.concatenate([log.end for log in logs])
    moments = np.concatenate([starts, ends])
    lengths = ends - starts
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return None
    shortest = float(lengths.min())
    for parts in range(1, _MAX_UNITS_OF_SHORTEST + 1):
        unit = shortest / parts
        if (np.abs(moments / unit - np.rint(moments / unit)) < _TOLERANCE).all():
            return unit
    return None

"""Seconds to columns, points and words: the one place where drawings decide on units and ticks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.event import Timeline
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind
from penstock.units import format_seconds

#: Ticks stand at 1, 2 or 5 times a power of ten.
_STEPS = (1.0, 2.0, 5.0)
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
#: The shortest op may be this many times the unit of a timeline that is drawn unit by unit.
_LONGEST_SHORTEST = 12
#: Ops of whole units may be cut in so many parts, as slices of micro-batches are, and stages of a
#: rank.
_SMALLEST_PART = 24


@dataclass(frozen=True)
class Clock:
    """How times are written: `factor` seconds are one `unit`; the unit is empty where a timeline
    counts in units of its own.
    """

    factor: float
    unit: str

    @classmethod
    def of(cls, panels: Sequence[Timeline]) -> Clock:
        """Seconds for what was measured or has short ops, plain units for all else, such as F = 1
        and B = 2, and parts of them.
        """
        if all(panel.source != "measured" for panel in panels):
            shortest = min(work_seconds(panels).tolist(), default=1.0)
            unit = None if shortest > 1 - 1e-6 else common_unit(panels)
            if shortest > 1 - 1e-6 or (
                unit is not None
                and any(_is_whole(unit * parts) for parts in range(1, _SMALLEST_PART + 1))
            ):
                return cls(1.0, "")
        whole = horizon(panels)
        return next(
            (cls(factor, unit) for unit, factor in _UNITS if whole >= factor), cls(1.0, "s")
        )

    def exact(self, seconds: float) -> str:
        """A length or a moment for people: `3.2 ms`, or `3.2` in plain units."""
        return format_seconds(seconds) if self.unit else number(seconds, 3)

    def tick(self, seconds: float) -> str:
        """A moment at a tick, in the unit of the axis: `0.2 ms`."""
        return f"{self.tick_number(seconds)} {self.unit}".rstrip()

    def tick_number(self, seconds: float) -> str:
        """The same without the unit, for an axis whose title has it."""
        return number(seconds / self.factor, 6)

    def steps(self, shortest: float) -> Iterator[float]:
        """Distances between ticks that read well, in seconds, from `shortest` up; whole ones in
        plain units.
        """
        power = -9 if self.unit else 0
        while power < 300:
            for step in _STEPS:
                seconds = step * 10.0**power * self.factor
                if seconds >= shortest:
                    yield seconds
            power += 1


def number(value: float, digits: int) -> str:
    """`value` rounded to `digits` decimals, without trailing zeros.

    >>> number(18.0, 3), number(0.12345, 2), number(-0.0001, 2)
    ('18', '0.12', '0')
    """
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"
    return "0" if text == "-0" else text


def horizon(panels: Sequence[Timeline]) -> float:
    """Seconds that a common axis has to cover."""
    return max((panel.makespan for panel in panels), default=0.0)


def _is_whole(value: float) -> bool:
    return round(value) >= 1 and abs(value - round(value)) < 1e-6


def work_seconds(panels: Sequence[Timeline]) -> Array:
    """The lengths of all ops that take time, updates left out: they are often the one short op of a
    timeline in units.
    """
    logs = [panel.log for panel in panels]
    lengths = [(log.end - log.start)[~log.ops.of_kind(Kind.U)] for log in logs]
    found = np.concatenate(lengths) if lengths else np.zeros(0)
    return found[found > 0]


def common_unit(panels: Sequence[Timeline]) -> float | None:
    """The largest length in seconds of which every op's start and end is a whole multiple, if ops
    are small multiples of one.

    With F = 2 and B = 3 it is 1; a measured timeline has none. Rounding errors of the simulator's
    sums pass.
    """
    if not panels:
        return None
    moments = np.concatenate(
        [each for panel in panels for each in (panel.log.start, panel.log.end)]
    )
    lengths = np.concatenate([panel.log.end - panel.log.start for panel in panels])
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return None
    shortest = float(lengths.min())
    for parts in range(1, _LONGEST_SHORTEST + 1):
        unit = shortest / parts
        if (np.abs(moments / unit - np.rint(moments / unit)) < 1e-6).all():
            return unit
    return None

"""Times of a schedule whose ops take given units and whose messages take no time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.schedule.dependencies import acyclic_dependencies_of
from penstock.schedule.kernels import Durations, Times
from penstock.schedule.op import Kind, Op, Schedule

_USUAL_UNITS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def usual_units(op: Op) -> float:
    """Return the duration of an op where nothing is known about its costs."""
    return _USUAL_UNITS.get(op.kind, 0.0)


def unit_times(schedule: Schedule, units: Callable[[Op], float]) -> Times:
    r"""Return the start and end of every op, in the order of `schedule.ops`.

    >>> unit_times(Schedule.parse("0F0 0F1\n1F0 1F1"), lambda op: 2.0).start
    array([0., 2., 2., 4.])

    Args:
        schedule: the schedule.
        units: duration of an op.

    Raises:
        ScheduleError: an op's predecessor or a value's consumer is missing, or the programs
            deadlock.
    """
    dependencies = acyclic_dependencies_of(schedule)
    count = len(dependencies.ops)
    seconds = np.zeros(count + 1)
    seconds[:count] = [units(op) for op in schedule.ops]
    pair_seconds = dependencies.pair_seconds(seconds)
    seconds[dependencies.pairs] = seconds[dependencies.pairs + 1] = pair_seconds
    entry_of_messages = np.full(count, count)
    durations = Durations(np.arange(count), entry_of_messages, seconds, overlap=True)
    times = Times(*(np.empty(count) for _ in range(4)))
    dependencies.time_ops(durations, times)
    return times

"""What a stream makes of a weight rule in the long run, however few batches its programs show."""

from __future__ import annotations

import math

from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule
from penstock.schedule.period import period_of, prolonged, with_batches
from penstock.weights.catalogue import WeightRule
from penstock.weights.uses import Readings, readings


def long_run(schedule: Schedule, rule: WeightRule) -> Readings:
    """The readings of so many batches of a stream that nothing new comes after them; of a schedule that is none, its own.

    A stretch of a stream that drains as soon as it is full holds fewer versions than one that goes on.

    >>> from penstock.schedule.catalogue import schedule
    >>> from penstock.weights.catalogue import weight_rule
    >>> long_run(schedule("pipedream", 4, 1, batches=6), weight_rule("stash")).versions
    (4, 3, 2, 1)

    Args:
        schedule: sound. A stream that does not repeat itself is taken as it is.
        rule: a weight rule that goes with it (see `choice.rule_of`).

    Raises:
        ScheduleError: an op reads a version that is not there, or one that the rule does not take, each with its finding.
    """
    if schedule.stream is None:
        return readings(schedule, rule)
    try:
        every = math.lcm(period_of(schedule).batches, schedule.stream.pipelines)
        # Full, all that comes again, and drained.
        longer = prolonged(schedule, max(schedule.batches, 2 * spread(schedule) + 2 * every + 1))
    except ScheduleError:
        longer = schedule
    return readings(longer, rule)


def spread(schedule: Schedule) -> int:
    """By how many batches, at most, an op comes behind one of a later batch in the program of its rank."""
    most = 0
    for program in schedule.programs:
        latest = 0
        for _, batch in with_batches(program, schedule.micro_batches):
            latest = max(latest, batch)
            most = max(most, latest - batch)
    return most

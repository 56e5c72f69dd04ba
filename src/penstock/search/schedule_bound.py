"""A lower bound of the seconds of a placed schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.profile.profile import PHASES
from penstock.schedule.op import BACKWARD_STARTS, Kind, Op, Schedule
from penstock.schedule.streaming.period import period_of
from penstock.simulate.costs import Costs


def schedule_bound_s(schedule: Schedule, costs: Costs) -> float:
    """Return a lower bound in seconds per step of a schedule with these costs; per batch for a
    stream. Transfers and updates count as free.

    For every rank:

        forward of the stages before  |  its work up to its  |  backward of the stages before
        that of its first op          |  last backward       |  that of its last backward

    The sum is a lower bound since a rank is sequential, and since its first forward comes after
    those stages and its last backward before them. A stream has no ramps: only the work of each
    rank counts, per batch of the period after which the program repeats.
    """
    if schedule.stream is not None:
        fastest = {
            Kind(letter): _fastest_seconds(costs, name, schedule)
            for letter, name in zip("FBIW", PHASES, strict=True)
        }
        period = period_of(schedule)
        bound = 0.0
        for loop in period.loops:
            work = sum(fastest[op.kind][op.stage] for op in loop if op.kind in fastest)
            bound = max(bound, work)
        return bound / period.batches
    seconds = {
        Kind(letter): _PhaseSeconds.of(costs, name, schedule)
        for letter, name in zip("FBIW", PHASES, strict=True)
    }
    least = 0.0
    for program in schedule.programs:
        work_ops = [op for op in program if op.kind in seconds]
        least = max(least, _rank_bound_s(schedule, work_ops, seconds))
    return least


class _PhaseSeconds:
    """Seconds of one phase, by stage and micro-batch.

    entries: per stage, one number or one per micro-batch. With slices, which are in any case on
        ranks of one device, it is the least of all micro-batches.
    """

    def __init__(self, entries: Sequence[float | tuple[float, ...]]) -> None:
        self.entries = entries

    @classmethod
    def of(cls, costs: Costs, name: str, schedule: Schedule) -> _PhaseSeconds:
        """Return the seconds of a phase of these costs."""
        value = getattr(costs, name)
        if isinstance(value, tuple) and schedule.slicing is None:
            return cls(value)
        return cls(_fastest_seconds(costs, name, schedule))

    def of_op(self, op: Op) -> float:
        """Return the seconds of an op; of a slice, those of its whole micro-batch."""
        entry = self.entries[op.stage]
        return entry[op.micro_batch] if isinstance(entry, tuple) else entry

    def before(self, op: Op) -> list[float]:
        """Return the seconds of the op's micro-batch on every stage before."""
        entries = self.entries[: op.stage]
        return [entry[op.micro_batch] if isinstance(entry, tuple) else entry for entry in entries]


def _rank_bound_s(
    schedule: Schedule, ops: Sequence[Op], seconds: dict[Kind, _PhaseSeconds]
) -> float:
    """Return the lower bound that one rank of a synchronous schedule gives.

    Args:
        schedule: the schedule.
        ops: the rank's ops that take time, in order.
        seconds: per kind of op, its seconds.
    """
    durations = [seconds[op.kind].of_op(op) * schedule.shares[op.micro_batch] for op in ops]
    backward_places = [place for place, op in enumerate(ops) if op.kind in BACKWARD_STARTS]
    if not backward_places:
        return 0.0
    last_place = backward_places[-1]
    first, last = ops[0], ops[last_place]
    fill = sum(seconds[Kind.F].before(first)) * schedule.shares[first.micro_batch]
    # The least seconds of a backward up to its input gradient.
    backward = map(min, seconds[Kind.B].before(last), seconds[Kind.I].before(last))
    drain = sum(backward) * schedule.shares[last.micro_batch]
    # What runs after the last backward, such as W, runs while its gradient goes down the stages.
    return max(fill + sum(durations), fill + sum(durations[: last_place + 1]) + drain)


def _fastest_seconds(costs: Costs, name: str, schedule: Schedule) -> tuple[float, ...]:
    """Return the seconds of one phase per stage; on replicas of different speed, the fastest's."""
    value = getattr(costs, name)
    if not isinstance(value, tuple):
        return costs.spread(name, schedule.stages) or ()
    return tuple(float(np.min(entry)) for entry in value)

"""The steady state of a stream: the time per batch after it has filled and before it drains.

In the steady state a stream is periodic: some batches later every op ends the same number of
seconds later. The period depends on the costs as well as on the programs: if messages take time,
batches may be early and late in turn. So more and more batches are simulated, until the ops of the
last batches that the end of the stream does not affect all end a constant time after their
counterparts some batches before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.event import EventArrays, Timeline, TransferArrays
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.recompute import Recompute
from penstock.schedule.streaming.period import period_of, with_batch_count, with_batches
from penstock.simulate.costs import FIELDS, Costs
from penstock.simulate.simulate import simulate_schedule

#: Relative difference below which two sums of seconds count as equal.
_TOLERANCE = 1e-9

#: Longest period searched for, in batches, unless twice the batches in flight are more; beyond that
#: the mean is used.
_LONGEST_PERIOD = 16

#: Maximum number of ops simulated to find the period. A stream fills slowly if the second slowest
#: stage is nearly as slow as the slowest; the time per batch meanwhile is equally close to that of
#: the steady state.
_MOST_OPS = 30_000


@dataclass(frozen=True)
class Steady:
    """The steady state of a stream; or one batch of a synchronous schedule, filling included.

    Attributes:
        seconds_per_batch: mean time from the end of one batch to the end of the next.
        bubble_ratio: idle time of all ranks / (ranks x seconds).
        batches: number of batches it was computed from, in a stream those of one period.
        timeline: of these batches, from the start of the first to the end of the last; ops of
            batches before and after, which run in parallel, are left out.
    """

    seconds_per_batch: float
    bubble_ratio: float
    batches: int
    timeline: Timeline = field(compare=False, repr=False)

    @classmethod
    def of(cls, seconds_per_batch: float, batches: int, timeline: Timeline) -> Steady:
        """Create it from a timeline of exactly these batches."""
        capacity = timeline.ranks * batches * seconds_per_batch
        bubble_ratio = max(1.0 - sum(timeline.busy) / capacity, 0.0) if capacity else 0.0
        return cls(seconds_per_batch, bubble_ratio, batches, timeline)


def steady(
    schedule: Schedule, costs: Costs, recompute: str = Recompute.NEVER, *, overlap: bool = True
) -> Steady:
    """Return the time of a batch in the steady state; if synchronous, from flush to flush.

    >>> from penstock.schedule.catalogue import schedule
    >>> steady(schedule("pipedream", 4), Costs(forward=1, backward=2)).seconds_per_batch
    3.0
    >>> steady(schedule("1f1b", 4), Costs(forward=1, backward=2)).seconds_per_batch
    12.0

    Args:
        schedule: a valid schedule. A stream may have any number of batches in which its programs
            repeat themselves.
        costs: as in `simulate_schedule`. If they differ by micro-batch, no more batches than the
            schedule's are simulated.
        recompute, overlap: as in `simulate_schedule`.

    Raises:
        SettingError: the costs do not fit the schedule.
        ScheduleError: the schedule misses an op, deadlocks, or is a stream that does not repeat
            itself.
    """
    if schedule.stream is None:
        timeline = simulate_schedule(schedule, costs, overlap=overlap, recompute=recompute)
        return Steady.of(timeline.makespan, 1, timeline)
    period = period_of(schedule)
    overtaken = _batches_overtaken(schedule)
    fixed_length = _differ_by_micro_batch(costs)
    ops_per_batch = sum(map(len, period.loops)) / period.batches
    # `periodic` needs 4 * overtaken + 3 batches and a period; the others are for filling.
    batches = schedule.batches if fixed_length else 6 * overtaken + 2 * period.batches + 8
    while True:
        stretch = with_batch_count(schedule, batches)
        timeline = simulate_schedule(stretch, costs, overlap=overlap, recompute=recompute)
        simulated = _SimulatedStream.of(stretch, timeline, period.batches, overtaken)
        result = simulated.periodic()
        if result is not None:
            return result
        if fixed_length or 2 * batches * ops_per_batch > _MOST_OPS:
            return simulated.mean()
        batches *= 2


def _differ_by_micro_batch(costs: Costs) -> bool:
    """Return whether a field has numbers per micro-batch."""
    for name in FIELDS:
        value = getattr(costs, name)
        if isinstance(value, tuple) and any(isinstance(entry, tuple) for entry in value):
            return True
    return False


@dataclass(frozen=True, eq=False)
class _SimulatedStream:
    """A simulated stretch of a stream.

    timeline: of the stretch.
    batch: per op of the timeline, its batch.
    ends: the ends of all ops except updates, shape (batches, ops per batch).
    period: batches after which the programs repeat themselves.
    overtaken: see `_batches_overtaken`.
    """

    timeline: Timeline
    batch: Array
    ends: Array
    period: int
    overtaken: int

    @classmethod
    def of(
        cls, schedule: Schedule, timeline: Timeline, period: int, overtaken: int
    ) -> _SimulatedStream:
        """Create it from the timeline of a stream."""
        log = timeline.log
        batches: list[int] = []
        for program in schedule.programs:
            batches += (number for _, number in with_batches(program, schedule.micro_batches))
        batch = np.array(batches)
        rows = np.flatnonzero(log.ops.of_kind(Kind.F, Kind.B, Kind.I, Kind.W))
        order = np.lexsort(
            (log.ops.micro_batch[rows], log.ops.stage[rows], log.ops.kind[rows], batch[rows])
        )
        ends = log.end[rows[order]].reshape(schedule.batches, -1)
        return cls(timeline, batch, ends, period, overtaken)

    @property
    def unaffected(self) -> int:
        """Number of batches whose ops run as they would if the stream never ended."""
        # An op waits for ops of batches up to `overtaken` later, which precede it in its program,
        # and so do those on other ranks.
        return len(self.ends) - 2 * (self.overtaken + 1)

    def periodic(self) -> Steady | None:
        """Return the steady state, or None if the ends of ops are not yet periodic.

        They are if every op ends a constant time after its counterpart some batches before.
        """
        ends = self.ends[: max(self.unaffected, 0)]
        # As many batches as can be in progress at once determine all that follows.
        in_progress = 2 * self.overtaken + 1
        for batches in range(self.period, max(_LONGEST_PERIOD, in_progress) + 1, self.period):
            if len(ends) < batches + in_progress:
                break
            shift = ends[-in_progress:] - ends[-in_progress - batches : -batches]
            if shift.max() - shift.min() <= _TOLERANCE * ends.max():
                # Twelve digits: beyond that there is only rounding.
                return self._steady(float(f"{shift.mean() / batches:.12g}"), batches)
        return None

    def mean(self) -> Steady:
        """Return the mean over the second half of the unaffected batches, or over all."""
        last = self.unaffected if self.unaffected > self.period else len(self.ends)
        batches = max(last // 2 // self.period, 1) * self.period
        if batches >= last:
            return self._steady(self.timeline.makespan / len(self.ends), len(self.ends))
        # The slowest of the ops: the others may still run ahead of it.
        return self._steady(
            float((self.ends[last - 1] - self.ends[last - 1 - batches]).max()) / batches,
            batches,
            last,
        )

    def _steady(self, seconds: float, batches: int, last: int | None = None) -> Steady:
        """Return the steady state of the `batches` before batch `last`."""
        last = max(self.unaffected, batches) if last is None else last
        log = self.timeline.log
        rows = np.flatnonzero((self.batch >= last - batches) & (self.batch < last))
        origin = float(log.start[rows].min(initial=np.inf))
        moves = log.moves
        if moves is not None:
            moves = TransferArrays(
                moves.link[rows],
                moves.to_rank,
                moves.start[rows] - origin,
                moves.end[rows] - origin,
                moves.place[rows],
                moves.sizes,
            )
        log_of_batches = EventArrays(
            log.ops.at(rows), log.start[rows] - origin, log.end[rows] - origin, moves
        )
        return Steady.of(seconds, batches, Timeline.of_log(log_of_batches, self.timeline.title))


def _batches_overtaken(schedule: Schedule) -> int:
    """Return the maximum number of batches by which an op follows one of a later batch.

    Both are ops of the same rank's program.
    """
    most = 0
    for program in schedule.programs:
        latest = 0
        for _, batch in with_batches(program, schedule.micro_batches):
            latest = max(latest, batch)
            most = max(most, latest - batch)
    return most

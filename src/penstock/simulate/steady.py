"""Steady: how long a stream takes for a batch once it is full, and before it drains.

In the steady state a stream repeats itself: some batches later everything ends the same number of
seconds later. How many batches, depends on the costs as well as on the programs: where messages
take time, batches may be early and late in turn. So more and more batches are simulated, until the
ops of the last of them that are not yet touched by the end have all come the same time after their
likes some batches before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.event import EventArrays, Timeline, TransferArrays
from penstock.schedule.arrays import Array, OpArrays
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.period import period_of, prolonged, with_batches
from penstock.simulate.costs import FIELDS, Costs
from penstock.simulate.simulate import simulate_schedule

#: Seconds that differ by less than this share of all are the same: they are sums of floats.
_SAME = 1e-9

#: Patterns of up to so many batches are looked for, or of twice those under way; of longer ones the
#: mean is taken.
_LONGEST = 16

#: No more ops than that are simulated in search of a pattern. A stream fills slowly where the
#: second slowest stage is nearly as
#: slow as the slowest; what it takes meanwhile is as near to what it takes at last.
_MOST_OPS = 30_000


@dataclass(frozen=True)
class Steady:
    """A stream in its steady state; or one batch of a synchronous schedule, with filling and
    draining.

    Attributes:
        seconds_per_batch: from the end of one batch to the end of the next, in the mean.
        bubble_ratio: idle time of all ranks / (ranks x seconds).
        batches: how many of them were looked at, of a stream those of one pattern.
        timeline: all that belongs to these, from the first's beginning to the last's end; the
        batches before and after, which
            run beside them, left out.
    """

    seconds_per_batch: float
    bubble_ratio: float
    batches: int
    timeline: Timeline = field(compare=False, repr=False)

    @classmethod
    def of(cls, seconds_per_batch: float, batches: int, timeline: Timeline) -> Steady:
        """That of batches which take so long each, and are all that is in `timeline`."""
        whole = timeline.ranks * batches * seconds_per_batch
        return cls(
            seconds_per_batch,
            max(1.0 - sum(timeline.busy) / whole, 0.0) if whole else 0.0,
            batches,
            timeline,
        )


def steady(
    schedule: Schedule, costs: Costs, recompute: str = "never", *, overlap: bool = True
) -> Steady:
    """What a batch takes in the steady state: of a synchronous schedule, from flush to flush.

    >>> from penstock.schedule.catalogue import schedule
    >>> steady(schedule("pipedream", 4), Costs(forward=1, backward=2)).seconds_per_batch
    3.0
    >>> steady(schedule("1f1b", 4), Costs(forward=1, backward=2)).seconds_per_batch
    12.0

    Args:
        schedule: a sound schedule. If it is a stream, of any number of batches in which it repeats
        itself. costs: as for `simulate_schedule`. Where they differ by micro-batch, no more batches
        than the schedule's are looked at. recompute, overlap: as for `simulate_schedule`.

    Raises:
        SettingError: the costs do not fit the schedule.
        ScheduleError: the schedule lacks an op, cannot finish, or is a stream that does not repeat
        itself.
    """
    if schedule.stream is None:
        timeline = simulate_schedule(schedule, costs, overlap=overlap, recompute=recompute)
        return Steady.of(timeline.makespan, 1, timeline)
    period = period_of(schedule)
    behind = _spread(schedule)
    fixed = any(isinstance(entry, tuple) for name in FIELDS for entry in _entries(costs, name))
    per_batch = sum(map(len, period.loops)) / period.batches
    batches = schedule.batches if fixed else 6 * behind + 2 * period.batches + 8
    while True:
        made = prolonged(schedule, batches)
        seen = _Seen.of(
            made,
            simulate_schedule(made, costs, overlap=overlap, recompute=recompute),
            period.batches,
            behind,
        )
        found = seen.pattern()
        if found is not None or fixed or 2 * batches * per_batch > _MOST_OPS:
            return found or seen.mean()
        batches *= 2


def _entries(costs: Costs, name: str) -> tuple[object, ...]:
    value = getattr(costs, name)
    return value if isinstance(value, tuple) else ()


@dataclass(frozen=True, eq=False)
class _Seen:
    """A simulated stretch of a stream.

    `ends` are by batch and then by op, updates left out; `whole` is the number of batches that the
    stream's end does not touch.
    """

    timeline: Timeline
    batch: Array
    ends: Array
    period: int
    spread: int

    @classmethod
    def of(cls, made: Schedule, timeline: Timeline, period: int, spread: int) -> _Seen:
        """That of a stream."""
        log = timeline.log
        batch = np.array(
            [
                batch
                for program in made.programs
                for _, batch in with_batches(program, made.micro_batches)
            ]
        )
        rows = np.flatnonzero(log.ops.of_kind(Kind.F, Kind.B, Kind.I, Kind.W))
        order = np.lexsort(
            (log.ops.micro_batch[rows], log.ops.stage[rows], log.ops.kind[rows], batch[rows])
        )
        return cls(timeline, batch, log.end[rows[order]].reshape(made.batches, -1), period, spread)

    @property
    def whole(self) -> int:
        """Number of batches whose ops run as they would if the stream never ended."""
        # An op waits for ops of batches up to `spread` later, which stand before it, and those on
        # their ranks likewise.
        return len(self.ends) - 2 * (self.spread + 1)

    def pattern(self) -> Steady | None:
        """What a batch takes, if all comes the same time after what it was some batches before."""
        ends, state = self.ends[: max(self.whole, 0)], 2 * self.spread + 1
        for batches in range(self.period, max(_LONGEST, state) + 1, self.period):
            if len(ends) < batches + state:
                break
            later = ends[-state:] - ends[-state - batches : -batches]
            if later.max() - later.min() <= _SAME * ends.max():
                # Twelve digits: the rest is what adding up floats has left.
                return self._steady(float(f"{later.mean() / batches:.12g}"), batches)
        return None

    def mean(self) -> Steady:
        """What a batch takes in the second half of those that the stream's end does not touch; of
        what there is, if that is none.
        """
        last = self.whole if self.whole > self.period else len(self.ends)
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
        """That of the `batches` before batch `last`."""
        last = max(self.whole, batches) if last is None else last
        log = self.timeline.log
        rows = np.flatnonzero((self.batch >= last - batches) & (self.batch < last))
        ops, origin = log.ops, float(log.start[rows].min(initial=np.inf))
        some = OpArrays(
            ops.rank[rows],
            ops.kind[rows],
            ops.stage[rows],
            ops.micro_batch[rows],
            np.searchsorted(rows, ops.first),
        )
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
        shown = EventArrays(some, log.start[rows] - origin, log.end[rows] - origin, moves)
        return Steady.of(seconds, batches, Timeline.of_log(shown, self.timeline.title))


def _spread(schedule: Schedule) -> int:
    """By how many batches, at most, an op comes behind one of a later batch in the program of its
    rank.
    """
    most = 0
    for program in schedule.programs:
        latest = 0
        for _, batch in with_batches(program, schedule.micro_batches):
            latest = max(latest, batch)
            most = max(most, latest - batch)
    return most

"""How the programs of a stream repeat themselves, so that any number of batches can be made of
them.

The program of rank 0 in `pipedream` on two ranks, with one micro-batch per batch:

    0F0 | 0F1 0B0 0U1 | 0F2 0B1 0U2 | 0F3 0B2 0U3 | …          head | loop | the loop one batch
                                                               further | …

That of so many batches is the endless one without the ops of later batches: what is left when no
more batches come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.schedule.stream import Stream


@dataclass(frozen=True)
class Period:
    """The programs of all ranks for ever: a head, and then a loop that comes again and again,
    `batches` batches further each time.

    `updates[rank]` has, per stage, the versions that one loop makes.
    """

    batches: int
    micro_batches: int
    heads: tuple[Program, ...]
    loops: tuple[Program, ...]
    updates: tuple[Counter[int], ...]

    def moved(self, rank: int, op: Op, loops: int) -> Op:
        """The op that stands in an op's place some loops later."""
        kind, stage, number = op
        step = self.updates[rank][stage] if kind is Kind.U else self.batches * self.micro_batches
        return Op(kind, stage, number + loops * step)

    def ops(self, rank: int) -> Iterator[Op]:
        """The program of a rank, without end."""
        yield from self.heads[rank]
        loop = 0
        while self.loops[rank]:
            for op in self.loops[rank]:
                yield self.moved(rank, op, loop)
            loop += 1

    def program(self, rank: int, batches: int) -> Program:
        """The program of a rank for some batches: what belongs to later ones left out."""
        before, each = len(self.heads[rank]) + len(self.loops[rank]), len(self.loops[rank])
        second = islice(with_batches(self.ops(rank), self.micro_batches), before, before + each)
        earliest = min((batch for _, batch in second), default=batches)
        # Loops whose earliest op is of a later batch have nothing of these.
        loops = max(0, -(-(batches - earliest) // self.batches))
        ops = islice(self.ops(rank), before + loops * each)
        return tuple(op for op, batch in with_batches(ops, self.micro_batches) if batch < batches)


def with_batches(ops: Iterable[Op], micro_batches: int) -> Iterator[tuple[Op, int]]:
    """Each op with its batch; a U belongs to that of the gradient before it."""
    latest: dict[int, int] = {}
    for op in ops:
        kind, stage, number = op
        if kind in (Kind.B, Kind.W):
            latest[stage] = number // micro_batches
        yield op, latest.get(stage, 0) if kind is Kind.U else number // micro_batches


def period_of(schedule: Schedule) -> Period:
    """How a schedule repeats itself. It is made once, and kept with the schedule.

    >>> from penstock.schedule.catalogue import schedule
    >>> period = period_of(schedule("pipedream", 2))
    >>> [" ".join(map(str, loop)) for loop in period.loops]
    ['0F1 0B0 0U1', '1F0 1B0 1U1']

    Raises:
        ScheduleError: it is no stream; or its programs do not come to the same again, moved on by
        some batches, at least twice.
    """
    found = schedule.__dict__.get("_period")
    if not isinstance(found, Period):
        found = schedule.__dict__["_period"] = _period(schedule)
    return found


def prolonged(schedule: Schedule, batches: int) -> Schedule:
    """The same stream with another number of batches, fewer or more.

    Raises:
        ScheduleError: it is no stream, or does not repeat itself (see `period_of`).
    """
    if batches == schedule.batches:
        return schedule
    stream = replace(_stream_of(schedule), batches=batches)
    if batches < schedule.batches:
        rows = (with_batches(program, schedule.micro_batches) for program in schedule.programs)
        programs = tuple(tuple(op for op, batch in row if batch < batches) for row in rows)
    else:
        period = period_of(schedule)
        programs = tuple(period.program(rank, batches) for rank in range(schedule.ranks))
    options = tuple(
        (name, batches if name == "batches" else value) for name, value in schedule.options
    )
    return replace(schedule, programs=programs, stream=stream, options=options)


def _stream_of(schedule: Schedule) -> Stream:
    """The stream of a schedule that can go on.

    Raises:
        ScheduleError: it cannot.
    """
    if schedule.stream is None:
        raise ScheduleError(
            f"{schedule.name} is no stream: its programs are those of one batch, after which they end"
        )
    if schedule.pairs or schedule.slicing is not None:
        raise ScheduleError(
            f"{schedule.name} pairs ops or cuts micro-batches further: only a stream of plain ops can go on"
        )
    return schedule.stream


def _period(schedule: Schedule) -> Period:
    from penstock.schedule.repeats import Row  # arrays, which few who ask for a stream need

    total, size = _stream_of(schedule).batches, max(schedule.micro_batches, 1)
    rows = (
        [
            Row.of(schedule, rank, [batch for _, batch in with_batches(program, size)])
            for rank, program in enumerate(schedule.programs)
        ]
        if schedule.slices
        else []
    )
    for batches in range(1, total // 2 + 1 if rows else 1):
        found = []
        for row in rows:
            repeated = row.repeats(batches, total)
            if repeated is None:
                break
            found.append(repeated)
        else:
            heads, loops, updates = zip(*found, strict=True)
            made = Period(batches, size, heads, loops, updates)
            if all(
                made.program(rank, total) == program
                for rank, program in enumerate(schedule.programs)
            ):
                return made
    raise ScheduleError(
        f"{schedule.name} does not repeat itself from batch to batch within its {total} batches, so it cannot go on "
        "for ever: give programs of more batches, in which the same order comes twice, moved on"
    )

"""Find the period of a stream's programs, and generate them for any number of batches.

Example: the program of rank 0 in `pipedream` on two ranks, with one micro-batch per batch. A head
comes once, then a loop repeats, one batch further each time:

    0F0  | 0F1 0B0 0U1 | 0F2 0B1 0U2 | 0F3 0B2 0U3 | …
    head | loop        | loop        | loop

The program for a given number of batches is the endless one without the ops of later batches: what
remains when no more batches arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from penstock.errors import ScheduleError
from penstock.schedule.op import BACKWARD_ENDS, Kind, Op, Program, Schedule
from penstock.schedule.size_limit import check_size
from penstock.schedule.streaming.streams import Stream


@dataclass(frozen=True)
class Period:
    """The endless programs of all ranks: a head, followed by a loop that repeats.

    Attributes:
        batches: number of batches from one repetition of the loop to the next.
        micro_batches: micro-batches per batch.
        heads, loops: the head and the first repetition of the loop, per rank.
        updates: per rank, the number of U ops of each stage in one repetition.
    """

    batches: int
    micro_batches: int
    heads: tuple[Program, ...]
    loops: tuple[Program, ...]
    updates: tuple[Counter[int], ...]

    def moved(self, rank: int, op: Op, loops: int) -> Op:
        """Return the op in the same place of the loop, a number of repetitions later."""
        kind, stage, number = op
        step = self.updates[rank][stage] if kind is Kind.U else self.batches * self.micro_batches
        return Op(kind, stage, number + loops * step)

    def ops(self, rank: int) -> Iterator[Op]:
        """Yield the endless program of a rank."""
        yield from self.heads[rank]
        repetition = 0
        while self.loops[rank]:
            for op in self.loops[rank]:
                yield self.moved(rank, op, repetition)
            repetition += 1

    def program(self, rank: int, batches: int) -> Program:
        """Return the program of a rank for a number of batches, without ops of later batches."""
        loop_length = len(self.loops[rank])
        first_length = len(self.heads[rank]) + loop_length
        ops_with_batches = with_batches(self.ops(rank), self.micro_batches)
        second_loop = islice(ops_with_batches, first_length, first_length + loop_length)
        earliest = min((batch for _, batch in second_loop), default=batches)
        # A repetition whose earliest op is of a later batch has no op of these batches.
        repetitions = max(0, -(-(batches - earliest) // self.batches))
        ops = islice(self.ops(rank), first_length + repetitions * loop_length)
        return _first_batches(ops, self.micro_batches, batches)


def _first_batches(ops: Iterable[Op], micro_batches: int, batches: int) -> Program:
    return tuple(op for op, batch in with_batches(ops, micro_batches) if batch < batches)


def with_batches(ops: Iterable[Op], micro_batches: int) -> Iterator[tuple[Op, int]]:
    """Yield each op of a program with its batch; a U belongs to the batch of the last gradient.

    Args:
        ops: the program of one rank.
        micro_batches: micro-batches per batch.
    """
    latest: dict[int, int] = {}
    for op in ops:
        kind, stage, number = op
        if kind in BACKWARD_ENDS:
            latest[stage] = number // micro_batches
        yield op, latest.get(stage, 0) if kind is Kind.U else number // micro_batches


def period_of(schedule: Schedule) -> Period:
    """Return how the programs of a stream repeat. The result is cached on the schedule.

    >>> from penstock.schedule.catalogue import schedule
    >>> period = period_of(schedule("pipedream", 2))
    >>> [" ".join(map(str, loop)) for loop in period.loops]
    ['0F1 0B0 0U1', '1F0 1B0 1U1']

    Raises:
        ScheduleError: the schedule is not a stream, or its programs do not contain the same loop
            at least twice.
    """
    period = schedule.__dict__.get("_period")
    if not isinstance(period, Period):
        # Into the dict, since a frozen dataclass takes no new attribute.
        period = schedule.__dict__["_period"] = _find_period(schedule)
    return period


def with_batch_count(schedule: Schedule, batches: int) -> Schedule:
    """Return the same stream with another number of batches, fewer or more.

    Raises:
        ScheduleError: it is not a stream, does not repeat (see `period_of`), or would not fit into
            memory with this number of batches.
    """
    if batches == schedule.batches:
        return schedule
    stream = replace(_stream_of(schedule), batches=batches)
    check_size(schedule.name, schedule.stages, schedule.micro_batches * batches)
    if batches < schedule.batches:
        micro_batches = schedule.micro_batches
        programs = [
            _first_batches(program, micro_batches, batches) for program in schedule.programs
        ]
    else:
        period = period_of(schedule)
        programs = [period.program(rank, batches) for rank in range(schedule.ranks)]
    options = tuple(
        (name, batches if name == "batches" else value) for name, value in schedule.options
    )
    return replace(schedule, programs=tuple(programs), stream=stream, options=options)


def _stream_of(schedule: Schedule) -> Stream:
    """Return the stream of a schedule that can continue.

    Raises:
        ScheduleError: it cannot.
    """
    if schedule.stream is None:
        raise ScheduleError(
            f"{schedule.name} is not a stream: its programs are those of one batch, "
            "after which they end"
        )
    if schedule.pairs or schedule.slicing is not None:
        raise ScheduleError(
            f"{schedule.name} pairs ops or cuts micro-batches into slices: "
            "only a stream of plain ops can be continued"
        )
    return schedule.stream


def _find_period(schedule: Schedule) -> Period:
    """Try loops of increasing length, and return the first with which all programs agree."""
    # Needs NumPy, which most callers that use a stream do not need otherwise.
    from penstock.schedule.streaming.periodicity import ProgramColumns

    total, micro_batches = _stream_of(schedule).batches, max(schedule.micro_batches, 1)
    columns = []
    for rank, program in enumerate(schedule.programs if schedule.slices else ()):
        batch_of_op = [batch for _, batch in with_batches(program, micro_batches)]
        columns.append(ProgramColumns.of(schedule, rank, batch_of_op))
    for batches in range(1, total // 2 + 1 if columns else 1):
        splits = []
        for program_columns in columns:
            split = program_columns.split(batches, total)
            if split is None:
                break
            splits.append(split)
        else:  # every program has a loop of this many batches
            heads, loops, updates = zip(*splits, strict=True)
            period = Period(batches, micro_batches, heads, loops, updates)
            if all(
                period.program(rank, total) == program
                for rank, program in enumerate(schedule.programs)
            ):
                return period
    raise ScheduleError(
        f"{schedule.name} does not repeat itself from batch to batch within its {total} batches, "
        "so it cannot be continued: give programs of more batches, in which the same order of ops "
        "occurs twice, with higher batch numbers the second time"
    )

"""Properties of asynchronous families, counted from programs and from a simulation."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from tests.schedule.families.laws import check_facts

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule as family_schedule
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.streaming.period import period_of, with_batch_count
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import Report, verify


def check_stream(schedule: Schedule) -> Report:
    """Sound; its text reads back; on every rank a stage has its gradients in plain order, and one U
    per batch, right after the last.

    Returns:
        What `verify` found.
    """
    check_facts(schedule)
    report = verify(schedule)
    assert not schedule.synchronous
    assert Schedule.parse(str(schedule)).programs == schedule.programs
    for rank, program in enumerate(schedule.programs):
        for stage in schedule.stages_of_rank[rank]:
            numbers = [
                n for (of, n), home in schedule.placement.items() if (of, home) == (stage, rank)
            ]
            assert [
                op.micro_batch for op in program if op.stage == stage and op.kind is Kind.B
            ] == sorted(numbers)
            last = [
                n
                for n, after in zip(sorted(numbers), [*sorted(numbers)[1:], -1], strict=True)
                if after < 0 or after // schedule.micro_batches > n // schedule.micro_batches
            ]
            updates = [
                (program[place - 1], op)
                for place, op in enumerate(program)
                if op.kind is Kind.U and op.stage == stage
            ]
            assert [(str(before), str(op)) for before, op in updates] == [
                (f"{stage}B{n}", f"{stage}U{version}") for version, n in enumerate(last, start=1)
            ]
    period_of(schedule)
    return report


def check_batches(
    name: str, stages: int, micro_batches: int, default_batches: int, **options: object
) -> None:
    """Any number of batches gives a part of the same endless programs.

    Args:
        name, stages, micro_batches, options: of the schedule.
        default_batches: those in flight, as whole periods, and four periods more.
    """
    default = family_schedule(name, stages, micro_batches, **options)
    assert default.batches == default_batches
    for batches in (1, 2, default.batches + 3):
        other = family_schedule(name, stages, micro_batches, batches=batches, **options)
        assert other.batches == batches
        assert other.programs == with_batch_count(default, batches).programs
    with pytest.raises(ScheduleError, match="a stream's batches is 1 or more, not 0"):
        family_schedule(name, stages, micro_batches, batches=0, **options)


def gaps(schedule: Schedule) -> dict[tuple[int, int], int]:
    """By stage and micro-batch, the updates of its rank's copy between its forward and its
    backward, counted op by op.
    """
    gap_of: dict[tuple[int, int], int] = {}
    for program in schedule.programs:
        version: Counter[int] = Counter()
        for kind, stage, number in program:
            if kind is Kind.F:
                gap_of[stage, number] = -version[stage]
            elif kind is Kind.B:
                gap_of[stage, number] += version[stage]
            elif kind is Kind.U:
                version[stage] += 1
    return gap_of


def expected_gap(ahead: int, size: int, number: int) -> int:
    """docs/literature/weight-versions.md and docs/literature/one-f-one-b.md, where `ahead` is p - s: min(t, max(0, ceil((p - 1 - s - j) / m)))."""
    batch, place = divmod(number, size)
    return min(batch, max(0, math.ceil((ahead - 1 - place) / size)))


def seconds_per_batch(schedule: Schedule, f: float = 1, b: float = 2) -> float:
    """Where every rank needs f and b for a micro-batch: seconds from one batch's last op to the
    next one's, on the first stage.

    Counted over a dozen batches of each copy in the middle of a long stream; asked of every rank,
    which all must say the same.
    """
    stages_per_rank = max(map(len, schedule.stages_of_rank))
    copies = len(schedule.ranks_of_stage[0])
    long = with_batch_count(schedule, 40 * copies)
    line = simulate_schedule(long, Costs(forward=f / stages_per_rank, backward=b / stages_per_rank))
    ends = {(event.rank, event.op): event.end for event in line.compute if event.op.kind is Kind.U}
    batch_seconds = []
    for rank, program in enumerate(long.programs):
        updates = [op for op in program if op.kind is Kind.U and op.stage == program[0].stage]
        batch_seconds.append((ends[rank, updates[30]] - ends[rank, updates[18]]) / 12)
    assert batch_seconds == pytest.approx([batch_seconds[0]] * len(batch_seconds))
    return batch_seconds[0]

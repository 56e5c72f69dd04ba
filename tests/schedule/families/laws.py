"""Properties of all synchronous families, for any options."""

from __future__ import annotations

import math
from collections import defaultdict
from inspect import signature

import pytest

from penstock.event import Timeline
from penstock.schedule.catalogue import FAMILIES, schedules
from penstock.schedule.op import Kind, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import Report, verify


def check_facts(schedule: Schedule) -> None:
    """The catalogue's facts about the family hold for this schedule: planners choose by them
    without generating it.
    """
    facts = schedules()[schedule.name]
    assert (facts.synchronous, facts.splits_backward) == (
        schedule.synchronous,
        schedule.splits_backward,
    )
    assert not facts.needs_costs
    slicing, stream = schedule.slicing, schedule.stream
    assert facts.causal == (slicing is not None and slicing.along == "tokens")
    assert facts.weights == ("flush" if stream is None else stream.weights)
    parameters = signature(FAMILIES.find(schedule.name).make).parameters.values()
    options = {parameter.name: parameter.default for parameter in parameters}
    options |= dict(schedule.options)
    # A product of numbers and options, such as "2 x waves".
    factors = facts.stages_per_rank.split(" x ")
    stages_per_rank = math.prod(int(options.get(factor, factor)) for factor in factors)
    # A single stage has no second copy; neither has a pipeline with a single micro-batch.
    if min(schedule.stages, schedule.micro_batches) > 1:
        assert max(map(len, schedule.stages_of_rank)) == stages_per_rank


def check_laws(schedule: Schedule) -> Report:
    """Sound, synchronous, its text reads back, its gradients add up in plain order, and no faster
    than is possible.

    Returns:
        What `verify` found.
    """
    check_facts(schedule)
    report = verify(schedule)
    assert report.staleness_max == (0,) * schedule.stages
    assert Schedule.parse(str(schedule)).programs == schedule.programs
    for stage in range(schedule.stages):
        assert [
            op.micro_batch for op in schedule.ops if op.stage == stage and op.kind is Kind.B
        ] == [*range(schedule.micro_batches)]
    line = simulate_schedule(schedule, Costs(forward=1, backward=2, transfer=0.1))
    busiest = max(map(len, schedule.stages_of_rank)) * schedule.micro_batches * 3
    assert line.makespan >= max(busiest, schedule.stages * 3)
    free = simulate_schedule(schedule, Costs(forward=1, backward=2)).makespan
    assert line.makespan >= free * (1 - 1e-9)
    return report


def whole_stage_peaks(report: Report, stages_per_rank: int) -> tuple[float, ...]:
    """Peaks per rank where all stages of a rank together count as one, as the tables count them."""
    return tuple(peak / stages_per_rank for peak in report.peak_on_rank)


def check_row(
    schedule: Schedule,
    stages_per_rank: int,
    makespan: float,
    ratio: float,
    peaks: tuple[float, ...],
) -> None:
    """Check a row of docs/literature/simulated-values.md: f = 1 and b = 2 per rank, divided evenly
    between its stages; links are free.
    """
    line = simulate_schedule(
        schedule, Costs(forward=1 / stages_per_rank, backward=2 / stages_per_rank)
    )
    assert line.makespan == pytest.approx(makespan, rel=1e-12)
    assert line.bubble_ratio == pytest.approx(ratio, abs=5e-5)
    assert whole_stage_peaks(verify(schedule), stages_per_rank) == pytest.approx(peaks)


def without_updates(schedule: Schedule) -> list[list[str]]:
    """The texts of the ops of each rank without U, as the papers print them."""
    return [[str(op) for op in program if op.kind is not Kind.U] for program in schedule.programs]


def rows_of(schedule: Schedule) -> list[str]:
    """The same, a line per rank."""
    return [" ".join(row) for row in without_updates(schedule)]


def timeline_of(
    schedule: Schedule,
    f: float = 1,
    b: float = 2,
    i: float | None = None,
    w: float | None = None,
    u: float = 0,
    offload: float = 0,
) -> Timeline:
    """The timeline where a whole micro-batch takes these seconds on every stage, a slice its share;
    links are free.

    Args:
        f, b, i, w: i and w are half of b each if they are not given.
        u: of an update.
        offload: of the links that carry an E or L.
    """
    costs = Costs(
        forward=f,
        backward=b,
        input_grad=b / 2 if i is None else i,
        weight_grad=b / 2 if w is None else w,
        update=u,
        offload=offload,
    )
    return simulate_schedule(schedule, costs)


def check_copies(schedule: Schedule) -> Report:
    """Sound, synchronous, its text reads back; on every rank a stage's gradients come in plain
    order; copies meet in one order.

    Returns:
        What `verify` found.
    """
    check_facts(schedule)
    report = verify(schedule)
    assert report.staleness_max == (0,) * schedule.stages
    back = Schedule.parse(str(schedule))
    assert (back.programs, back.pairs) == (schedule.programs, schedule.pairs)
    for program in schedule.programs:
        done = defaultdict(list)
        for op in program:
            if op.kind in (Kind.B, Kind.W):
                done[op.stage].append(op.micro_batch)
        assert all(numbers == sorted(numbers) for numbers in done.values())
    for ranks in schedule.ranks_of_stage:
        meetings = {
            tuple(op for op in schedule.programs[rank] if op.kind is Kind.U) for rank in ranks
        }
        shared = set.intersection(*map(set, meetings))
        assert len({tuple(op for op in row if op in shared) for row in meetings}) == 1
    return report

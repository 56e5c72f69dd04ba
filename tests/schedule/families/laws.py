"""What every synchronous family promises, whatever its options."""

from __future__ import annotations

import pytest

from penstock.schedule.op import Kind, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import Report, verify


def check_laws(made: Schedule) -> Report:
    """Sound, synchronous, its text reads back, its gradients add up in plain order, and no faster than is possible.

    Returns:
        What `verify` found.
    """
    report = verify(made)
    assert report.staleness_max == (0,) * made.stages
    assert Schedule.parse(str(made)).programs == made.programs
    for stage in range(made.stages):
        assert [op.micro_batch for op in made.ops if op.stage == stage and op.kind is Kind.B] == [*range(made.micro_batches)]
    line = simulate_schedule(made, Costs(forward=1, backward=2, transfer=0.1))
    busiest = max(map(len, made.stages_of_rank)) * made.micro_batches * 3
    assert line.makespan >= max(busiest, made.stages * 3)
    free = simulate_schedule(made, Costs(forward=1, backward=2)).makespan
    assert line.makespan >= free * (1 - 1e-9)
    return report


def whole_stage_peaks(report: Report, each: int) -> tuple[float, ...]:
    """In flight per rank in stages as long as all `each` of a rank's together: the tables count so."""
    return tuple(peak / each for peak in report.peak_on_rank)


def check_row(made: Schedule, each: int, makespan: float, ratio: float, peaks: tuple[float, ...]) -> None:
    """A row of LITERATURE 11.2: f = 1 and b = 2 per rank, dealt out to the `each` stages of a rank; links are free."""
    line = simulate_schedule(made, Costs(forward=1 / each, backward=2 / each))
    assert line.makespan == pytest.approx(makespan, rel=1e-12)
    assert line.bubble_ratio == pytest.approx(ratio, abs=5e-5)
    assert whole_stage_peaks(verify(made), each) == pytest.approx(peaks)

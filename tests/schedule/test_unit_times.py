"""Times with free messages, against the slow simulator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.simulate.slow import Slow, rich_schedules

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.unit_times import unit_times, usual_units


def units(op):
    """Every op has another number of them."""
    return 1.0 + op.stage + 3 * (op.micro_batch % 4) + "FBIWUEL".index(op.kind.value) / 8


@settings(max_examples=15)
@given(rich_schedules(3))
def test_every_op_starts_and_ends_as_in_the_slow_simulator(schedule):
    """Both ops of a pair take the units of both."""
    pair_units = {op: sum(map(units, pair)) for pair in schedule.pairs for op in pair}
    times = unit_times(schedule, units)

    def seconds(rank, index):
        op = schedule.programs[rank][index]
        return pair_units.get(op, units(op))

    slow = Slow(schedule, seconds, lambda op: 0.0)
    expected = [
        slow.times[rank, index]
        for rank, program in enumerate(schedule.programs)
        for index in range(len(program))
    ]
    assert times.start.tolist() == pytest.approx([start for start, _ in expected])
    assert times.end.tolist() == pytest.approx([end for _, end in expected])
    assert times.arrived.tolist() == times.sent.tolist() == times.end.tolist()


def test_a_whole_backward_takes_two_units_and_each_half_one():
    """As a forward does; updates and moves of activations take no time."""
    units_of_kind = {kind.value: usual_units(Op(kind, 1, 2)) for kind in Kind}
    assert units_of_kind == {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0, "E": 0, "L": 0}


def test_programs_that_wait_for_each_other_have_no_times():
    """The message says where each rank stops."""
    with pytest.raises(ScheduleError, match="deadlocks: it stops with rank 0 at 0B0"):
        unit_times(Schedule.parse("0B0 0F0"), units)

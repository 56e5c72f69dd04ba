"""Costs with defaults filled in, as the simulator fills them in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.schedule.op import Kind, Schedule
from penstock.search.schedules import spread_forward
from penstock.search.stage_seconds import StageSeconds
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

ONE = Schedule.parse("0F0 0I0 0W0 0U1\n1F0 1I0 1W0 1U1\n2F0 2I0 2W0 2U1")

seconds = st.floats(0, 9)


def per(count):
    """One number for all, or one each."""
    return seconds | st.lists(seconds, min_size=count, max_size=count)


@given(per(3), *[st.none() | per(3)] * 3, per(2), st.none() | per(2))
@settings(deadline=None, max_examples=60)
def test_every_default_is_that_of_the_simulator(
    forward, backward, input_grad, weight_grad, transfer, transfer_back
):
    """A schedule measured for other seconds than it is simulated with would not be made to measure."""
    costs = Costs(forward, backward, input_grad, weight_grad, 0.0, transfer, transfer_back)
    stage_seconds = StageSeconds.of(spread_forward(costs, 3, 1), 1)
    line = simulate_schedule(ONE, costs)
    mine = {
        Kind.F: stage_seconds.forward,
        Kind.I: stage_seconds.input_grad,
        Kind.W: stage_seconds.weight_grad,
    }
    for event in line.compute:
        if event.op.kind is not Kind.U:
            assert event.end - event.start == pytest.approx(
                mine[event.op.kind][event.op.stage][0], abs=1e-9
            )
    ends = {(event.op.kind, event.op.stage): (event.start, event.end) for event in line.compute}
    for stage in (0, 1):
        assert ends[Kind.F, stage + 1][0] == pytest.approx(
            ends[Kind.F, stage][1] + stage_seconds.up[stage][0]
        )
        due = ends[Kind.I, stage + 1][1] + stage_seconds.down[stage][0]
        assert ends[Kind.I, stage][0] == pytest.approx(max(due, ends[Kind.F, stage][1]))


def test_costs_may_differ_by_micro_batch_and_links_be_given_by_bandwidth():
    """Micro-batches of unequal size are the usual case: the last of a batch is short."""
    costs = Costs(
        forward=lambda stage, m: 1 + stage + 10 * m,
        input_grad=[[1, 2], [3, 4]],
        latency=0.5,
        bandwidth=10,
        boundary_bytes=[20],
    )
    stage_seconds = StageSeconds.of(spread_forward(costs, 2, 2), 2)
    assert stage_seconds.forward == ((1, 11), (2, 12))
    assert stage_seconds.input_grad == ((1, 2), (3, 4))
    assert stage_seconds.weight_grad == ((1, 20), (1, 20))  # what is left of twice the forward
    assert stage_seconds.up == stage_seconds.down == ((2.5, 2.5),)


def test_one_number_for_all_stages_does_not_tell_how_many_there_are():
    """The public function spreads it; other callers must do so too."""
    with pytest.raises(SettingError, match=r"forward is 2; it must have one entry per stage"):
        StageSeconds.of(Costs(forward=2), 1)

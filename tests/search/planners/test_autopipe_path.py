"""AutoPipe's formula against simulation of the program that it models."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.catalogue import schedule
from penstock.search.planners.autopipe_path import critical_path
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

seconds = st.floats(0.25, 4)


def simulated(forward, backward):
    """1F1B with twice as many micro-batches as stages, transfers free."""
    example = schedule("1f1b", len(forward), 2 * len(forward))
    return simulate_schedule(
        example,
        Costs(
            forward=list(forward),
            backward=list(backward),
            input_grad=[b / 2 for b in backward],
            weight_grad=[b / 2 for b in backward],
        ),
    ).makespan


@settings(max_examples=40, deadline=None)
@given(stages=st.integers(1, 8), forward=seconds, backward=seconds)
def test_equal_stages_take_what_1f1b_takes(stages, forward, backward):
    """(m + p - 1)(f + b) with m = 2p."""
    path = critical_path([forward] * stages, [backward] * stages)
    assert path.step_s == pytest.approx((3 * stages - 1) * (forward + backward))
    assert path.critical == stages - 1


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6))
def test_it_is_a_lower_bound_of_the_simulated_step(rows):
    """The formula leaves out waiting in the start-up and before the critical stage, and adds
    nothing that is not there.
    """
    forward, backward = zip(*rows, strict=True)
    predicted, real = critical_path(forward, backward).step_s, simulated(forward, backward)
    assert predicted <= real * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.8, 1.25), min_size=1, max_size=6))
def test_nearly_balanced_stages_take_what_simulation_says(forward):
    """That is where the search ends: within a hundredth, and mostly to the last digit."""
    backward = [2 * value for value in forward]
    assert critical_path(forward, backward).step_s == pytest.approx(
        simulated(forward, backward), rel=0.01
    )


def test_the_slowest_stage_is_critical():
    """It alone never waits, wherever it stands."""
    for slow in range(4):
        forward = [1.0] * 4
        forward[slow] = 2.0
        assert critical_path(forward, [2 * value for value in forward]).critical == slow


def test_hops_cost_their_time():
    """The formula's C: start-up and drain have p - 1 hops each way, and every op of the steady
    phase one.
    """
    plain, hops = (
        critical_path([1, 1, 1], [2, 2, 2]),
        critical_path([1, 1, 1], [2, 2, 2], transfer_s=0.5),
    )
    assert hops.step_s > plain.step_s + 4 * 0.5
    assert critical_path([1], [2], transfer_s=0.5).step_s == critical_path([1], [2]).step_s == 6

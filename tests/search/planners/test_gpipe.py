"""GPipe's planner: the least variance, exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import std
from tests.search.planners.cutters import ask, bounds, cuts, profile

from penstock.search.planners.gpipe import gpipe, least_variance


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_less_variance(costs, data):
    """Against all cuts."""
    stages = data.draw(st.integers(1, len(costs)))
    lengths = least_variance(costs, stages)
    assert sum(lengths) == len(costs)
    assert len(lengths) == stages

    def spread(lengths):
        return std([sum(costs[a:b]) for a, b in bounds(lengths)])

    assert spread(lengths) == pytest.approx(min(map(spread, cuts(len(costs), stages))), abs=1e-9)


def test_the_objective_is_the_deviation_of_the_stages_seconds():
    """Of a micro-batch, from the profile alone; and every stage is recomputed, as in the paper."""
    costs = profile([(0.1 + 0.01 * (i * 7 % 5), 0.2) for i in range(11)])
    chosen_plan = gpipe(ask(costs, "4xV100-NVLink"))
    seconds = costs.step_seconds(32 / chosen_plan.micro_batches)
    assert chosen_plan.objective.value == pytest.approx(
        std([sum(seconds[a:b]) for a, b in bounds(chosen_plan.lengths)])
    )
    assert (chosen_plan.schedule_name, chosen_plan.recompute) == ("gpipe", "always")

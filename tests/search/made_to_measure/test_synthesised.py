"""`synthesised` by name."""

import pytest

from penstock.errors import ScheduleError
from penstock.search.schedules import schedule, schedules
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify

COSTS = Costs(forward=[1, 3, 1, 2], transfer=0.25)


def test_it_is_found_by_name_and_takes_costs():
    """Whoever lists schedules learns that this one needs costs."""
    assert schedules()["synthesised"].needs_costs
    made = schedule("synthesised", costs=COSTS, micro_batches=6, memory_limit=3, max_rounds=2)
    assert made.name == "synthesised"
    assert max(verify(made).peak_on_rank) <= 3


def test_the_schedule_tells_its_makespan_bound_and_gap():
    """A schedule on its own says how far it may be from the best."""
    made = schedule("synthesised", costs=COSTS, micro_batches=6, max_rounds=2)
    told = dict(made.options)
    assert told["makespan"] == simulate_schedule(made, COSTS).makespan
    assert told["lower_bound"] <= told["makespan"]
    assert told["gap"] == pytest.approx(told["makespan"] / told["lower_bound"] - 1)
    assert isinstance(told["proved"], bool)


def test_options_it_does_not_know_are_refused():
    """A misspelt setting must not be ignored."""
    with pytest.raises(ScheduleError, match="does not take memory"):
        schedule("synthesised", costs=COSTS, micro_batches=6, memory=3)

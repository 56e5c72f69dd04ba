"""`simulate`: one entry point for schedules and plans."""

import pytest

from penstock.cluster.cluster import cluster
from penstock.errors import SettingError
from penstock.plan.plan import Plan
from penstock.plan.prediction import Prediction
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.entry import simulate
from penstock.simulate.plan_costs import simulate_plan
from penstock.simulate.simulate import simulate_schedule

TIME = Timing((1,), (1.0,))
PROFILE = Profile((LayerProfile("l", "L", TIME, TIME, TIME, TIME, 1, 1, 0, 1.0, 1.0),), "f", 1.0, 1)
MADE = schedule("gpipe", 1, 1)
PLAN = Plan(
    "f", ("l",), (1,), "gpipe", MADE.lines, 1, 1, "x", 1, Prediction(2.0, 0.0, (1,), 0.5, 2.0)
)


def test_a_schedule_goes_with_costs_and_a_plan_with_profile_and_cluster():
    """`simulate` only dispatches: the results are those of `simulate_schedule` and `simulate_plan`."""
    costs = Costs(forward=2)
    assert simulate(MADE, costs, recompute="always") == simulate_schedule(
        MADE, costs, recompute="always"
    )
    assert simulate(MADE) == simulate_schedule(MADE, Costs())
    sending, two = Costs(transfer=1.0), schedule("gpipe", 2, 4)
    waits, goes_on = (simulate(two, sending, overlap=overlap) for overlap in (False, True))
    assert waits == simulate_schedule(two, sending, overlap=False)
    assert waits.makespan > goes_on.makespan
    assert simulate(PLAN, PROFILE, cluster(1)) == simulate_plan(PLAN, PROFILE, cluster(1))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (PLAN, Costs()),
            {},
            r"a plan is simulated with its profile and a cluster: simulate\(plan, profile, cluster\)",
        ),
        ((PLAN, PROFILE), {}, "a plan is simulated with its profile and a cluster"),
        ((PLAN, PROFILE, cluster(1)), {"recompute": "never"}, "a plan is simulated as it will run"),
        ((PLAN, PROFILE, cluster(1)), {"overlap": False}, "a plan is simulated as it will run"),
        ((MADE, PROFILE), {}, r"a schedule is simulated with costs: simulate\(schedule, costs\)"),
        ((MADE, Costs(), cluster(1)), {}, "a schedule is simulated with costs"),
        (("gpipe", Costs()), {}, "simulate takes a Schedule or a Plan, not str"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, options, message):
    """Silently ignoring an argument would answer another question than was asked."""
    with pytest.raises(SettingError, match=message):
        simulate(*arguments, **options)

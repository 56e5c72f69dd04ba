"""From proposals to a plan."""

import pytest

from penstock.cluster.cluster import cluster
from penstock.errors import PlanError
from penstock.search.best_plan import best_plan, plan_proposal
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import simulate_plan


def request(profile_of, **options):
    """Four equal layers on four devices."""
    return PlanRequest(profile_of([1.0] * 4), cluster("4xV100-10GbE"), 8, **options)


def test_the_fastest_that_fits_is_planned_and_all_others_are_told_once_each(profile_of):
    """One row for each schedule, number of stages and of copies."""
    proposals = [Proposal((2, 2), "gpipe", m) for m in (1, 2, 8, 4)] + [
        Proposal((1,) * 4, "1f1b", 8),
        Proposal((4,), "gpipe", 1),
    ]
    found = best_plan(request(profile_of), proposals)
    assert (found.schedule_name, found.lengths, found.micro_batches) == ("1f1b", (1, 1, 1, 1), 8)
    assert [(row.schedule, row.stages, row.micro_batches) for row in found.candidates] == [
        ("1f1b", 4, 8),
        ("gpipe", 2, 8),
        ("gpipe", 1, 1),
    ]
    assert [row.step_s for row in found.candidates] == sorted(
        row.step_s for row in found.candidates
    )
    assert (
        simulate_plan(found, profile_of([1.0] * 4), cluster("4xV100-10GbE")).makespan
        == found.predicted.step_s
    )
    found.check()


def test_one_that_cannot_be_made_does_not_spoil_the_others(profile_of):
    """A planner may propose for a schedule that refuses these numbers."""
    found = best_plan(
        request(profile_of),
        [Proposal((1,) * 5, "1f1b", 8), Proposal((2, 2), "1f1b", 9), Proposal((2, 2), "1f1b", 8)],
    )
    assert found.lengths == (2, 2)
    with pytest.raises(
        PlanError,
        match="no schedule can be made for these numbers\n  9 micro-batches are more than the 8 samples",
    ):
        best_plan(request(profile_of), [Proposal((2, 2), "1f1b", 9)])


def test_a_planner_s_own_objective_is_kept(profile_of):
    """What its paper makes least, beside what simulation says."""
    own = Objective("slowest stage", 6.0, "s")
    found = plan_proposal(request(profile_of), Proposal((2, 2), "1f1b", 8, objective=own))
    assert found.objective == own
    assert found.predicted.lower_bound_s == 0
    assert found.predicted.gap is None


def test_what_does_not_fit_is_refused_with_what_it_lacks(profile_of):
    """Nearest first."""
    with pytest.raises(
        PlanError, match="nothing fits the memory of 4xV100-10GbE at batch 8"
    ) as caught:
        best_plan(
            request(profile_of, memory_limit=100),
            [Proposal((4,), "gpipe", 1), Proposal((1,) * 4, "1f1b", 8)],
        )
    assert "1f1b, 4 stages of 1, 1, 1, 1 layers" in str(caught.value).splitlines()[1]


def test_a_proposal_needs_the_layers_of_the_model(profile_of):
    """Another number is a mistake of the planner, and no plan."""
    with pytest.raises(Exception, match="sums to 3, but the model has 4 layers"):
        plan_proposal(request(profile_of), Proposal((2, 1), "1f1b", 8))

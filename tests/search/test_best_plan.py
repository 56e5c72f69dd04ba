"""From proposals to a plan."""

import pytest

from penstock.cluster.cluster import cluster
from penstock.errors import PlanError
from penstock.search.best_plan import best_plan, plan_proposal
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import simulate_plan
from penstock.synthesis.deadline import Deadline

TWO = cluster("2xV100-NVLink")


def request(profile_of, **options):
    """Four equal layers on four devices."""
    return PlanRequest(profile_of([1.0] * 4), cluster("4xV100-10GbE"), 8, **options)


def test_the_fastest_that_fits_is_planned_and_all_others_are_told_once_each(profile_of):
    """One row for each schedule, number of stages and of copies."""
    proposals = [Proposal((2, 2), "gpipe", m) for m in (1, 2, 8, 4)] + [
        Proposal((1,) * 4, "1f1b", 8),
        Proposal((4,), "gpipe", 1),
    ]
    chosen_plan = best_plan(request(profile_of), proposals)
    assert (chosen_plan.schedule_name, chosen_plan.lengths, chosen_plan.micro_batches) == (
        "1f1b",
        (1, 1, 1, 1),
        8,
    )
    assert [(row.schedule, row.stages, row.micro_batches) for row in chosen_plan.candidates] == [
        ("1f1b", 4, 8),
        ("gpipe", 2, 8),
        ("gpipe", 1, 1),
    ]
    assert [row.step_s for row in chosen_plan.candidates] == sorted(
        row.step_s for row in chosen_plan.candidates
    )
    assert (
        simulate_plan(chosen_plan, profile_of([1.0] * 4), cluster("4xV100-10GbE")).makespan
        == chosen_plan.predicted.step_s
    )
    chosen_plan.check()


def test_one_that_cannot_be_made_does_not_spoil_the_others(profile_of):
    """A planner may propose for a schedule that refuses these numbers."""
    chosen_plan = best_plan(
        request(profile_of),
        [Proposal((1,) * 5, "1f1b", 8), Proposal((2, 2), "1f1b", 9), Proposal((2, 2), "1f1b", 8)],
    )
    assert chosen_plan.lengths == (2, 2)
    with pytest.raises(
        PlanError,
        match="no schedule can be made for these numbers\n  9 micro-batches are more than the 8 samples",
    ):
        best_plan(request(profile_of), [Proposal((2, 2), "1f1b", 9)])


def test_a_planner_s_own_objective_is_kept(profile_of):
    """What its paper makes least, beside what simulation says."""
    objective = Objective("slowest stage", 6.0, "s")
    chosen_plan = plan_proposal(
        request(profile_of), Proposal((2, 2), "1f1b", 8, objective=objective)
    )
    assert chosen_plan.objective == objective
    assert chosen_plan.predicted.lower_bound_s == 0
    assert chosen_plan.predicted.gap is None


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


def test_a_time_limit_ends_the_proposals_once_one_fits_and_the_plan_says_so(profile_of):
    """What does not fit is no plan: the next proposal is tried although the time is up."""
    slow, fast = Proposal((4,), "gpipe", 1), Proposal((1,) * 4, "1f1b", 8)
    late = request(profile_of, deadline=Deadline(0))
    result = best_plan(late, [slow, fast])
    assert result.lengths == (4,)
    assert result.search_note.startswith("search cut short by the clock, at time_limit_s")
    assert best_plan(late, [Proposal((1,) * 5, "1f1b", 8), fast]).lengths == (1, 1, 1, 1)
    in_time = best_plan(request(profile_of, deadline=Deadline(1000)), [slow, fast])
    assert (in_time.lengths, in_time.search_note) == ((1, 1, 1, 1), "")
    assert best_plan(late, [fast]).search_note == ""


def test_what_does_not_fit_is_in_no_table_of_a_plan(profile_of):
    """Only proposals that fit compete, and a slower one that fits is chosen."""
    full = Proposal((1, 3), "gpipe", 8, recompute="never")
    lean = Proposal((2, 2), "1f1b", 8, recompute="always")
    profile = profile_of([1.0] * 4, parameters=100)
    limit = max(plan_proposal(PlanRequest(profile, TWO, 8), lean).predicted.peak_memory)
    result = best_plan(PlanRequest(profile, TWO, 8, memory_limit=limit), [full, lean])
    assert [row.lengths for row in result.candidates] == [(2, 2)]
    assert result.recompute == "always"


def test_rows_that_differ_only_in_the_recompute_are_one_kind_and_the_fastest_is_shown(profile_of):
    """The selection of the chosen plan is searched again at fine precision."""
    proposals = [
        Proposal((2, 2), "1f1b", 8, recompute=recompute) for recompute in ("always", "never")
    ]
    result = best_plan(request(profile_of), proposals)
    assert [row.recompute for row in result.candidates] == ["never"]
    selective = Proposal((2, 2), "gpipe", 8, recompute="selective")
    profile = profile_of([1.0, 1.1, 1.2, 1.3], parameters=0)
    tight = PlanRequest(profile, TWO, 8, memory_limit=1300)
    (coarse,) = evaluate(instantiate(tight, selective))
    assert plan_proposal(tight, selective).predicted.step_s <= coarse.step_s

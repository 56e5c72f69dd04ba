"""Lower bounds: below every schedule that fits, and what they take into account."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from tests.synthesis.requests import best_of_zoo, problem_of, problems

from penstock.simulate.costs import Costs
from penstock.synthesis.bound import lower_bound, preemptive
from penstock.synthesis.problem import Constraints
from penstock.synthesis.synthesise import Settings, synthesise


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(problems(stages=(2, 4), micro_batches=6, whole=False))
def test_no_schedule_of_the_zoo_that_fits_is_below_it(request_):
    """Where messages stay on a rank, they take no time in either."""
    costs, micro_batches, constraints = request_
    problem = problem_of(costs, micro_batches, constraints)
    zoo = best_of_zoo(costs, micro_batches, problem.routes, constraints.memory_limit)
    for name, makespan in zoo.items():
        if name != "bpipe":  # it holds activations on other ranks
            assert lower_bound(problem) <= makespan * (1 + 1e-9), name


@pytest.mark.parametrize(
    ("placement", "inside"),
    [("v", [1]), ("interleaved", []), ("linear", []), ("bidirectional", [])],
)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_messages_between_ranks_count_and_those_inside_do_not(placement, inside, direction):
    """Stages 1 and 2 of a V are on one rank."""
    costs = Costs(forward=(1.0,) * 4, backward=(2.0,) * 4, transfer=0.5)
    problem = problem_of(costs, 4, Constraints(placement))
    alone = lower_bound(problem)
    for boundary in range(3):
        seconds = list(getattr(problem.costs, direction))
        seconds[boundary] = 100.0
        slower = replace(problem.costs, **{direction: tuple(seconds)})
        bound = lower_bound(replace(problem, costs=slower))
        assert (bound == alone) == (boundary in inside)
        assert bound == alone or bound >= 100


@pytest.mark.parametrize(
    ("micro_batches", "expected"), [(1, 4 * 3 + 0.5), (4, 4 * 3 + 3 * 3 + 0.5), (8, 12 + 21 + 0.5)]
)
def test_equal_stages_have_the_bound_of_one_forward_one_backward(micro_batches, expected):
    """The last stage cannot start before three forwards, nor the first end before its W and U."""
    costs = Costs(forward=(1.0,) * 4, backward=(2.0,) * 4, update=(0.5,) * 4)
    problem = problem_of(costs, micro_batches, Constraints("linear", split=False))
    assert lower_bound(problem) == pytest.approx(expected)


def test_tight_memory_raises_the_bound_of_the_rank_that_is_tight():
    """With one micro-batch at a time on rank 0, each takes the whole way up and back."""
    costs = Costs(forward=(1.0,) * 3, backward=(2.0,) * 3)
    free = lower_bound(problem_of(costs, 6, Constraints("linear", split=False)))
    tight = lower_bound(problem_of(costs, 6, Constraints("linear", (1, 6, 6), split=False)))
    assert free == pytest.approx(9 + 5 * 3)
    assert tight == pytest.approx(6 * 9)


def test_a_preemptive_machine_takes_the_longest_tail_first():
    """An op is interrupted by one with a longer tail, and ops of no seconds do not count."""
    assert preemptive([]) == 0
    assert preemptive([(9.0, 0.0, 9.0)]) == 0
    assert preemptive([(0.0, 4.0, 1.0), (1.0, 2.0, 6.0)]) == 9
    assert preemptive([(2.0, 1.0, 0.0), (5.0, 1.0, 3.0)]) == 9


def test_the_bound_of_any_placement_is_the_least_of_all():
    """A placement that is not the best so far may have the lower bound: its programs may yet be
    shorter.
    """
    # Without a search the best schedule is a V of 45.5 s; bounds are 39.5 s for a V, 36 s in turn.
    costs = Costs(
        forward=(0.5, 1.0, 2.0, 0.5), backward=(1.0, 2.0, 4.0, 1.0), transfer=(3.0, 0.5, 3.0)
    )
    settings_any = Settings(placement="any", ranks=2, budget_s=0.0)
    found = synthesise(costs, 4, settings_any)
    bounds = {
        placement: lower_bound(problem_of(costs, 4, Constraints(placement, ranks=2)))
        for placement in ("interleaved", "v")
    }
    least = min(bounds.values())
    assert bounds[found.placement] > least
    assert found.lower_bound == least
    assert found.gap == pytest.approx(found.makespan / least - 1)

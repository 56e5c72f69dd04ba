"""Schedules of the zoo that fit a problem: their options, their memory, their limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.synthesis.requests import PLACED, held, problem_of

from penstock.schedule.catalogue import schedule, schedules
from penstock.simulate.costs import Costs
from penstock.synthesis.problem import Constraints
from penstock.synthesis.zoo import candidates, fits, peak_memory

COSTS = Costs(forward=(1.0, 2.0, 3.0, 4.0), activation_bytes=(1.0, 10.0, 100.0, 1000.0))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "naive", "eager-1f1b"])
def test_peaks_are_those_of_activations_added_up_op_by_op(name):
    """In bytes where costs have them, else in micro-batches; a limit may be met exactly."""
    problem = problem_of(COSTS, 6, Constraints("linear"))
    case = schedule(name, 4, 6)
    peaks = peak_memory(problem, case)
    assert list(peaks) == held(case, COSTS)
    assert fits(replace(problem, limits=peaks), case)
    for rank in range(4):
        limits = list(peaks)
        limits[rank] -= 0.5
        assert not fits(replace(problem, limits=tuple(limits)), case)
    counted = problem_of(Costs(forward=COSTS.forward), 6, Constraints("linear"))
    assert peak_memory(counted, case) == case_peaks(case)


def test_a_limit_that_is_met_up_to_rounding_is_met():
    """Three times 0.1 is 0.30000000000000004 in floats."""
    costs = Costs(forward=(1.0, 1.0), activation_bytes=(0.1, 0.1))
    gpipe = schedule("gpipe", 2, 3)
    assert fits(problem_of(costs, 3, Constraints("linear", 0.3)), gpipe)
    assert not fits(problem_of(costs, 3, Constraints("linear", 0.2999)), gpipe)


def case_peaks(case):
    """Return the micro-batches in flight of every rank."""
    return tuple(map(float, held(case, Costs(forward=(1.0,) * case.stages))))


@pytest.mark.parametrize("placement", PLACED)
def test_candidates_stand_on_the_routes_of_the_problem_and_fit_and_are_unlike(placement):
    """All synchronous ones without slices, each program once."""
    free = problem_of(COSTS, 4, Constraints(placement))
    schedules = list(candidates(free))
    assert len({case.programs for case in schedules}) == len(schedules)
    for case in schedules:
        assert case.synchronous
        assert case.slicing is None
        routes = {
            tuple(case.placement[stage, m] for stage in range(4)) for m in range(case.micro_batches)
        }
        assert routes == set(free.routes)
    tight = [max(case_peaks(case)) for case in schedules]
    counted = Costs(forward=COSTS.forward)
    for limit in set(tight):
        problem = problem_of(counted, 4, Constraints(placement, limit))
        names = {case.name for case in candidates(problem)}
        expected = {
            case.name
            for case, peaks in zip(schedules, tight, strict=True)
            if peaks <= limit or max(peak_memory(problem, case)) <= limit
        }
        assert names == expected


def test_families_are_called_with_the_stages_of_a_rank():
    """Four stages on one rank are four chunks, or two waves; without halves, none that split."""
    ring = problem_of(Costs(forward=(1.0,) * 8), 8, Constraints("interleaved", ranks=2))
    result = {case.name: dict(case.options) for case in candidates(ring)}
    assert result["interleaved"]["chunks"] == 4
    single = problem_of(Costs(forward=(1.0,) * 8), 4, Constraints("interleaved", ranks=1))
    result = {case.name: dict(case.options) for case in candidates(single)}
    assert (result["interleaved"], result["hanayo"]) == ({"chunks": 8}, {"waves": 4})
    single = problem_of(Costs(forward=(1.0,) * 4), 4, Constraints("interleaved", ranks=1))
    assert {"waves": 2} in [dict(case.options) for case in candidates(single)]
    whole = problem_of(Costs(forward=(1.0,) * 4), 8, Constraints("linear", split=False))
    assert not any(case.splits_backward for case in candidates(whole))
    assert any(
        schedules()[case.name].splits_backward
        for case in candidates(problem_of(Costs(forward=(1.0,) * 4), 8, Constraints("linear")))
    )

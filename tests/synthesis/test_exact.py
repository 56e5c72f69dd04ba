"""The proof: ticks, splits of routes, and the optimum from bad programs."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from fractions import Fraction

import pytest
from tests.synthesis.reference import optimum
from tests.synthesis.requests import held, problem_of, random_problem

from penstock.schedule.op import Kind, Op, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.bound import lower_bound
from penstock.synthesis.exact import (
    MOST_TICKS,
    _decimal,
    _route_splits,
    in_ticks,
    prove,
    ticks_per_second,
)
from penstock.synthesis.problem import Constraints, StageCosts
from penstock.verify.verify import verify


def stage_costs(*forward, update=None):
    """Costs of stages with these forwards, and backwards that take twice as long."""
    return StageCosts.of(Costs(forward=forward, update=update), len(forward))


@pytest.mark.parametrize(
    ("forward", "most", "ticks"),
    [
        ((1.0, 2.0), 10.0, 1),
        ((0.5, 0.25), 10.0, 4),
        ((0.3, 0.6), 10.0, Fraction(10, 3)),
        ((0.1 + 0.2, 0.9), 10.0, Fraction(10, 3)),
        ((4.0, 6.0), 10.0, Fraction(1, 2)),
        ((0.0, 0.0), 10.0, 1),
        ((1.0, 2.0), 1e8, 1),
        ((1.0, 2.0), 1e9, Fraction(1, 10)),
        ((1 / 3, 2.0), 10.0, MOST_TICKS // 10),
    ],
)
def test_ticks_divide_all_seconds_if_they_are_few_enough(forward, most, ticks):
    """As long as possible; else as many as the makespan may have."""
    assert ticks_per_second(stage_costs(*forward), most) == ticks


def test_seconds_are_rounded_down_to_ticks_but_for_the_rounding_of_floats():
    """Every row; memory and its unit stay."""
    costs = StageCosts.of(
        Costs(
            forward=(0.1 + 0.2, 0.35),
            input_grad=(0.19, 0.1),
            weight_grad=(0.2, 0.29),
            update=(0.05, 0.11),
            transfer=(0.4,),
            transfer_back=(0.59,),
            activation_bytes=(3.0, 5.0),
        ),
        2,
    )
    ticks = in_ticks(costs, Fraction(10))
    assert ticks.forward == (3, 3)
    assert ticks.input_grad == (1, 1)
    assert ticks.weight_grad == (2, 2)
    assert ticks.backward == (3, 3)
    assert ticks.update == (0, 1)
    assert (ticks.up, ticks.down) == ((4,), (5,))
    assert (ticks.memory, ticks.in_bytes) == ((3.0, 5.0), True)
    assert _decimal(0.1 + 0.2) == Fraction(3, 10)
    assert _decimal(1e-7) == Fraction(1, 10**7)


@pytest.mark.parametrize("micro_batches", [2, 5, 6])
def test_all_numbers_of_micro_batches_on_two_routes_are_tried_the_most_even_first(micro_batches):
    """A single route has them all."""
    splits = _route_splits(random_problem(0, "bidirectional", micro_batches))
    assert sorted(splits) == [(n, micro_batches - n) for n in range(1, micro_batches)]
    distances = [abs(first - second) for first, second in splits]
    assert distances == sorted(distances)
    assert _route_splits(random_problem(0, "v", micro_batches)) == [(micro_batches,)]


def one_at_a_time(problem):
    """Programs that run one micro-batch after the other, on the routes in turn."""
    rows = [[] for _ in range(problem.ranks)]
    for m in range(problem.micro_batches):
        route = problem.routes[m % len(problem.routes)]
        for kind, stages in (
            (Kind.F, range(problem.stages)),
            (Kind.B, range(problem.stages)[::-1]),
        ):
            for stage in stages:
                rows[route[stage]].append(Op(kind, stage, m))
    for rank, row in enumerate(rows):
        stages = {copy % problem.stages for copy in problem.copies_of_rank[rank]}
        row.extend(Op(Kind.U, stage, 1) for stage in sorted(stages))
    return Schedule(tuple(map(tuple, rows)), "one at a time")


@pytest.mark.parametrize(
    ("placement", "seed", "micro_batches"),
    [
        ("linear", 1, 3),
        ("linear", 2, 3),
        ("linear", 5, 3),
        ("v", 3, 2),
        ("v", 4, 2),
        ("interleaved", 1, 2),
        ("bidirectional", 2, 2),
        ("bidirectional", 3, 3),
        # Messages that wait for others of their link, and updates on both ranks of a stage.
        ("v", 5, 3),
        ("interleaved", 0, 2),
        ("bidirectional", 6, 3),
        # Messages of two kinds that would leave in another order than that of their ops.
        ("v", 19, 3),
        # The second number of micro-batches on the routes is better than the first.
        ("bidirectional", 11, 3),
    ],
)
def test_the_optimum_is_proved_from_programs_that_run_one_micro_batch_at_a_time(
    placement, seed, micro_batches
):
    """Unlike stages, links, updates and limits; the model of the reference has no heads, no tails
    and no order of micro-batches.
    """
    most_transfer = 7 if seed % 2 else 3
    problem = random_problem(seed, placement, micro_batches, most_transfer=most_transfer)
    bad = one_at_a_time(problem)
    costs = problem.costs.costs()
    makespan = simulate_schedule(bad, costs).makespan
    proof = prove(problem, bad, makespan, time.monotonic() + 60, seed)
    least = optimum(problem)
    assert proof.lower_bound == pytest.approx(least)
    if proof.schedule is None:
        assert makespan == pytest.approx(least)
        return
    verify(proof.schedule)
    assert simulate_schedule(proof.schedule, costs).makespan == pytest.approx(least)
    sizes = replace(costs, activation_bytes=problem.costs.memory)
    for peak, limit in zip(held(proof.schedule, sizes), problem.limits, strict=True):
        assert peak <= limit


def test_without_splits_all_backwards_are_whole():
    """Although halves would be shorter."""
    costs = Costs(forward=(1.0, 1.0), input_grad=(1.0, 1.0), weight_grad=(1.0, 1.0))
    for split, least in ((False, 9.0), (True, 7.0)):
        problem = problem_of(costs, 2, Constraints("linear", split=split))
        bad = one_at_a_time(problem)
        makespan = simulate_schedule(bad, costs).makespan
        proof = prove(problem, bad, makespan, time.monotonic() + 60)
        assert proof.lower_bound == pytest.approx(least)
        assert any(op.kind is Kind.W for op in proof.schedule.ops) == split


@pytest.mark.parametrize(("seed", "least"), [(2, 101), (7, 82)])
def test_messages_of_a_link_leave_one_after_the_other_in_the_order_of_their_ops(seed, least):
    """They are up to 7 s long; the reference has these optima. If messages of one kind could
    overlap, the first would be 96 s, and in any order of two kinds the second 80 s.
    """
    problem = random_problem(seed, "interleaved", 3, most_transfer=7)
    bad = one_at_a_time(problem)
    makespan = simulate_schedule(bad, problem.costs.costs()).makespan
    proof = prove(problem, bad, makespan, time.monotonic() + 60)
    assert proof.lower_bound == pytest.approx(least)


@pytest.mark.parametrize(
    ("placement", "seed", "micro_batches", "unit_s"),
    [("v", 14, 2, 1.0), ("v", 19, 3, 1.0), ("v", 14, 2, 1 / 7)],
)
def test_an_optimal_schedule_is_proved_and_not_replaced(placement, seed, micro_batches, unit_s):
    """Only a shorter one is returned; here the bound alone does not prove it. Sevenths are rounded
    down to ticks, which makes no schedule shorter.
    """
    problem = random_problem(seed, placement, micro_batches, most_transfer=7)
    rows = [tuple(seconds * unit_s for seconds in row) for row in problem.costs.seconds]
    names = ("forward", "input_grad", "weight_grad", "backward", "update", "up", "down")
    scaled = replace(problem.costs, **dict(zip(names, rows, strict=True)))
    problem = replace(problem, costs=scaled)
    costs, bad = problem.costs.costs(), one_at_a_time(problem)
    makespan = simulate_schedule(bad, costs).makespan
    best = prove(problem, bad, makespan, time.monotonic() + 60).schedule
    makespan = simulate_schedule(best, costs).makespan
    assert lower_bound(problem) < makespan - 0.5 * unit_s
    proof = prove(problem, best, makespan, time.monotonic() + 60)
    assert (proof.schedule, proof.lower_bound) == (None, pytest.approx(makespan))


def test_a_schedule_at_the_bound_and_a_time_that_is_up_need_no_model():
    """The bound is then that of the problem; no schedule is shorter."""
    costs = Costs(forward=(1.0,), backward=(2.0,))
    problem = problem_of(costs, 2, Constraints("linear"))
    proof = prove(problem, one_at_a_time(problem), 6.0, math.inf)
    assert (proof.schedule, proof.lower_bound) == (None, 6.0)
    costs = Costs(forward=(0.5, 0.5), backward=(1.0, 1.0))
    problem = problem_of(costs, 2, Constraints("linear"))
    bad = one_at_a_time(problem)
    makespan = simulate_schedule(bad, costs).makespan
    proof = prove(problem, bad, makespan, time.monotonic() - 1)
    assert proof.schedule is None
    assert 0 < proof.lower_bound < makespan


@pytest.mark.parametrize("limits", [(1, 3), (2, 1), (3, 2), (2.5, 1.5)])
def test_limits_of_whole_micro_batches_are_those_of_a_sum(limits):
    """Where all backwards are split, each forward waits for an earlier micro-batch's release; of a
    limit between two numbers the smaller counts.
    """
    costs = Costs(forward=(1.0, 2.0), input_grad=(1.0, 1.0), weight_grad=(2.0, 1.0))
    problem = problem_of(costs, 3, Constraints("linear", limits))
    bad = one_at_a_time(problem)
    makespan = simulate_schedule(bad, costs).makespan
    proof = prove(problem, bad, makespan, time.monotonic() + 60)
    assert proof.lower_bound == pytest.approx(optimum(problem))
    for peak, limit in zip(held(proof.schedule or bad, costs), limits, strict=True):
        assert peak <= limit


def test_a_limit_that_is_met_up_to_rounding_holds_the_optimum():
    """Three times 0.1 is 0.30000000000000004 in floats."""
    costs = Costs(forward=(1.0, 1.0), backward=(1.0, 3.0), activation_bytes=(0.1, 0.1))
    problem = problem_of(costs, 3, Constraints("linear", 0.3, split=False))
    bad = one_at_a_time(problem)
    assert simulate_schedule(bad, costs).makespan == 18
    proof = prove(problem, bad, 18.0, time.monotonic() + 60)
    assert proof.schedule is not None
    assert simulate_schedule(proof.schedule, costs).makespan == proof.lower_bound == 14


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_stages_that_take_no_time_stay_within_their_limits(micro_batches):
    """A micro-batch ends, and another one starts, at the same second: it had 6 bytes of 3."""
    problem = random_problem(10, "bidirectional", micro_batches)
    assert 0.0 in problem.costs.forward
    bad = one_at_a_time(problem)
    costs = problem.costs.costs()
    makespan = simulate_schedule(bad, costs).makespan
    proof = prove(problem, bad, makespan, time.monotonic() + 60)
    verify(proof.schedule)
    sizes = replace(costs, activation_bytes=problem.costs.memory)
    for peak, limit in zip(held(proof.schedule, sizes), problem.limits, strict=True):
        assert peak <= limit
    assert proof.lower_bound <= simulate_schedule(proof.schedule, costs).makespan < makespan

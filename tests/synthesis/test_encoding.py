"""Encoded programs: routes, halves that are joined, and what cannot be encoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.synthesis.requests import problem_of

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.arrays import make_workspace, max_ops
from penstock.synthesis.encoding import decode, encode, join_halves, route_counts
from penstock.synthesis.evaluate import evaluate
from penstock.synthesis.problem import Constraints
from penstock.verify.verify import verify


@pytest.mark.parametrize(
    ("placement", "name", "numbers", "counts"),
    [
        ("linear", "1f1b", (4, 6), (6,)),
        ("linear", "1f1b", (4, 5), None),
        ("linear", "1f1b", (4, 7), None),
        ("linear", "zb-v", (4, 6), None),
        ("linear", "chimera", (4, 6), None),
        ("v", "zb-v", (4, 6), (6,)),
        ("interleaved", "zb-v", (4, 6), None),
        ("bidirectional", "chimera", (4, 6), (3, 3)),
        ("bidirectional", "1f1b", (4, 6), None),
        ("bidirectional", "gems", (4, 6), (3, 3)),
    ],
)
def test_a_schedule_has_counts_only_on_the_routes_of_the_problem(placement, name, numbers, counts):
    """Every route must have a micro-batch, and all numbers must agree."""
    problem = problem_of(Costs(forward=(1.0,) * 4), 6, Constraints(placement))
    assert route_counts(problem, schedule(name, *numbers)) == counts


def test_a_schedule_with_a_rank_more_or_less_has_no_counts():
    """Also if that rank has no op: the arrays have a row per rank of the problem."""
    problem = problem_of(Costs(forward=(1.0,) * 2), 1, Constraints("linear"))
    case = schedule("1f1b", 2, 1)
    assert route_counts(problem, case) == (1,)
    assert route_counts(problem, replace(case, programs=(*case.programs, ()))) is None
    ring = problem_of(Costs(forward=(1.0,) * 2), 1, Constraints("interleaved", ranks=1))
    assert route_counts(ring, case) is None


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_updates_of_two_routes_are_at_the_end_of_every_rank(micro_batches):
    """The copies of a stage update together, so that no copy can use an idle time of its own."""
    costs = Costs(
        forward=(1.0,) * 4, backward=(2.0,) * 4, update=(0.0, 1.0, 0.5, 0.0), transfer=1.0
    )
    problem = problem_of(costs, micro_batches, Constraints("bidirectional"))
    case = schedule("chimera", 4, micro_batches)
    spec = problem.spec(route_counts(problem, case))
    encoding, work = encode(problem, spec, case), make_workspace(spec)
    decoded = decode(problem, spec, encoding, work)
    for program in decoded.programs:
        kinds = [op.kind for op in program]
        assert kinds.index(Kind.U) == len(program) - 2
    assert simulate_schedule(decoded, costs).makespan == evaluate(spec, encoding, work)


def test_evictions_and_more_ops_than_the_search_has_cannot_be_encoded():
    """A rank has three ops per micro-batch of each copy at most."""
    problem = problem_of(Costs(forward=(1.0,) * 4), 8, Constraints("linear"))
    spec = problem.spec((8,))
    assert max_ops(spec) == 24
    assert encode(problem, spec, schedule("bpipe", 4, 8)) is None
    assert encode(problem, spec, schedule("seq1f1b", 4, 8, slices=2)) is None
    assert encode(problem, spec, schedule("pipedream", 4, 8)) is None
    encoding = encode(problem, spec, schedule("zb-h1", 4, 8))
    assert encoding.lengths.tolist() == [
        sum(op.kind is not Kind.U for op in program) for program in schedule("zb-h1", 4, 8).programs
    ]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([("linear", "zb-h1"), ("v", "zb-v"), ("linear", "zb-h2")]),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.sampled_from([0.75, 1.0, 1.25]),
)
def test_halves_are_joined_only_where_that_takes_no_longer(case, forward, whole):
    """Where a whole backward costs more than its halves, all stay; the programs stay sound."""
    placement, name = case
    costs = Costs(
        forward=tuple(map(float, forward)),
        input_grad=tuple(map(float, forward)),
        weight_grad=tuple(map(float, forward)),
        backward=tuple(2.0 * whole * seconds for seconds in forward),
        transfer=0.5,
    )
    problem = problem_of(costs, 5, Constraints(placement))
    spec = problem.spec((5,))
    encoding, work = encode(problem, spec, schedule(name, 4, 5)), make_workspace(spec)
    before_s, ops = evaluate(spec, encoding, work), int(encoding.lengths.sum())
    join_halves(spec, encoding, work)
    joined = decode(problem, spec, encoding, work)
    verify(joined)
    after_s = simulate_schedule(joined, costs).makespan
    assert after_s <= before_s * (1 + 1e-9)
    assert evaluate(spec, encoding, work) == pytest.approx(after_s)
    count = sum(op.kind is Kind.B for op in joined.ops)
    assert int(encoding.lengths.sum()) == ops - count
    assert count == 0 if whole > 1 else count > 0


def test_a_program_with_more_ops_than_its_micro_batches_have_cannot_be_encoded():
    """The arrays have no space for them; such a schedule is not sound anyway."""
    problem = problem_of(Costs(forward=(1.0,)), 1, Constraints("linear"))
    spec = problem.spec((1,))
    assert encode(problem, spec, Schedule.parse("0F0 0I0 0W0 0B0 0U1")) is None
    assert encode(problem, spec, Schedule.parse("0F0 0I0 0W0 0U1")).lengths.tolist() == [3]


def test_halves_stay_where_a_whole_backward_delays_the_batch_by_little():
    """One second of 404: the gradient of micro-batch 1 would leave after its weight gradient."""
    costs = Costs(forward=(200.0, 1.0), input_grad=(1.0, 1.0), weight_grad=(1.0, 1.0))
    problem = problem_of(costs, 2, Constraints("linear"))
    spec = problem.spec((2,))
    text = "0F0 0F1 0I0 0W0 0I1 0W1 0U1\n1F0 1I0 1W0 1F1 1I1 1W1 1U1"
    encoding, work = encode(problem, spec, Schedule.parse(text)), make_workspace(spec)
    assert evaluate(spec, encoding, work) == 404
    join_halves(spec, encoding, work)
    assert evaluate(spec, encoding, work) == 404


def test_updates_come_in_the_first_idle_time_that_is_long_enough_or_at_the_end():
    """Rank 0 of a V is idle for the gradient of stage 0 after its stage 3 is done."""
    text = "0F0 3F0 3B0 0B0 0U1 3U1\n1F0 2F0 2B0 1B0 1U1 2U1"
    for update, program in ((0.0, "3U1 0B0 0U1"), (1.0, "3U1 0B0 0U1"), (9.0, "0B0 0U1 3U1")):
        costs = Costs(forward=(1.0,) * 4, backward=(2.0,) * 4, update=(0.0, 0.0, 0.0, update))
        problem = problem_of(costs, 1, Constraints("v"))
        spec = problem.spec((1,))
        encoding = encode(problem, spec, Schedule.parse(text))
        row = " ".join(map(str, decode(problem, spec, encoding, make_workspace(spec)).programs[0]))
        assert row == f"0F0 3F0 3B0 {program}"


@pytest.mark.parametrize(
    ("idle_s", "program"),
    [
        (2.0, "0B0 0U1 2U1 4U1"),
        (3.0, "2U1 0B0 0U1 4U1"),
        (5.0, "2U1 0B0 0U1 4U1"),
        (6.0, "2U1 4U1 0B0 0U1"),
    ],
)
def test_updates_in_the_same_idle_time_take_one_after_the_other(idle_s, program):
    """Before its last backward rank 0 waits `idle_s` seconds for stage 1, and an update takes 3."""
    costs = Costs(
        forward=(1.0,) * 6,
        backward=(1.0, idle_s, 1.0, 1.0, 1.0, 1.0),
        update=(0.0, 0.0, 3.0, 0.0, 3.0, 0.0),
    )
    text = "0F0 2F0 4F0 4B0 2B0 0B0 0U1 2U1 4U1\n1F0 3F0 5F0 5B0 3B0 1B0 1U1 3U1 5U1"
    problem = problem_of(costs, 1, Constraints("interleaved", ranks=2))
    spec = problem.spec((1,))
    encoding, work = encode(problem, spec, Schedule.parse(text)), make_workspace(spec)
    decoded = decode(problem, spec, encoding, work)
    assert " ".join(map(str, decoded.programs[0])) == f"0F0 2F0 4F0 4B0 2B0 {program}"
    assert simulate_schedule(decoded, costs).makespan == evaluate(spec, encoding, work)


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("0F0 0I0 0W0 0F1 0I1 0W1 0U1", "0F0 0B0 0F1 0B1 0U1"),
        # The W that follows I1 is that of I0; the last one follows no I.
        ("0F0 0F1 0I0 0I1 0W0 0W1 0U1", "0F0 0F1 0I0 0I1 0W0 0W1 0U1"),
        # Once no W waits, the next pair is joined; a W at the end of the row belongs to no I there.
        ("0F0 0F1 0F2 0I0 0I1 0W0 0W1 0I2 0W2 0U1", "0F0 0F1 0F2 0I0 0I1 0W0 0W1 0B2 0U1"),
        ("0F0 0I0 0F1 0W0 0I1 0W1 0U1", "0F0 0I0 0F1 0W0 0B1 0U1"),
        # A whole backward between them is no half.
        ("0F0 0F1 0F2 0I0 0B1 0W0 0I2 0W2 0U1", "0F0 0F1 0F2 0I0 0B1 0W0 0B2 0U1"),
    ],
)
def test_only_the_two_halves_of_one_micro_batch_are_joined(text, joined):
    """Codes have no micro-batch: the k-th W belongs to the k-th I. One rank never waits, so that
    all such pairs are joined.
    """
    case = Schedule.parse(text)
    costs = Costs(forward=(1.0,), input_grad=(2.0,), weight_grad=(3.0,))
    problem = problem_of(costs, case.micro_batches, Constraints("linear"))
    spec = problem.spec((case.micro_batches,))
    encoding, work = encode(problem, spec, case), make_workspace(spec)
    join_halves(spec, encoding, work)
    (program,) = decode(problem, spec, encoding, work).programs
    assert " ".join(map(str, program)) == joined


@pytest.mark.parametrize("forward", [0.0, 1.0])
def test_a_whole_backward_that_costs_as_much_up_to_rounding_replaces_its_halves(forward):
    """0.1 + 0.7 is 0.7999999999999999 in floats, below 0.8; so is the makespan without forwards."""
    costs = Costs(forward=(forward,), input_grad=(0.1,), weight_grad=(0.7,), backward=(0.8,))
    problem = problem_of(costs, 1, Constraints("linear"))
    spec = problem.spec((1,))
    encoding, work = encode(problem, spec, schedule("zb-h1", 1, 1)), make_workspace(spec)
    join_halves(spec, encoding, work)
    assert str(decode(problem, spec, encoding, work)) == "rank 0 | 0F0 0B0 0U1"


def test_pairs_are_joined_one_by_one_where_all_together_take_too_long():
    """On rank 1 the gradient of micro-batch 1 must not wait for a weight gradient: with both pairs
    joined the batch would take 9 s. That of micro-batch 0 may wait.
    """
    costs = Costs(forward=(1.0, 1.0), input_grad=(1.0, 1.0), weight_grad=(1.0, 1.0))
    problem = problem_of(costs, 2, Constraints("linear"))
    spec = problem.spec((2,))
    text = "0F0 0F1 0I0 0W0 0I1 0W1 0U1\n1F0 1I0 1W0 1F1 1I1 1W1 1U1"
    encoding, work = encode(problem, spec, Schedule.parse(text)), make_workspace(spec)
    assert evaluate(spec, encoding, work) == 8
    join_halves(spec, encoding, work)
    assert evaluate(spec, encoding, work) == 8
    joined = decode(problem, spec, encoding, work)
    assert [" ".join(map(str, program)) for program in joined.programs] == [
        "0F0 0F1 0B0 0B1 0U1",
        "1F0 1B0 1F1 1I1 1W1 1U1",
    ]

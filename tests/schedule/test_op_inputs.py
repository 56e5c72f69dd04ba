"""What ops wait for by the rules, and the links that their values cross."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from tests.simulate.slow import rich_schedules

from penstock.errors import ScheduleError
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.op_inputs import OpInputs, number_keys
from penstock.schedule.rules import needs
from penstock.schedule.slicing import Slicing

TWO_RANKS = "0F0 0B0 0U1\n1F0 1B0 1U1"


def by_op(inputs: OpInputs, references) -> dict[str, str]:
    """References from op to op, by their texts."""
    ops = list(map(str, inputs.ops.all_ops()))
    return {ops[row]: ops[other] for row, other in enumerate(references.tolist()) if other >= 0}


def test_inputs_of_the_own_rank_are_left_out_and_values_of_others_cross_links():
    """Programs run in order, so that only what comes from another rank has to be waited for."""
    inputs = OpInputs(Schedule.parse(TWO_RANKS))
    assert by_op(inputs, inputs.first) == {"1F0": "0F0", "0B0": "1B0"}
    assert by_op(inputs, inputs.second) == {}
    assert by_op(inputs, inputs.consumer) == {"0F0": "1F0", "1B0": "0B0"}
    links = inputs.links[inputs.link[inputs.consumer >= 0]]
    assert links.tolist() == [[0, 1], [1, 0]]


def test_a_value_within_a_rank_has_a_source_but_no_link():
    """Two stages on one rank pass values on directly; memory still counts them as received."""
    inputs = OpInputs(Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1"))
    assert by_op(inputs, inputs.source) == {"1F0": "0F0", "0B0": "1B0"}
    assert len(inputs.links) == 0
    assert (inputs.link == -1).all()


@settings(max_examples=40)
@given(rich_schedules(3))
def test_inputs_and_consumers_are_those_of_the_rules_op_by_op(schedule):
    """Pairs, slices, copies and evictions too. An input on the own rank is left out if it precedes
    the op in its program, but not if the two are a pair, which starts together.
    """
    inputs, ops = OpInputs(schedule), schedule.ops
    ranks = inputs.ops.rank.tolist()
    row_of = {(rank, op): row for row, (rank, op) in enumerate(zip(ranks, ops, strict=True))}
    row_of_op = {op: row for (_, op), row in row_of.items() if op.kind not in ACTIVATION_MOVES}
    consumers, sources, waits = {}, {}, {row: set() for row in range(len(ops))}
    for row, (rank, op) in enumerate(zip(ranks, ops, strict=True)):
        if op.kind in ACTIVATION_MOVES:
            owner = schedule.placement[op.stage, op.micro_batch]
            if owner != rank:
                sender, receiver = row_of[owner, op], row
                if op.kind is Kind.L:
                    sender, receiver = receiver, sender
                consumers[sender] = receiver
                waits[receiver].add(sender)
            continue
        for alternatives in needs(op, schedule.stages, schedule.slicing):
            (other,) = (row_of_op[other] for other in alternatives if other in row_of_op)
            if ranks[other] != rank or other > row or (ops[other], op) in schedule.pairs:
                waits[row].add(other)
            if ops[other].stage != op.stage:
                sources[row] = other
                if ranks[other] != rank:
                    consumers[other] = row
    columns = (inputs.first, inputs.second, inputs.source, inputs.consumer)
    for row, (*both, source, consumer) in enumerate(zip(*map(list, columns), strict=True)):
        assert (sorted(waits[row])) == sorted(other for other in both if other >= 0)
        assert (source, consumer) == (sources.get(row, -1), consumers.get(row, -1))
        if consumer >= 0:
            assert inputs.links[inputs.link[row]].tolist() == [ranks[row], ranks[consumer]]
        else:
            assert inputs.link[row] == -1
    assert len(inputs.links) == len(
        {(ranks[row], ranks[other]) for row, other in consumers.items()}
    )


def test_an_op_may_have_a_third_input_if_one_is_behind_it():
    """It never starts, as `verify` reports with the ops that it waits for."""
    slices = replace(
        Schedule.parse("0B0 0F0 0F1 0B1\n1F0 1F1 1B1 1B0"), slicing=Slicing("tokens", ((0.5, 0.5),))
    )
    inputs = OpInputs(slices)
    assert {by_op(inputs, inputs.first)["0B0"], by_op(inputs, inputs.second)["0B0"]} == {
        "0F0",
        "1B0",
    }
    assert len(dependencies_of(slices).blocked) > 0


def test_an_op_whose_input_no_rank_runs_is_refused_by_name():
    """Else it would wait for ever, or start without its input."""
    with pytest.raises(ScheduleError, match="1F0 needs 0F0, which no rank runs"):
        OpInputs(Schedule.parse("0F1 0B1 0U1\n1F0 1F1 1B0 1B1 1U1"))


@pytest.mark.parametrize(
    ("text", "producer"),
    [
        ("0F0 0B0\n1F1", "0F0"),
        ("0F0\n1F0 1B0", "1B0"),
        ("0F0\n1F0 1B0\n0B0", "1B0"),
        # The op before the missing one, and the last of all ranks, are on the same rank.
        ("0F0 0F1 1F1 0U1 1U1", "0F0"),
        ("1F0 1B0\n0F0", "1B0"),
    ],
)
def test_a_value_without_a_consumer_on_the_rank_of_its_forward_is_refused(text, producer):
    """No op takes it, or the one that takes it is on another rank than the forward."""
    with pytest.raises(ScheduleError, match=f"no op takes the output of {producer} for stage"):
        OpInputs(Schedule.parse(text))


@pytest.mark.parametrize(
    "pairs",
    [{("0F0", "0B0")}, {("0F1", "0B0"), ("0B0", "0B1")}, {("0B1", "0F2")}, {("0B0", "0F1")}],
)
def test_a_pair_is_two_adjacent_ops_of_one_rank_and_of_no_other_pair(pairs):
    """Of 0F0 0F1 0B0 0B1 on one rank, and 0F2 0B2 on the next."""
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n0F2 0B2")
    assert OpInputs(replace(schedule, pairs={(Op.parse("0F1"), Op.parse("0B0"))})).pairs == [1]
    pairs = {(Op.parse(first), Op.parse(second)) for first, second in pairs}
    with pytest.raises(ScheduleError, match="custom is not valid"):
        OpInputs(replace(schedule, pairs=pairs))


def test_the_second_op_of_a_pair_waits_for_the_first_if_it_needs_its_value():
    """Though it follows it in its program: the two start together, which then is impossible."""
    paired = Schedule.parse("0F0&0B0 0U1")
    inputs = OpInputs(paired)
    assert by_op(inputs, inputs.first) == {"0B0": "0F0"}
    alone = OpInputs(replace(paired, pairs=frozenset()))
    assert by_op(alone, alone.first) == {}


@pytest.mark.parametrize(
    "rows",
    [
        "0F0 0E0 0E0 0L0 0L0 0B0\n0E0 0E0 0L0 0L0",
        "0F0 0E0 0L0 0B0\n0E0 0L0\n0E0 0L0",
        "0F0 0E0 0L0 0B0",
        "0F0 0B0\n0E0 0L0",
        "0F0 0E0 0L0 0B0\n0E0",
        "0F0 0F1 0E0 0L0 0B0 0B1\n0E1 0L1",
    ],
)
def test_activations_move_between_two_ranks_once(rows):
    """Every half without its other half, or with two of them, is a message without an end."""
    with pytest.raises(ScheduleError, match="custom is not valid"):
        OpInputs(Schedule.parse(rows))


@pytest.mark.parametrize("bound", [8, 10**9])
def test_keys_are_numbered_in_ascending_order_whatever_their_bound(bound):
    """Few possible keys are counted in a table, many are sorted: links must not depend on which."""
    unique, positions = number_keys(np.array([5, 2, 5, 7]), bound)
    assert unique.tolist() == [2, 5, 7]
    assert positions.tolist() == [1, 0, 1, 2]

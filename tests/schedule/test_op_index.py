"""Rows of ops by kind, stage and micro-batch, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from tests.schedule.custom_schedules import custom_schedules, custom_streams

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.op_index import OpIndex
from penstock.schedule.slicing import Slicing

BATCHED = (Kind.F, Kind.B, Kind.I, Kind.W)
GRADIENTS = (Kind.B, Kind.I)


@settings(max_examples=30)
@given(custom_schedules() | custom_streams(most=2))
def test_rows_are_where_the_ops_are(schedule):
    """By op, by key, and those of neighbour stages."""
    index = OpIndex(schedule)
    row_of = {op: row for row, op in enumerate(schedule.ops)}
    assert index.numbers.tolist() == list(range(schedule.slices))
    for kind in Kind:
        rows = [row for row, op in enumerate(schedule.ops) if op.kind is kind]
        assert index.kinds[kind].tolist() == rows
    for row, op in enumerate(schedule.ops):
        column = 0 if op.kind is Kind.U else op.micro_batch
        assert index.column[row] == column
        assert index.key[row] == op.stage * schedule.slices + column
        if op.kind in BATCHED:
            assert index.of_op(op) == row
    backwards = np.array([row for row, op in enumerate(schedule.ops) if op.kind in GRADIENTS])
    for offset in (-1, 0, 1):
        rows, neighbours = index.on_neighbour(backwards, offset, GRADIENTS)
        expected = []
        for row in backwards:
            _, stage, number = schedule.ops[row]
            candidates = [row_of.get(Op(kind, stage + offset, number), -1) for kind in GRADIENTS]
            if 0 <= stage + offset < schedule.stages:
                expected.append((row, max(candidates)))
        assert list(zip(rows.tolist(), neighbours.tolist(), strict=True)) == expected


def test_numbers_may_have_gaps_and_exceed_the_number_of_ops():
    """A part of a batch keeps its numbers."""
    index = OpIndex(Schedule.parse("0F7 0F90 0B90 0B7 0U1"))
    assert index.numbers.tolist() == [7, 90]
    assert index.column.tolist() == [0, 1, 1, 0, 0]
    assert index.of_op(Op(Kind.B, 0, 90)) == 2
    # As many as the ops, and one less: the second has rows for all numbers up to it.
    assert OpIndex(Schedule.parse("0F3 0B3 0U1")).numbers.tolist() == [3]
    assert OpIndex(Schedule.parse("0F2 0B2 0U1")).numbers.tolist() == [0, 1, 2]


@pytest.mark.parametrize("text", ["", "rank 0 |", "0U1\n1U1"])
def test_programs_without_micro_batches_have_an_index_without_numbers(text):
    """Nothing is missing from them; `verify` says what is wrong."""
    index = OpIndex(Schedule.parse(text))
    assert (index.numbers.tolist(), index.column.tolist()) == ([], [0] * len(index.ops))


@pytest.mark.parametrize(
    "op",
    [Op(Kind.U, 0, 1), Op(Kind.F, 2, 0), Op(Kind.F, -1, 0), Op(Kind.F, 0, 2), Op(Kind.W, 0, 0)],
)
def test_an_op_that_no_rank_runs_has_no_row(op):
    """Beyond either end of the stages or the micro-batches, of another kind, or a U."""
    with pytest.raises(ScheduleError, match="gpipe is not valid: `verify` reports why"):
        OpIndex(schedule("gpipe", 2, 2)).of_op(op)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1B0 1U1\n0F0 0B0 0U1", "rank 0: 1B0 needs 1F0, which no rank runs"),
        ("0F0 0B0 0U1\n1F0 1U1", "rank 0: 0B0 needs 1B0 or 1I0, which no rank runs"),
        ("0F0 0F0 0B0 0U1", "mine is not valid: 0F0 occurs 2 times"),
        ("0F0 0B1 0B0 0U1", "rank 0: 0B1 needs 0F1, which no rank runs"),
        ("0F0 0W0 0U1", "rank 0: 0W0 needs 0I0, which no rank runs"),
        ("1F0 1B0", "rank 0: 1F0 needs 0F0, which no rank runs"),
        ("0F0 0B0 2F0 2B0 0U1", "rank 0: no op takes the output of 0F0 for stage 1"),
        ("0F0 0B0 0B0 0U1", "mine is not valid: 0B0 occurs 2 times"),
        ("0F0 0E5 0B0 0U1", "mine is not valid: `verify` reports why"),
        # An E or L is on two ranks, which is not twice too often.
        ("0F0 0E0 0L0 0B0 0U1\n0L0", "mine is not valid: `verify` reports why"),
        ("0F7 0F90 0B7 0B8 0U1", "rank 0: 0B8 needs 0F8, which no rank runs"),
    ],
)
def test_programs_without_an_op_or_with_one_twice_are_refused_by_its_name(text, message):
    """Rank, op, and what it needs."""
    with pytest.raises(ScheduleError, match=message):
        dependencies_of(Schedule.parse(text, "mine"))


def test_negative_numbers_and_slices_without_shares_are_refused():
    """They would count from the end of an array."""
    for op in (Op(Kind.F, -1, 0), Op(Kind.F, 0, -1)):
        with pytest.raises(ScheduleError, match=r"verify|needs|takes"):
            OpIndex(Schedule(((op, Op(Kind.F, 0, 0), Op(Kind.B, 0, 0)),)))
    for rows in ([Op(Kind.F, 0, -1)], [Op(Kind.F, -1, 0), *Schedule.parse("0F0 1B0 0B0").ops]):
        with pytest.raises(ScheduleError, match=r"verify|needs|takes"):
            OpIndex(Schedule((tuple(rows),)))
    for shares in ((0.5, 0.25, 0.25), (1.0,)):
        cut = replace(schedule("gpipe", 2, 2), slicing=Slicing("samples", (shares,)))
        with pytest.raises(ScheduleError, match="gpipe is not valid"):
            OpIndex(cut)


def test_a_missing_slice_is_named_with_the_op_that_needs_it():
    """With tokens, the forward of a slice needs that of the slice before it."""
    slicing = Slicing("tokens", ((0.5, 0.5),))
    alone = replace(Schedule.parse("0F1 0B1 0U1"), slicing=slicing)
    with pytest.raises(ScheduleError, match="rank 0: 0F1 needs 0F0, which no rank runs"):
        dependencies_of(alone)

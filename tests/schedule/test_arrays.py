"""Programs as arrays: every column and every sum over it, op by op."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.slow import rich_schedules

from penstock.errors import ScheduleError
from penstock.schedule.arrays import OpArrays, op_arrays, runs
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing


def share_of(schedule, op):
    """How much of a micro-batch an op is for."""
    if schedule.slicing is None or op.kind is Kind.U:
        return Fraction(1)
    return Fraction(schedule.slicing.share[op.micro_batch])


def slow_changes(schedule):
    """Per op, by how many activations it changes what its rank holds: on the partner's rank an
    eviction brings them.
    """
    changes = []
    for rank, program in enumerate(schedule.programs):
        for op in program:
            change = {"F": 1, "B": -1, "W": -1, "E": -1, "L": 1}.get(op.kind.value, 0)
            forward_rank = schedule.placement.get((op.stage, op.micro_batch))
            on_partner = op.kind in (Kind.E, Kind.L) and forward_rank != rank
            changes.append((-change if on_partner else change, on_partner))
    return changes


def slow_peaks(schedule):
    """Add and subtract in the order of the programs: peaks per stage, and per rank."""
    by_stage, by_rank = [Fraction(0)] * schedule.stages, [Fraction(0)] * schedule.ranks
    changes = iter(slow_changes(schedule))
    for rank, program in enumerate(schedule.programs):
        total, of_stage = Fraction(0), defaultdict(Fraction)
        for op in program:
            change, on_partner = next(changes)
            total += change * share_of(schedule, op)
            by_rank[rank] = max(by_rank[rank], total)
            if not on_partner:
                of_stage[op.stage] += change * share_of(schedule, op)
                by_stage[op.stage] = max(by_stage[op.stage], of_stage[op.stage])
    return tuple(map(float, by_stage)), tuple(map(float, by_rank))


@settings(max_examples=20)
@given(rich_schedules(4))
def test_columns_and_peaks_are_those_of_the_ops_one_by_one(schedule):
    """Slices count as their shares, evictions on both ranks, and stages of a rank each alone."""
    arrays = op_arrays(schedule)
    assert op_arrays(schedule) is arrays
    assert arrays.all_ops() == list(schedule.ops)
    assert [arrays.op(row) for row in range(len(arrays))] == list(schedule.ops)
    ranks = [rank for rank, program in enumerate(schedule.programs) for _ in program]
    assert arrays.rank.tolist() == ranks
    sizes = [len(program) for program in schedule.programs]
    assert np.diff(arrays.first).tolist() == sizes
    assert (arrays.first[0], len(arrays), arrays.stages) == (0, sum(sizes), schedule.stages)
    changes = slow_changes(schedule)
    assert arrays.activation_change.tolist() == [change for change, _ in changes]
    assert arrays.on_partner.tolist() == [on_partner for _, on_partner in changes]
    shares = [float(share_of(schedule, op)) for op in schedule.ops]
    assert (arrays.share is None) == (schedule.slicing is None)
    if arrays.share is not None:
        assert arrays.share.tolist() == shares
    in_flight = [change * share for (change, _), share in zip(changes, shares, strict=True)]
    assert arrays.in_flight_change.tolist() == in_flight
    assert arrays.in_flight == slow_peaks(schedule)
    for kinds in ((Kind.F,), (Kind.B, Kind.W), (Kind.U, Kind.E, Kind.L), ()):
        assert arrays.of_kind(*kinds).tolist() == [op.kind in kinds for op in schedule.ops]


@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [("1f1b", 5, {}), ("interleaved", 6, {"chunks": 3}), ("zb-v", 6, {}), ("chimera", 4, {})],
)
def test_peaks_belong_to_their_stages(name, stages, options):
    """Early stages hold more than late ones, whether a rank has one stage or several."""
    family_schedule = schedule(name, stages, 8, **options)
    assert op_arrays(family_schedule).in_flight == slow_peaks(family_schedule)


def test_ranks_without_ops_and_schedules_without_any_have_peaks_too():
    """What verify reports as missing must not end in an index that is out of range."""
    arrays = OpArrays.of([[], [Op(Kind.F, 0, 0)], []])
    assert (arrays.in_flight, arrays.first.tolist()) == (((1,), (0, 1, 0)), [0, 0, 1, 1])
    empty = OpArrays.of([[], []])
    assert (empty.in_flight, empty.stages, len(empty)) == (((), (0, 0)), 0, 0)
    assert OpArrays.of([]).in_flight == ((), ())


def test_slices_that_the_shares_do_not_have_count_as_whole():
    """A program may name a slice too many: verify says so, and needs the arrays for it."""
    schedule = replace(
        Schedule.parse("0F0 0F1 0F2 0B2 0B1 0B0 0U1"), slicing=Slicing("samples", ((0.25, 0.75),))
    )
    arrays = op_arrays(schedule)
    assert arrays.share.tolist() == [0.25, 0.75, 1, 1, 0.75, 0.25, 1]
    assert arrays.in_flight == ((2,), (2,))


def test_shares_that_add_up_to_a_micro_batch_are_a_whole_number():
    """Ten tenths are 0.9999999999999999 in floats: a peak of 1 must not print as that."""
    programs = Schedule((tuple(Op(Kind.F, 0, n) for n in range(10)),))
    cut = replace(programs, slicing=Slicing("samples", ((0.1,) * 10,)))
    assert op_arrays(cut).in_flight == ((1,), (1,))


@pytest.mark.parametrize("rows", [[], [0], [1, 2], [2, 3, 4], [0, 1, 2, 3, 4]])
def test_some_of_the_ops_keep_their_ranks_and_order(rows):
    """Ranks without ops, at the start, between and at the end, have an empty range of rows."""
    programs = [[], Schedule.parse("0F0 0B0").ops, [], Schedule.parse("1F0 1B0 1U1").ops, []]
    arrays = OpArrays.of(programs)
    part = arrays.at(np.array(rows, int))
    assert part.all_ops() == [arrays.op(row) for row in rows]
    assert part.rank.tolist() == [arrays.rank[row] for row in rows]
    for rank in range(len(programs)):
        rows_of_rank = range(part.first[rank], part.first[rank + 1])
        assert list(rows_of_rank) == [i for i, row in enumerate(rows) if arrays.rank[row] == rank]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2)))
def test_runs_begin_where_a_key_differs_from_the_one_before(keys):
    """The first key begins one; nothing has none."""
    expected = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    assert runs(np.array(keys, int)).tolist() == expected


def test_numbers_of_more_than_64_bits_are_refused():
    """A line of text may have them."""
    for op in (Op(Kind.F, 0, 2**63), Op(Kind.F, 2**63, 0)):
        with pytest.raises(ScheduleError, match="numbers of at most 18 digits"):
            OpArrays.of([[op]])
    longest = Op(Kind.F, 10**18 - 1, 10**18 - 1)
    assert OpArrays.of([[longest]]).all_ops() == [longest]


def test_a_peak_is_never_below_nothing():
    """Programs that are not checked yet may release what they never held."""
    arrays = OpArrays.of([[Op(Kind.B, 0, 0)], [Op(Kind.W, 1, 0), Op(Kind.F, 1, 1)], []])
    assert arrays.in_flight == ((0, 0), (0, 0, 0))

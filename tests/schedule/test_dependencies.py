"""The dependencies behind verify, lower, draw and simulate."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_streams
from tests.simulate.slow import Slow, rich_schedules

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import acyclic_dependencies_of, dependencies_of
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.schedule.unit_times import unit_times


def random_units(schedule, rng):
    """Seconds of every op, in the order of `schedule.ops`; whole numbers, so that sums are exact."""
    units = [float(rng.randint(0, 9)) for _ in schedule.ops]
    for i, pair in enumerate(pairwise(schedule.ops)):
        if pair in schedule.pairs:
            units[i] = units[i + 1] = units[i] + units[i + 1]
    return units


@given(rich_schedules(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_an_op_starts_when_all_that_it_waits_for_has_ended(schedule, rng):
    """Against the slow simulator: a predecessor too few or too many, and verify, lower or simulate
    would be wrong without any error.
    """
    first = dependencies_of(schedule).ops.first.tolist()
    units = random_units(schedule, rng)
    slow = Slow(schedule, lambda rank, index: units[first[rank] + index], lambda op: 0.0)
    times = {first[rank] + index: time for (rank, index), time in slow.times.items()}
    for row, predecessors in enumerate(dependencies_of(schedule).predecessors()):
        start, _ = times[row]
        assert start == max((times[before][1] for before in predecessors), default=0.0)


@given(rich_schedules(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_unit_times_are_those_of_the_slow_simulator(schedule, rng):
    """Families place their updates and evictions by these moments."""
    units = [float(rng.randint(0, 9)) for _ in schedule.ops]
    of_op = iter(units)
    times = unit_times(schedule, lambda op: next(of_op))
    for i, pair in enumerate(pairwise(schedule.ops)):
        if pair in schedule.pairs:
            units[i] = units[i + 1] = units[i] + units[i + 1]
    first = dependencies_of(schedule).ops.first.tolist()
    slow = Slow(schedule, lambda rank, index: units[first[rank] + index], lambda op: 0.0)
    for (rank, index), expected in slow.times.items():
        row = first[rank] + index
        assert (times.start[row], times.end[row]) == expected


@given(rich_schedules())
@settings(deadline=None, max_examples=60)
def test_the_order_of_a_sound_schedule_has_everything_after_what_it_waits_for(schedule):
    """Times are computed along this order: one op too early and its times are wrong without any
    error.
    """
    dependencies = dependencies_of(schedule)
    order = dependencies.graph.order.tolist()
    place = {row: i for i, row in enumerate(order)}
    assert dependencies.blocked.tolist() == []
    assert sorted(order) == list(range(len(schedule.ops)))
    for row, predecessors in enumerate(dependencies.predecessors()):
        assert all(place[before] < place[row] for before in predecessors)


@given(rich_schedules())
@settings(deadline=None, max_examples=60)
def test_executors_wait_for_no_more_than_pairs_do(schedule):
    """An executor runs the ops of a pair one after the other: each waits for its own inputs only."""
    dependencies = dependencies_of(schedule)
    paired = set(dependencies.pairs.tolist())
    together, alone = dependencies.predecessors(), dependencies.predecessors(pairs=False)
    for row, (most, least) in enumerate(zip(together, alone, strict=True)):
        if row in paired:
            assert set(least) <= set(most)
        elif row - 1 in paired:
            assert row - 1 in least
        else:
            assert least == most


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0B0", r"rank 0: 0B0 needs 0F0, which no rank runs"),
        ("1F0", r"rank 0: 1F0 needs 0F0, which no rank runs"),
        ("0F0 1F0 0B0", r"rank 0: 0B0 needs 1B0 or 1I0, which no rank runs"),
        ("0F0\n1F0\n0W0", r"rank 2: 0W0 needs 0I0, which no rank runs"),
    ],
)
def test_an_op_whose_predecessor_nobody_runs_is_refused(text, message):
    """Else it would start at second 0 as if it needed nothing, and the makespan would be too short."""
    with pytest.raises(ScheduleError, match=message):
        dependencies_of(Schedule.parse(text))


def test_copies_of_a_stage_start_their_update_together():
    """U synchronises gradients: it cannot end on one rank before the other's last gradient exists,
    which it once did.
    """
    schedule = Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0F2 0B2 0U1")
    times = unit_times(schedule, lambda op: 1.0)
    updates = [row for row, op in enumerate(schedule.ops) if op.kind is Kind.U]
    assert times.start[updates].tolist() == [4.0, 4.0]
    assert times.end[updates].tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("0F0 0B0 0U1 0U1\n0F1 0B1 0U1", [[2, 6]]),
        ("0F0 0B0 0U1\n0F1 0B1 0U1 0U1", [[2, 5]]),
        ("0F0 0B0 0U1 0U1\n0F1 0B1 0U1 0U1\n0F2 0B2 0U1", [[2, 6, 10]]),
    ],
)
def test_a_rank_with_an_update_twice_takes_part_in_it_once(text, groups):
    """`verify` refuses the programs; a rank that waited for itself would hide that as a cycle."""
    dependencies = dependencies_of(Schedule.parse(text))
    assert list(dependencies.groups()) == groups
    assert dependencies.blocked.tolist() == []


def test_copies_of_two_stages_that_update_in_opposite_orders_wait_for_each_other_forever():
    """Each rank would stand in the other's second collective; found before anything runs."""
    schedule = Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 1U1 0U1")
    blocked = dependencies_of(schedule).blocked.tolist()
    assert sorted(str(schedule.ops[row]) for row in blocked) == [
        "0U1",
        "0U1",
        "1U1",
        "1U1",
    ]


@given(custom_streams())
@settings(deadline=None, max_examples=60)
def test_streams_finish(schedule):
    """Whether a U waits for all copies, for none, or for an earlier U: none of it may hang what
    is sound.
    """
    assert acyclic_dependencies_of(schedule).blocked.tolist() == []


def waits_of(schedule, rank, op):
    """The ops of other ranks that an op waits for, each as text with its rank."""
    dependencies = dependencies_of(schedule)
    rank_of = dependencies.ops.rank.tolist()
    row = list(zip(rank_of, schedule.ops, strict=True)).index((rank, op))
    return sorted(
        f"{rank_of[other]} {schedule.ops[other]}"
        for other in dependencies.predecessors()[row]
        if rank_of[other] != rank
    )


@pytest.mark.parametrize(
    ("length", "distance", "expected"),
    [
        (1, 0, [["1 0B1"], ["1 0B3"], ["1 0B5"], ["1 0B7"]]),
        (2, 0, [[], ["1 0B3"], [], ["1 0B7"]]),
        (1, 1, [[], ["1 0U1"], ["1 0U2"], ["1 0U3"]]),
        (2, 1, [[], [], [], ["1 0U2"]]),
        (1, 2, [[], [], ["1 0U1"], ["1 0U2"]]),
        (3, 0, [[], [], ["1 0B5"], []]),
        (5, 0, [[], [], [], []]),
    ],
)
def test_copies_that_have_waves_wait_for_each_other_only_at_their_ends(length, distance, expected):
    """HetPipe by hand: the last U of a wave runs with the others' or waits for theirs `distance`
    waves earlier, and no other op waits.
    """
    rows = (
        "0F0 0B0 0U1 0F2 0B2 0U2 0F4 0B4 0U3 0F6 0B6 0U4",
        "0F1 0B1 0U1 0F3 0B3 0U2 0F5 0B5 0U3 0F7 0B7 0U4",
    )
    changed_schedule = replace(
        Schedule.parse("\n".join(rows)),
        synchronous=False,
        stream=Stream(8, "hetpipe", waves=Waves(length, distance)),
    )
    assert [
        waits_of(changed_schedule, 0, Op.parse(f"0U{version}")) for version in (1, 2, 3, 4)
    ] == expected


def test_the_end_of_a_wave_that_one_copy_does_not_come_to_waits_for_nobody():
    """Batches that leave a virtual worker one short: the end of a stream is not the end of a wave."""
    hetpipe = schedule("hetpipe", 1, 1, in_flight=1, batches=3)
    assert waits_of(hetpipe, 0, Op.parse("0U1")) == ["1 0B1"]
    assert waits_of(hetpipe, 0, Op.parse("0U2")) == []


def test_an_op_with_two_inputs_waits_for_both():
    """Slice 1 of stage 1 needs slice 0, which is behind it, beside its activation, which arrives."""
    slices = replace(Schedule.parse("0F0 0F1\n1F1 1F0"), slicing=Slicing("tokens", ((0.5, 0.5),)))
    dependencies = dependencies_of(slices)
    assert [str(dependencies.ops.op(row)) for row in dependencies.blocked] == ["1F1", "1F0"]
    in_turn = replace(slices, programs=Schedule.parse("0F0 0F1\n1F0 1F1").programs)
    assert dependencies_of(in_turn).blocked.tolist() == []


def test_ops_of_slices_count_for_their_micro_batch():
    """Memory and drawings read the column of an op; without slices it is its own number."""
    cut = dependencies_of(schedule("autopipe", 1, 3, sliced=2))
    texts = " ".join(map(str, cut.ops.all_ops()))
    assert texts == "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3 0F4 0B4 0U1"
    assert cut.column.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 0]
    assert (cut.numbers.tolist(), cut.micro_batches) == ([0, 1, 2], 3)
    part = dependencies_of(Schedule.parse("0F4 0B4 0F6 0B6"))
    assert (part.column.tolist(), part.numbers.tolist()) == ([0, 0, 1, 1], [4, 6])


def test_the_second_op_of_a_pair_cannot_wait_for_the_first():
    """They start together; alone in its program, the same op follows from its place."""
    text = "0F0{}0B0 0U1"
    assert not len(dependencies_of(Schedule.parse(text.format(" "))).blocked)
    paired = dependencies_of(Schedule.parse(text.format("&")))
    assert [str(paired.ops.op(row)) for row in paired.blocked] == ["0F0", "0B0", "0U1"]


def test_a_deadlock_names_the_op_of_each_rank_and_counts_further_ranks():
    """Four ranks are named; `verify` reports the cycle."""
    rows = [f"{stage}B0 {stage}F0" for stage in range(6)]
    for count in (4, 5, 6):
        case = Schedule.parse("\n".join(rows[:count]), "mine")
        with pytest.raises(ScheduleError) as caught:
            acyclic_dependencies_of(case)
        named = ", ".join(f"rank {rank} at {rank}B0" for rank in range(4))
        more = f" and {count - 4} more" if count > 4 else ""
        assert str(caught.value) == (
            f"mine deadlocks: it stops with {named}{more}; `verify` reports the cycle"
        )


@pytest.mark.parametrize(
    ("text", "producer"),
    [("0F0 0B0\n1F1", "0F0"), ("0F0\n1F0 1B0", "1B0"), ("0F0\n1F0 1B0\n0B0", "1B0")],
)
def test_a_value_goes_to_the_rank_of_the_forward_of_its_stage(text, producer):
    """A consumer on another rank has no activations there."""
    with pytest.raises(ScheduleError, match=f"no op takes the output of {producer} for stage"):
        dependencies_of(Schedule.parse(text))


def test_a_pair_is_of_two_ops_of_one_rank():
    """The last op of a rank and the first of the next one are neighbours in the arrays only."""
    copies = Schedule.parse("0F0 0B0\n0F1 0B1")
    pair = copies.programs[0][-1], copies.programs[1][0]
    assert dependencies_of(copies).pairs.tolist() == []
    with pytest.raises(ScheduleError, match="custom is not valid"):
        dependencies_of(replace(copies, pairs={pair}))


@pytest.mark.parametrize(
    "text",
    ["0F0 0E0 0E0 0L0 0L0 0B0\n0E0 0E0 0L0 0L0", "0F0 0E0 0L0 0B0\n0L0", "0F0 0E0 0L0 0B0 0U1"],
)
def test_activations_move_once_between_two_ranks(text):
    """A second eviction, or one half of it alone, would be a message without a receiver."""
    with pytest.raises(ScheduleError, match="custom is not valid"):
        dependencies_of(Schedule.parse(text))

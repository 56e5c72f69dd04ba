"""Updates: right after the last gradient of a batch."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.schedule.updates import awaited_update, with_batch_updates, with_updates
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify


def test_with_a_split_backward_the_update_waits_for_the_weights_part():
    """I is not the end of the gradients."""
    ops = [Op.parse(word) for word in ["0F0", "1F0", "1I0", "0I0", "0W0", "1W0"]]
    assert " ".join(map(str, with_updates(ops))) == "0F0 1F0 1I0 0I0 0W0 0U1 1W0 1U1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 1F0", "0F0 1F0"),
        ("0F0 0F1 0B0 1F0", "0F0 0F1 0B0 0U1 1F0"),
        ("0F0 0B0 0F1", "0F0 0B0 0U1 0F1"),
        ("0F0 0B0 0L1 1E0", "0F0 0B0 0U1 0L1 1E0"),
        ("", ""),
    ],
)
def test_only_a_backward_has_an_update_behind_it(text, expected):
    """Forwards alone have no gradients, and other ops of the stage may follow its last backward."""
    program = with_updates([Op.parse(word) for word in text.split()])
    assert " ".join(map(str, program)) == expected


@given(
    custom_schedules(synchronous=True).filter(
        lambda schedule: all(len(ranks) == 1 for ranks in schedule.ranks_of_stage)
    )
)
@settings(deadline=None, max_examples=40)
def test_any_schedule_without_copies_is_sound_with_its_updates_put_back(schedule):
    """Every stage gets one, after all of its gradients."""
    bare = [[op for op in program if op.kind is not Kind.U] for program in schedule.programs]
    back = dataclasses.replace(schedule, programs=tuple(map(with_updates, bare)))
    verify(back)
    assert [[op for op in program if op.kind is not Kind.U] for program in back.programs] == bare


@pytest.mark.parametrize("name", ["interleaved", "breadth-first", "hanayo"])
@given(st.integers(1, 5), st.integers(1, 3), st.floats(0, 9))
@settings(deadline=None, max_examples=20)
def test_early_updates_cost_no_time_even_where_they_are_long(name, ranks, rounds, seconds):
    """They stand between other stages' backwards, which wait for other ranks anyway: the reason why
    they may stand there.
    """
    family_schedule = schedule(name, 2 * ranks, rounds * ranks)
    late = [
        [op for op in row if op.kind is not Kind.U] + [op for op in row if op.kind is Kind.U]
        for row in family_schedule.programs
    ]
    costs = Costs(forward=1, backward=2, update=seconds)
    makespan = simulate_schedule(
        dataclasses.replace(family_schedule, programs=tuple(map(tuple, late))), costs
    ).makespan
    assert simulate_schedule(family_schedule, costs).makespan == pytest.approx(makespan)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_in_a_stream_every_batch_has_its_update_right_after_its_last_gradient(
    batches, size, stages, rng
):
    """Whatever the order of a rank's stages and of the gradients in a batch; versions count each
    stage's batches.
    """
    rows = {
        stage: [
            n
            for batch in range(batches)
            for n in rng.sample(range(batch * size, (batch + 1) * size), size)
        ]
        for stage in range(stages)
    }
    order = [stage for stage in range(stages) for _ in rows[stage]]
    rng.shuffle(order)
    ops = [Op(Kind.F, stage, n) for stage in rows for n in rows[stage]]
    ops += [Op(Kind.B, stage, rows[stage].pop(0)) for stage in order]
    program = with_batch_updates(ops, size)
    assert [op for op in program if op.kind is not Kind.U] == ops
    for stage in range(stages):
        updates = [
            (program[place - 1], op)
            for place, op in enumerate(program)
            if op.kind is Kind.U and op.stage == stage
        ]
        last = [op for op in program if op.kind is Kind.B and op.stage == stage][size - 1 :: size]
        assert updates == [
            (op, Op(Kind.U, stage, version)) for version, op in enumerate(last, start=1)
        ]


def test_in_a_stream_a_split_backward_ends_with_its_weights_part():
    """I passes a gradient on and makes none."""
    (ops,) = Schedule.parse("0F0 0F1 0I0 0I1 0W0 0W1 0F2 0I2 0W2 0F3 0B3").programs
    assert (
        " ".join(map(str, with_batch_updates(ops, 2)))
        == "0F0 0F1 0I0 0I1 0W0 0W1 0U1 0F2 0I2 0W2 0F3 0B3 0U2"
    )


def test_in_a_stream_a_copy_updates_as_often_as_it_has_batches():
    """Batches 1 and 3 of four: its own versions 1 and 2."""
    (ops,) = Schedule.parse("0F1 0F3 0B1 0B3").programs
    assert " ".join(map(str, with_batch_updates(ops, 1))) == "0F1 0F3 0B1 0U1 0B3 0U2"


def test_the_last_update_of_a_wave_waits_for_that_of_the_others_some_waves_earlier():
    """Inside a wave it waits for no other copy, and in the first waves there is none to wait for."""
    for length, distance in ((1, 0), (2, 0), (2, 1), (3, 2)):
        stream = Stream(12, waves=Waves(length, distance))
        for version in range(1, 13):
            update = Op(Kind.U, 1, version)
            awaited = version - length * distance
            expected = None
            if version % length == 0 and awaited > 0:
                expected = Op(Kind.U, 1, awaited)
            assert awaited_update(update, stream) == expected
    assert awaited_update(Op(Kind.U, 1, 3), None) == Op(Kind.U, 1, 3)
    assert awaited_update(Op(Kind.U, 1, 3), Stream(12)) == Op(Kind.U, 1, 3)

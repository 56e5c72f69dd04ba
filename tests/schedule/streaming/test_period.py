"""The period of streams: programs for any number of batches, and what has no period is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.streaming.period import period_of, with_batch_count, with_batches
from penstock.schedule.streaming.streams import Stream
from penstock.verify.verify import verify

STREAMS = [
    (name, {})
    for name, facts in schedules().items()
    if not facts.synchronous and not facts.needs_costs
]
OPTIONS = [
    ("pipedream", {"replicas": 2}),
    ("avgpipe", {"pipelines": 3}),
    ("hetpipe", {"virtual_workers": 3, "in_flight": 2}),
    ("hetpipe", {"virtual_workers": 4, "in_flight": 9, "distance": 2}),
]


def schedule_or_none(name, stages, size, **options):
    """The schedule, or None where its family refuses these numbers."""
    try:
        return schedule(name, stages, size, **options)
    except ScheduleError:
        return None


@pytest.mark.parametrize(("name", "options"), STREAMS + OPTIONS)
def test_any_number_of_batches_is_made_of_as_many_as_there_are_if_nothing_is_said(name, options):
    """The programs of a run are those that were checked, for any length of an epoch."""
    tried = 0
    for stages in range(1, 5 if options else 9):
        for size in range(1, 5 if options else 9):
            stream = schedule_or_none(name, stages, size, **options)
            for batches in {2, stream.batches - 1, stream.batches + 3} if stream else ():
                other = with_batch_count(stream, batches)
                assert (
                    other.programs
                    == schedule(name, stages, size, batches=batches, **options).programs
                )
                assert other.stream == replace(stream.stream, batches=batches)
                tried += 1
    assert tried > 20


@given(
    st.sampled_from(STREAMS + OPTIONS),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 9),
    st.integers(1, 20),
)
@settings(deadline=None, max_examples=80)
def test_fewer_and_more_batches_come_to_the_same_from_any_that_are_enough(
    case, stages, size, more, batches
):
    """From a longer stream too; and there and back again."""
    name, options = case
    stream = schedule_or_none(name, stages, size, **options)
    if stream is None:
        return
    longer = schedule(name, stages, size, batches=stream.batches + more, **options)
    other = with_batch_count(longer, batches)
    assert other == schedule(name, stages, size, batches=batches, **options)
    if batches >= stream.batches:
        assert with_batch_count(other, longer.batches) == longer
    assert longer.micro_batches == other.micro_batches == size


@pytest.mark.parametrize(
    ("name", "stages", "size", "batches", "loop"),
    [
        ("pipedream", 4, 1, 1, "0F3 0B0 0U1"),
        ("2bw", 2, 3, 1, "0F1 0B0 0F2 0B1 0F3 0B2 0U1"),
        ("avgpipe", 1, 2, 1, "0F0 0B0 0F1 0B1 0U1"),
        ("hetpipe", 2, 1, 2, "0F2 0B0 0U1"),
        ("wpipe", 2, 1, 1, "1F0 1B0 1U1 0F1 0B0 0U1"),
    ],
)
def test_the_loop_is_as_short_as_it_can_be(name, stages, size, batches, loop):
    """Runs and memory tables are made loop by loop."""
    period = period_of(schedule(name, stages, size))
    assert (period.batches, " ".join(map(str, period.loops[0]))) == (batches, loop)
    assert sum(len(head) for head in period.heads) + sum(map(len, period.loops)) > 0


def test_the_endless_program_goes_on_with_every_loop_and_every_version():
    """Far from the beginning too."""
    wpipe = schedule("wpipe", 4, 2)
    period = period_of(wpipe)
    far = list(islice(period.ops(0), 10 * 1000))[-10:]
    assert {op.kind for op in far} == {Kind.F, Kind.B, Kind.U}
    assert {op.stage for op in far} == {0, 2}
    assert all(abs(op.micro_batch - 2000) < 8 for op in far if op.kind is not Kind.U)
    assert all(abs(op.micro_batch - 1000) < 4 for op in far if op.kind is Kind.U)
    assert period.updates == (Counter({0: 1, 2: 1}), Counter({1: 1, 3: 1}))


def test_an_update_belongs_to_the_batch_of_the_gradient_before_it():
    """Its own number is a version, which where copies have every other batch is no batch."""
    (program,) = Schedule.parse("0F2 0F3 0B2 0B3 0U1 0F6 0F7 0B6 0B7 0U2").programs
    assert [batch for _, batch in with_batches(program, 2)] == [1] * 5 + [3] * 5


@pytest.mark.parametrize(
    ("head", "loop"),
    [
        ("", "0F0 0B0 0U1"),
        ("0F0", "0F1 0B0 0U1"),
        ("0F0 0F1", "0F3 0F2 0I0 0I1 0W0 0W1 0U1"),
        ("0F0 1F0 0F1", "1F1 1B0 1U1 0F2 0B0 0U1"),
        ("", "0F0 0F1 0B0 0U1 0B1 0U2"),
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_hand_written_streams_are_found_to_repeat(head, loop, twice):
    """No family makes them: split backwards, forwards out of order, a loop of two batches, a rank
    without ops.
    """
    ops, numbers = (
        list(map(Op.parse, loop.split())),
        max(int(word[2:]) for word in loop.split() if word[1] == "F"),
    )
    first = min(int(word[2:]) for word in loop.split() if word[1] in "BW")
    batches_per_loop = 1 + max(int(word[2:]) for word in loop.split() if word[1] in "BW") - first
    versions = Counter(op.stage for op in ops if op.kind is Kind.U)
    size = batches_per_loop // max(versions.values())
    batches = 12
    total = batches * size

    def at(round_):
        return [
            op._replace(
                micro_batch=op.micro_batch
                + round_ * (versions[op.stage] if op.kind is Kind.U else batches_per_loop)
            )
            for op in ops
        ]

    endless = [
        *map(Op.parse, head.split()),
        *(op for round_ in range(batches + numbers) for op in at(round_)),
    ]
    program = tuple(op for op, batch in with_batches(endless, size) if batch < batches)
    assert sum(op.kind is Kind.F for op in program) == total * (1 + max(op.stage for op in program))
    rows = (program, ()) if twice else (program,)
    schedule = Schedule(rows, "mine", synchronous=False, stream=Stream(batches))
    period = period_of(schedule)
    assert (schedule.micro_batches, period.batches) == (size, max(versions.values()))
    assert with_batch_count(with_batch_count(schedule, 30), batches) == schedule
    assert with_batch_count(schedule, 30).slices == 30 * size
    verify(with_batch_count(schedule, 29))


def test_two_loops_and_the_end_of_the_stream_are_enough():
    """The loop is then as long as half of the batches, rounded down: the longest that is tried."""
    text = "0F0 0B0 0U1 0F1 0B1 0U2 0F2 0B2 0U3"
    stream = replace(Schedule.parse(text, synchronous=False), stream=Stream(3))
    assert period_of(stream).batches == 1
    assert str(with_batch_count(stream, 4)) == f"rank 0 | {text} 0F3 0B3 0U4"


def test_what_repeats_only_once_is_not_known_to_repeat():
    """Two equal batches do not prove that a third is equal: the loop must occur at least twice."""
    with pytest.raises(
        ScheduleError,
        match="pipedream does not repeat itself from batch to batch within its 4 batches, so it cannot be "
        "continued: give programs of more batches, in which the same order of ops occurs twice",
    ):
        period_of(schedule("pipedream", 4, 1, batches=4))
    assert with_batch_count(schedule("pipedream", 4, 1, batches=4), 2) == schedule(
        "pipedream", 4, 1, batches=2
    )


@pytest.mark.parametrize("place", [30, 33, 35, 38])
def test_one_op_out_of_turn_is_found_wherever_it_stands(place):
    """A loop that holds nearly everywhere would give an unverified run. (An op out of turn that is
    followed by two loops belongs to the head.)
    """
    pipedream = schedule("pipedream", 1, 2, batches=8)
    program = list(pipedream.programs[0])
    program[place], program[place + 1] = program[place + 1], program[place]
    with pytest.raises(
        ScheduleError,
        match="custom does not repeat itself from batch to batch within its 8 batches",
    ):
        period_of(Schedule((tuple(program),), synchronous=False, stream=pipedream.stream))


@pytest.mark.parametrize("text", ["", "rank 0 |\nrank 1 |", "0B0 0U1", "0U1 0U2 0U3 0U4"])
def test_programs_without_forwards_do_not_repeat(text):
    """There is no loop to continue; the message is the usual one."""
    with pytest.raises(ScheduleError, match="custom does not repeat itself"):
        period_of(replace(Schedule.parse(text), stream=Stream(4)))


def test_only_streams_of_plain_ops_go_on():
    """A flush ends the programs, and pairs and slices of later batches are not defined."""
    with pytest.raises(
        ScheduleError,
        match="1f1b is not a stream: its programs are those of one batch, after which they end",
    ):
        with_batch_count(schedule("1f1b", 2, 2), 2)
    assert with_batch_count(schedule("1f1b", 2, 2), 1) == schedule("1f1b", 2, 2)
    pipedream = schedule("pipedream", 1, 1)
    for other in (
        replace(pipedream, pairs=frozenset({(Op.parse("0F1"), Op.parse("0B0"))})),
        replace(pipedream, slicing=Slicing.even("tokens", 1, pipedream.slices)),
    ):
        with pytest.raises(
            ScheduleError,
            match="pipedream pairs ops or cuts micro-batches into slices: only a stream of plain ops can be continued",
        ):
            with_batch_count(other, 2)


def test_options_say_the_number_of_batches_that_there_are():
    """Name, numbers and options make the same schedule again."""
    longer = with_batch_count(schedule("pipedream", 2, 1, batches=9), 30)
    assert dict(longer.options) == {"batches": 30}
    assert (
        schedule(longer.name, longer.stages, longer.micro_batches, **dict(longer.options)) == longer
    )


def test_thousands_of_batches_are_made_and_known_again():
    """Once per op and no more: a quadratic search would take minutes here."""
    longer = with_batch_count(schedule("2bw", 4, 4), 3000)
    assert len(longer.ops) == 3000 * 4 * 9
    other = replace(longer)
    assert period_of(other).batches == 1
    # Runs ask for it again and again.
    assert period_of(other) is period_of(other)


def test_every_op_is_of_the_batch_of_its_number_whatever_came_before():
    """An update is of the batch of its stage's last gradient, which a W or a B completes; before
    any gradient, of the first batch.
    """
    text = "0U1 0F2 0F3 0I2 0W2 1F2 1F3 0B3 0U2 0F0 1U1 0F1 0B0 0I1 0U3 0W1 0U4"
    rows = with_batches(Schedule.parse(text).programs[0], 2)
    assert [batch for _, batch in rows] == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]

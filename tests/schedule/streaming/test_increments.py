"""Increments of streams: run one after the other, they are the programs."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import FAMILIES, schedule
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.lower import (
    Direction,
    Transfer,
    last_dependencies,
    lower,
    messages,
    output_message,
)
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streaming.increments import StreamIncrements
from penstock.schedule.streaming.period import with_batch_count, with_batches
from penstock.schedule.streaming.streams import Stream

STREAMS = [name for name, entry in FAMILIES.entries().items() if not entry.facts["synchronous"]]


@st.composite
def streams(draw):
    """Any asynchronous schedule of the catalogue in small numbers."""
    name = draw(st.sampled_from(STREAMS))
    stages, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    options = {}
    if name == "hetpipe":
        stages = draw(st.integers(1, 3))
        options = {
            "virtual_workers": draw(st.integers(2, 3)),
            "distance": draw(st.integers(0, 2)),
            "in_flight": draw(st.integers(1, 4)),
        }
    elif name == "wpipe":
        stages = 2 * draw(st.integers(1, 3))
        micro_batches += max(1, stages - 2)
    elif name == "2bw":
        micro_batches = max(stages, micro_batches)
    return schedule(name, stages, micro_batches, **options)


def actions_of_run(increments, ranks, batches):
    """Per rank, all actions of a run of this many batches."""
    return [
        [action for batch in range(batches) for action in increments.increment(rank, batch)]
        + list(increments.remainder(rank, batches))
        for rank in range(ranks)
    ]


@given(streams(), st.integers(1, 25))
@settings(deadline=None, max_examples=30)
def test_portions_make_up_the_lowered_programs_of_any_number_of_batches(schedule, batches):
    """The run does not know how many come; whatever comes, every op runs once, in its place, with
    its transfers.
    """
    whole = with_batch_count(schedule, batches)
    for rank, row in enumerate(
        actions_of_run(StreamIncrements(schedule, ahead=2), schedule.ranks, batches)
    ):
        assert tuple(action for action in row if isinstance(action, Op)) == whole.programs[rank]
        assert sorted(map(str, row)) == sorted(map(str, lower(whole, ahead=2).programs[rank]))


@given(streams(), st.integers(1, 12))
@settings(deadline=None, max_examples=15)
def test_receives_right_before_their_ops_are_never_deferred(schedule, batches):
    """An increment runs only ops whose inputs are sent in it, so that a run is the lowered program."""
    whole = with_batch_count(schedule, batches)
    rows = actions_of_run(StreamIncrements(schedule, ahead=0), schedule.ranks, batches)
    assert tuple(map(tuple, rows)) == lower(whole, ahead=0).programs


@pytest.mark.parametrize(("name", "stages"), [("pipedream", 3), ("2bw", 3), ("wpipe", 4)])
def test_after_dependencies_no_receive_comes_before_what_its_message_depends_on(name, stages):
    """However early receives are posted: under NCCL one may block the device until its message."""
    stream = schedule(name, stages, 4)
    whole = with_batch_count(stream, 6)
    increments = StreamIncrements(stream, ahead=99, after_dependencies=True)
    rows = actions_of_run(increments, stream.ranks, 6)
    late = 0
    for (link, message, *_), last in zip(messages(whole), last_dependencies(whole), strict=True):
        row = rows[link.target]
        post = row.index(Transfer(Direction.RECV, message, link.source))
        if last >= 0:
            late += 1
            assert row.index(whole.programs[link.target][last]) < post
    assert late > 6


@given(streams(), st.integers(0, 20))
@settings(deadline=None, max_examples=40)
def test_a_portion_names_no_batch_that_has_not_come(schedule, batch):
    """Its inputs are not there, and even its shapes are unknown."""
    increments, size = StreamIncrements(schedule, ahead=2), schedule.micro_batches
    for rank in range(schedule.ranks):
        numbers = [
            action.micro_batch if isinstance(action, Op) else action.message.micro_batch
            for action in increments.increment(rank, batch)
            if not (isinstance(action, Op) and action.kind is Kind.U)
        ]
        assert all(number < (batch + 1) * size for number in numbers)


# One link carries values of two batches in turn, so that a receive waits for one before it.
@example(schedule("wpipe", 4, 2))
@given(streams())
@settings(deadline=None, max_examples=40)
def test_on_every_link_receives_are_posted_in_the_order_of_the_sends(schedule):
    """Backends without tags match messages in order, increments or not."""
    rows = actions_of_run(StreamIncrements(schedule, ahead=2), schedule.ranks, 9)
    sent, posted = {}, {}
    for rank, row in enumerate(rows):
        for action in row:
            if isinstance(action, Transfer):
                sending = action.direction is Direction.SEND
                link = (rank, action.peer) if sending else (action.peer, rank)
                (sent if sending else posted).setdefault(link, []).append(action.message)
    assert sent == posted


# A wave ends in another place of the loop than the wave before: increments repeat after two loops.
@example(schedule("hetpipe", 2, 1, virtual_workers=2, in_flight=2, distance=0))
@given(streams())
@settings(deadline=None, max_examples=40)
def test_no_op_waits_for_an_op_of_a_later_portion(schedule):
    """The other rank runs that only when another batch comes, which may be never."""
    whole = with_batch_count(schedule, 20)
    increments = StreamIncrements(schedule, ahead=2)
    batch_of = {
        (rank, action): batch
        for rank in range(schedule.ranks)
        for batch in range(14)
        for action in increments.increment(rank, batch)
    }
    dependencies = dependencies_of(whole)
    rows = list(zip(dependencies.ops.rank.tolist(), whole.ops, strict=True))
    for row, sources in zip(rows, dependencies.predecessors(), strict=True):
        if row in batch_of:
            assert all(batch_of.get(rows[source], 99) <= batch_of[row] for source in sources)


@given(streams(), st.integers(0, 3))
@settings(deadline=None, max_examples=20)
def test_a_value_is_sent_in_the_portion_that_computes_it(schedule, ahead):
    """Another rank may need it in the same portion, and would wait until the next batch comes."""
    increments = StreamIncrements(schedule, ahead=ahead)
    count = 0
    for rank in range(schedule.ranks):
        for batch in range(14):
            portion = increments.increment(rank, batch)
            sent = [action.message for action in portion if _is_send(action)]
            ops = [action for action in portion if isinstance(action, Op)]
            computed = [output_message(op, schedule.stages) for op in ops]
            assert sent == [message for message in computed if message in sent]
            count += len(sent)
    assert (count > 0) == any(messages(schedule))


def _is_send(action):
    """Whether an action of a program is the send of a message."""
    return isinstance(action, Transfer) and action.direction is Direction.SEND


@given(streams(), st.integers(0, 12))
@settings(deadline=None, max_examples=40)
def test_a_batch_is_done_when_no_rank_has_an_op_of_it_left(schedule, batch):
    """Then its loss can be reported on all ranks without one waiting for another."""
    increments = StreamIncrements(schedule, ahead=2)
    ran = {
        (rank, action)
        for rank in range(schedule.ranks)
        for t in range(batch + 1)
        for action in increments.increment(rank, t)
    }
    done = increments.completed_batches(batch)
    whole = with_batch_count(schedule, batch + 2)
    shorter = (
        [set(row) for row in with_batch_count(whole, done).programs]
        if done
        else [set()] * schedule.ranks
    )
    assert all((rank, op) in ran for rank, row in enumerate(shorter) for op in row)
    longer = [set(row) for row in with_batch_count(whole, done + 1).programs]
    assert any((rank, op) not in ran for rank, row in enumerate(longer) for op in row)


def test_programs_that_do_not_repeat_are_refused():
    """There is nothing to go on with after their last batch."""
    schedule = Schedule.parse("0F0 0B0 0U1 0F1 0F2 0B2 0B1 0U2 0U3", synchronous=False)
    schedule = Schedule(schedule.programs, "odd", synchronous=False, stream=Stream(3))
    with pytest.raises(
        ScheduleError, match="odd does not repeat itself from batch to batch within its 3 batches"
    ):
        StreamIncrements(schedule, ahead=2)


@pytest.mark.parametrize(
    ("name", "stages", "options"),
    [
        ("hetpipe", 2, {"virtual_workers": 3, "in_flight": 2, "distance": 1}),
        ("hetpipe", 1, {"virtual_workers": 2, "in_flight": 2, "distance": 0}),
        ("wpipe", 4, {}),
        ("pipedream", 3, {}),
    ],
)
def test_completed_batches_go_on_with_each_cycle(name, stages, options):
    """Long after the first batches, whatever the batches and loops of a cycle."""
    stream = schedule(name, stages, 2, **options)
    increments = StreamIncrements(stream, ahead=2)
    ran = [set() for _ in range(stream.ranks)]
    whole = with_batch_count(stream, 60)
    ops_of_batch = [[set() for _ in range(60)] for _ in whole.programs]
    for rank, program in enumerate(whole.programs):
        for op, batch in with_batches(program, whole.micro_batches):
            ops_of_batch[rank][batch].add(op)
    for batch in range(50):
        for rank, row in enumerate(ran):
            row.update(increments.increment(rank, batch))
        done = increments.completed_batches(batch)
        assert all(
            ops <= ran[rank] for rank, batches in enumerate(ops_of_batch) for ops in batches[:done]
        )
        assert any(not batches[done] <= ran[rank] for rank, batches in enumerate(ops_of_batch))

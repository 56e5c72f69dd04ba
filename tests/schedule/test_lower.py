"""Transfers added to programs: complete, matched in order, and early enough."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules
from tests.simulate.slow import rich_schedules

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.lower import (
    Direction,
    Link,
    Message,
    Transfer,
    input_message,
    last_dependencies,
    lower,
    messages,
    output_message,
    partners_of,
)
from penstock.schedule.op import Kind, Op, Schedule

SCHEDULES = st.one_of(
    custom_schedules(),
    st.builds(
        schedule, st.sampled_from(["gpipe", "1f1b", "naive"]), st.integers(1, 5), st.integers(1, 6)
    ),
)


def crossings(schedule):
    """Every value that changes ranks, from the placement alone: {(kind, stage, micro-batch):
    (from, to)}.
    """
    home = {
        (op.stage, op.micro_batch): rank
        for rank, program in enumerate(schedule.programs)
        for op in program
        if op.kind is Kind.F
    }
    values = {}
    for (stage, m), rank in home.items():
        above = home.get((stage + 1, m), rank)
        if above != rank:
            values[Kind.F, stage, m] = (rank, above)
            values[Kind.B, stage + 1, m] = (above, rank)
    return values


def transfers_by_link(lowered, direction):
    """Per link, (place in the lowered program, message) of every transfer of one direction."""
    by_link = defaultdict(list)
    for rank, program in enumerate(lowered.programs):
        for place, action in enumerate(program):
            if isinstance(action, Transfer) and action.direction is direction:
                link = (rank, action.peer) if direction is Direction.SEND else (action.peer, rank)
                by_link[link].append((place, tuple(action.message)))
    return by_link


@given(SCHEDULES, st.integers(0, 4))
@settings(deadline=None, max_examples=120)
def test_every_value_that_changes_ranks_is_sent_once_and_received_once_in_one_order(
    schedule, ahead
):
    """Backends without tags match by order alone; a value between stages of one rank is not sent at
    all.
    """
    lowered = lower(schedule, ahead)
    sent, received = (
        transfers_by_link(lowered, direction) for direction in (Direction.SEND, Direction.RECV)
    )
    for link in sent.keys() | received.keys():
        assert [message for _, message in sent[link]] == [message for _, message in received[link]]
    carried = [(message, link) for link, rows in sent.items() for _, message in rows]
    assert len(carried) == len(dict(carried))
    assert dict(carried) == crossings(schedule)


@given(SCHEDULES, st.integers(0, 4))
@settings(deadline=None, max_examples=60)
def test_lowering_leaves_the_ops_as_they_are(schedule, ahead):
    """Transfers are added; the programs are the user's."""
    lowered = lower(schedule, ahead)
    assert (
        tuple(
            tuple(action for action in program if isinstance(action, Op))
            for program in lowered.programs
        )
        == schedule.programs
    )


@given(SCHEDULES)
@settings(deadline=None, max_examples=60)
def test_a_send_stands_right_after_the_op_that_makes_the_value(schedule):
    """The next stage would wait for every op in between."""
    for program in lower(schedule).programs:
        for before, action in pairwise((None, *program)):
            if isinstance(action, Transfer) and action.direction is Direction.SEND:
                kind, stage, m = action.message
                makers = (Kind.F,) if kind is Kind.F else (Kind.B, Kind.I)
                assert before in [Op(maker, stage, m) for maker in makers]


@given(SCHEDULES, st.integers(0, 4))
@settings(deadline=None, max_examples=120)
def test_a_receive_is_posted_ahead_of_its_op_and_earlier_only_for_the_order_of_its_link(
    schedule, ahead
):
    """Early enough to overlap, and not so early that it holds a buffer for nothing."""
    lowered = lower(schedule, ahead)
    for (_, target), rows in transfers_by_link(lowered, Direction.RECV).items():
        program = lowered.programs[target]
        index = {op: i for i, op in enumerate(schedule.programs[target])}
        posts, takes = [], []
        for place, (kind, stage, m) in rows:
            takers = (
                [Op(Kind.F, stage + 1, m)]
                if kind is Kind.F
                else [Op(Kind.B, stage - 1, m), Op(Kind.I, stage - 1, m)]
            )
            takes.append(next(index[op] for op in takers if op in index))
            posts.append(sum(isinstance(action, Op) for action in program[:place]))
        assert posts == [min(max(0, take - ahead) for take in takes[n:]) for n in range(len(takes))]


def test_a_receive_that_another_would_overtake_is_posted_with_it():
    """Rank 1 needs micro-batch 1 first though 0 was sent first: receive 0 must be posted before it,
    or it takes 1's bytes.
    """
    schedule = Schedule.parse("0F0 0F1 0B1 0B0 0U1\n1F1 1B1 1F0 1B0 1U1")
    assert str(lower(schedule, ahead=0)) == (
        "rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0 0U1\n"
        "rank 1 | 1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0 1U1"
    )


def test_a_receive_is_posted_one_op_early_unless_told_otherwise():
    """The transfer then runs beside the op before; the first op has nothing before it."""
    assert str(lower(schedule("gpipe", 2, 2)).programs[1][3]) == "1F1"
    assert str(lower(schedule("gpipe", 2, 2))) == (
        "rank 0 | 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0U1\n"
        "rank 1 | 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1U1"
    )


def test_stages_of_one_rank_exchange_nothing():
    """What never leaves the rank costs nothing."""
    schedule = Schedule.parse("0F0 1F0 1B0 0B0 1U1 0U1")
    assert lower(schedule).programs == schedule.programs
    assert list(messages(schedule)) == []


def test_messages_say_who_makes_and_who_takes():
    """The simulator, the graph and the runtime index programs by these numbers."""
    schedule = Schedule.parse("0F0 0B0 0U1\n1F0 1I0 1W0 1U1")
    assert list(messages(schedule)) == [
        (Link(0, 1), Message(Kind.F, 0, 0), 0, 0),
        (Link(1, 0), Message(Kind.B, 1, 0), 1, 1),
    ]


@pytest.mark.parametrize(
    ("text", "maker"),
    [("0F0 0B0\n1F1", "0F0"), ("0F0\n1F0 1B0", "1B0"), ("0F0\n1F0 1B0\n0B0", "1B0")],
)
def test_a_value_that_nobody_takes_is_refused_by_name(text, maker):
    """It would block the link for all later messages; also where the consumer is not on the rank
    of its activations.
    """
    with pytest.raises(ScheduleError, match=rf"no op takes the output of {maker} for stage"):
        lower(Schedule.parse(text))


@given(custom_schedules(synchronous=True, most=4))
@settings(max_examples=25)
def test_after_dependencies_a_receive_stands_right_behind_the_last_op_that_it_depends_on(schedule):
    """However far ahead receives are posted; against a search back from every message."""
    dependencies = dependencies_of(schedule)
    predecessors = dependencies.predecessors(pairs=False)
    row_of = {}
    rows = iter(range(len(schedule.ops)))
    for rank, program in enumerate(schedule.programs):
        for place in range(len(program)):
            row_of[next(rows)] = rank, place
    expected = []
    for link, message, producer, _ in messages(schedule):
        waiting = [row for row, at in row_of.items() if at == (link.source, producer)]
        reached = set(waiting)
        while waiting:
            fresh = set(predecessors[waiting.pop()]) - reached
            reached |= fresh
            waiting += fresh
        places = [place for rank, place in map(row_of.get, reached) if rank == link.target]
        expected.append((link, message, max(places, default=-1)))
    assert last_dependencies(schedule) == [last for _, _, last in expected]
    lowered = lower(schedule, ahead=10**6, after_dependencies=True)
    for link, message, last in expected:
        program = lowered.programs[link.target]
        post = program.index(Transfer(Direction.RECV, message, link.source))
        assert sum(isinstance(action, Op) for action in program[:post]) == last + 1


def test_a_message_is_named_after_the_stage_that_produces_it():
    """Both ends name it alike."""
    forward, backward = Op(Kind.F, 1, 5), Op(Kind.B, 1, 5)
    assert output_message(forward, 3) == Message(Kind.F, 1, 5) == input_message(Op(Kind.F, 2, 5), 3)
    assert (
        output_message(backward, 3) == Message(Kind.B, 1, 5) == input_message(Op(Kind.I, 0, 5), 3)
    )
    assert output_message(Op(Kind.F, 2, 5), 3) is None
    assert input_message(Op(Kind.B, 2, 5), 3) is None


@settings(deadline=None, max_examples=60)
@given(rich_schedules(3))
def test_evicted_activations_go_to_the_partner_and_come_back(schedule):
    """The rank of the forward sends E and receives L, its partner the other way round; slices and
    streams cross like whole micro-batches.
    """
    expected, partners = set(), {}
    for rank, program in enumerate(schedule.programs):
        for place, op in enumerate(program):
            if op.kind in (Kind.E, Kind.L):
                owner = schedule.placement[op.stage, op.micro_batch]
                if owner != rank:
                    partners[op] = rank
                    at_owner = schedule.programs[owner].index(op)
                    ends = [(owner, at_owner), (rank, place)]
                    (source, producer), (target, consumer) = (
                        ends if op.kind is Kind.E else ends[::-1]
                    )
                    expected.add((Link(source, target), Message(*op), producer, consumer))
    assert partners_of(schedule) == partners
    rows = list(messages(schedule))
    assert {row for row in rows if row[1].kind in (Kind.E, Kind.L)} == expected
    neighbours = {
        tuple(message): tuple(link)
        for link, message, *_ in rows
        if message.kind in (Kind.F, Kind.B)
    }
    assert neighbours == crossings(schedule)
    for link, message, producer, consumer in rows:
        sender, receiver = schedule.programs[link.source], schedule.programs[link.target]
        assert output_message(sender[producer], schedule.stages) == message
        assert input_message(receiver[consumer], schedule.stages) == message
    by_link = {}
    for link, _, producer, _ in rows:
        assert by_link.get(link, -1) < producer
        by_link[link] = producer


@settings(deadline=None, max_examples=40)
@given(custom_schedules(synchronous=True), st.integers(0, 3))
def test_after_dependencies_a_receive_is_posted_no_earlier_than_asked_for(schedule, ahead):
    """The later of both places, in the order of the link."""
    rows, last = list(messages(schedule)), last_dependencies(schedule)
    lowered = lower(schedule, ahead, after_dependencies=True)
    plain = lower(schedule, ahead)
    for (link, message, *_), before in zip(rows, last, strict=True):
        transfer = Transfer(Direction.RECV, message, link.source)
        places = []
        for program in (lowered.programs[link.target], plain.programs[link.target]):
            post = program.index(transfer)
            places.append(sum(isinstance(action, Op) for action in program[:post]))
        assert places[0] == max(places[1], before + 1)


@settings(deadline=None, max_examples=40)
@given(rich_schedules(3), st.integers(0, 3))
def test_pairs_change_no_transfer(schedule, ahead):
    """Executors may run the two ops of a pair one after the other, so a message is sent after its
    own op, and a receive waits for what its own message depends on.
    """
    alone = replace(schedule, pairs=frozenset())
    assert last_dependencies(schedule) == last_dependencies(alone)
    assert lower(schedule, ahead) == lower(alone, ahead)
    assert lower(schedule, 9, after_dependencies=True) == lower(alone, 9, after_dependencies=True)


@pytest.mark.parametrize("name", ["dualpipe-v", "fbp-as"])
def test_the_second_op_of_a_pair_delays_no_receive(name):
    """The first op sends a value that the receiver needs before the second one can run."""
    paired = schedule(name, 4, 8)
    alone = replace(paired, pairs=frozenset())
    assert len(paired.pairs) > 2
    assert last_dependencies(paired) == last_dependencies(alone)
    assert lower(paired, 9, after_dependencies=True) == lower(alone, 9, after_dependencies=True)

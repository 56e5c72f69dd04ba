"""The graph behind verify, draw and simulate, and the depth of channel that a schedule needs."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules, custom_streams

from penstock.errors import ScheduleError
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.graph import build_graph, channel_depth
from penstock.schedule.lower import Direction, lower
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streams import Stream, Waves


def plays_through(programs, depth, waves=None):
    """Whether lowered programs finish when a send blocks while `depth` messages of its link are not
    yet taken.

    Plays them for real: a queue per link, ranks advanced one action at a time until none can move.
    Depth 0 hands a message over only while the receiver stands at its receive. All ranks
    that have a U run it together; with waves only the last U of a wave, or it waits until the others
    have run theirs `distance` waves earlier.
    """
    at = [0] * len(programs)
    queues = defaultdict(deque)
    meetings = defaultdict(set)
    for rank, program in enumerate(programs):
        for action in program:
            if isinstance(action, Op) and action.kind is Kind.U:
                meetings[action].add(rank)

    def standing(rank):
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    def moves(rank, action):
        if isinstance(action, Op):
            together = meetings.get(action, {rank})
            if waves is not None and action.kind is Kind.U:
                late = waves.distance * waves.length
                if action.micro_batch % waves.length or late:
                    together = {rank}
                if action.micro_batch % waves.length == 0 and late:
                    earlier = action._replace(micro_batch=action.micro_batch - late)
                    if any(
                        earlier in programs[other][at[other] :]
                        for other in meetings.get(earlier, ())
                    ):
                        return set()
            if all(standing(other) == action for other in together):
                return together
        elif action.direction is Direction.RECV:
            queue = queues[action.peer, rank]
            if queue:
                assert queue.popleft() == action.message
                return {rank}
        elif depth == 0:
            other = standing(action.peer)
            if (
                other is not None
                and not isinstance(other, Op)
                and other.direction is Direction.RECV
                and other.peer == rank
            ):
                assert other.message == action.message
                return {rank, action.peer}
        elif len(queues[rank, action.peer]) < depth:
            queues[rank, action.peer].append(action.message)
            return {rank}
        return set()

    moved = True
    while moved:
        moved = False
        for rank in range(len(programs)):
            action = standing(rank)
            for mover in moves(rank, action) if action is not None else ():
                at[mover] += 1
                moved = True
    return all(place == len(program) for place, program in zip(at, programs, strict=True))


@given(custom_schedules() | custom_streams())
@settings(deadline=None, max_examples=250)
def test_channel_depth_is_the_least_with_which_blocking_channels_play_through(schedule):
    """A depth too small hangs the user of another library; one too large refuses a schedule that
    would run.
    """
    programs = lower(schedule, ahead=0).programs
    waves = schedule.stream.waves if schedule.stream else None
    least = next(depth for depth in range(200) if plays_through(programs, depth, waves))
    assert channel_depth(schedule) == least


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (2, 6), (3, 5), (4, 8)])
def test_channel_depth_of_a_family_agrees_with_blocking_channels(name, stages, micro_batches):
    """The same claim for what is really used."""
    family_schedule = schedule(name, stages, micro_batches)
    programs = lower(family_schedule, ahead=0).programs
    assert channel_depth(family_schedule) == next(
        depth for depth in range(100) if plays_through(programs, depth)
    )


def test_one_f_one_b_needs_room_for_a_message_and_gpipe_none():
    """In 1F1B two neighbours send to each other at once: with rendezvous both would stand in their
    send for ever.
    """
    assert channel_depth(schedule("gpipe", 4, 8)) == 0
    assert channel_depth(schedule("1f1b", 4, 8)) == 1


def test_a_schedule_without_transfers_needs_no_channel():
    """One rank, or none."""
    assert channel_depth(schedule("1f1b", 1, 8)) == 0
    assert channel_depth(Schedule(())) == 0


@given(custom_schedules(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_order_of_a_sound_schedule_has_everything_after_what_it_waits_for(schedule, overlap):
    """Times are longest paths along this order: one node too early and its times are wrong without
    any error.
    """
    graph = build_graph(schedule, overlap)
    order, stuck = graph.order()
    place = {node: i for i, node in enumerate(order)}
    assert stuck == []
    assert sorted(order) == list(range(len(graph.waits_for)))
    assert all(
        place[before] < place[node]
        for node, waits in enumerate(graph.waits_for)
        for before in waits
    )


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
    """It once started at second 0 as if it needed nothing, and the makespan looked splendid."""
    with pytest.raises(ScheduleError, match=message):
        build_graph(Schedule.parse(text))


def test_a_node_is_known_by_its_rank_and_op_and_a_transfer_by_those_that_made_its_value():
    """Messages about a cycle name them; the first transfer stands right after the last op."""
    graph = build_graph(Schedule.parse("0F0 0B0 0U1\n1F0 1B0 1U1"))
    assert [(rank, str(op)) for rank, op in map(graph.work, range(len(graph.waits_for)))] == [
        (0, "0F0"),
        (0, "0B0"),
        (0, "0U1"),
        (1, "1F0"),
        (1, "1B0"),
        (1, "1U1"),
        (0, "0F0"),
        (1, "1B0"),
    ]


def test_copies_of_a_stage_start_their_update_together():
    """U synchronises gradients: it cannot end on one rank before the other's last gradient exists,
    which it once did.
    """
    schedule = Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0F2 0B2 0U1")
    line = Timeline.of(
        build_graph(schedule).events(lambda rank, op: 1.0, lambda link, message: 0.0), 2, 1
    )
    assert [(e.rank, e.start, e.end) for e in line.compute if e.op.kind is Kind.U] == [
        (0, 4.0, 5.0),
        (1, 4.0, 5.0),
    ]


def test_copies_of_two_stages_that_update_in_opposite_orders_wait_for_each_other_forever():
    """Each rank would stand in the other's second collective; found before anything runs."""
    schedule = Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 1U1 0U1")
    graph = build_graph(schedule)
    assert sorted(str(graph.work(node)[1]) for node in graph.order()[1]) == [
        "0U1",
        "0U1",
        "1U1",
        "1U1",
    ]


def test_the_last_send_of_a_program_keeps_nobody_waiting():
    """overlap=False delays the sender's next op; after its last there is none, and the next rank's
    first is not it.
    """
    schedule = Schedule.parse("0F0 0F1\n1F0 1F1")
    assert build_graph(schedule, overlap=False).order()[1] == []
    starts = {
        event[1]: event[2]
        for event in build_graph(schedule, overlap=False).events(
            lambda rank, op: 1.0, lambda link, m: 2.0
        )
        if event[5] is None
    }
    assert starts == {
        Op.parse("0F0"): 0,
        Op.parse("0F1"): 3,
        Op.parse("1F0"): 3,
        Op.parse("1F1"): 6,
    }


def test_a_sender_that_stands_still_delays_its_own_next_op():
    """overlap=False: as with blocking sends, the transfer is the sender's time."""
    schedule = Schedule.parse("0F0 0F1 0B0 0B1 0U1\n1F0 1F1 1B0 1B1 1U1")
    first = {
        event[1]: event[2]
        for event in build_graph(schedule, overlap=False).events(
            lambda rank, op: 1.0, lambda link, m: 2.0
        )
        if event[5] is None
    }
    assert first[Op.parse("0F1")] == 3.0
    second = {
        event[1]: event[2]
        for event in build_graph(schedule).events(lambda rank, op: 1.0, lambda link, m: 2.0)
        if event[5] is None
    }
    assert second[Op.parse("0F1")] == 1.0


@given(custom_streams())
@settings(deadline=None, max_examples=60)
def test_streams_finish(schedule):
    """Every U a meeting of its own, or none, or a wait for an earlier one: none of it may hang what
    is sound.
    """
    for overlap in (True, False):
        assert build_graph(schedule, overlap).order()[1] == []


def waits_of(schedule, rank, op):
    """What an op waits for beside the op before it, as (rank, op) in words."""
    graph = build_graph(schedule)
    node = graph.ops.index((rank, op))
    return sorted(
        f"{home} {other}" for home, other in map(graph.work, graph.waits_for[node]) if home != rank
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

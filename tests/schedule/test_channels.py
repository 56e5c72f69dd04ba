"""The depth of channel that a schedule needs, against programs that are executed step by step."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules, custom_streams
from tests.simulate.slow import rich_schedules

from penstock.schedule.catalogue import schedule
from penstock.schedule.channels import ActionGraph, channel_depth, topological_order
from penstock.schedule.lower import (
    Direction,
    Link,
    LoweredSchedule,
    Message,
    Transfer,
    lower,
    messages,
)
from penstock.schedule.op import Kind, Op, Schedule


def finishes(programs, depth, waves=None):
    """Whether lowered programs finish when a send blocks while `depth` messages of its link are not
    yet taken.

    Plays them for real: a queue per link, ranks advanced one action at a time until none can move.
    Depth 0 hands a message over only while the receiver stands at its receive. All ranks
    that have a U run it together; with waves only the last U of a wave, or it waits until the others
    have run theirs `distance` waves earlier.
    """
    at = [0] * len(programs)
    queues = defaultdict(deque)
    ranks_of_update = defaultdict(set)
    for rank, program in enumerate(programs):
        for action in program:
            if isinstance(action, Op) and action.kind is Kind.U:
                ranks_of_update[action].add(rank)

    def current_action(rank):
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    def moves(rank, action):
        if isinstance(action, Op):
            together = ranks_of_update.get(action, {rank})
            if waves is not None and action.kind is Kind.U:
                late = waves.distance * waves.length
                if action.micro_batch % waves.length or late:
                    together = {rank}
                if action.micro_batch % waves.length == 0 and late:
                    earlier = action._replace(micro_batch=action.micro_batch - late)
                    if any(
                        earlier in programs[other][at[other] :]
                        for other in ranks_of_update.get(earlier, ())
                    ):
                        return set()
            if all(current_action(other) == action for other in together):
                return together
        elif action.direction is Direction.RECV:
            queue = queues[action.peer, rank]
            if queue:
                assert queue.popleft() == action.message
                return {rank}
        elif depth == 0:
            other = current_action(action.peer)
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
            action = current_action(rank)
            for mover in moves(rank, action) if action is not None else ():
                at[mover] += 1
                moved = True
    return all(place == len(program) for place, program in zip(at, programs, strict=True))


@given(custom_schedules() | custom_streams() | rich_schedules(3))
@settings(deadline=None, max_examples=120)
def test_channel_depth_is_the_least_with_which_blocking_channels_play_through(schedule):
    """A depth too small hangs the user of another library; one too large refuses a schedule that
    would run.
    """
    programs = lower(schedule, ahead=0).programs
    waves = schedule.stream.waves if schedule.stream else None
    least = next(depth for depth in range(200) if finishes(programs, depth, waves))
    assert channel_depth(schedule) == least


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (2, 6), (3, 5), (4, 8)])
def test_channel_depth_of_a_family_agrees_with_blocking_channels(name, stages, micro_batches):
    """The same claim for what is really used."""
    family_schedule = schedule(name, stages, micro_batches)
    programs = lower(family_schedule, ahead=0).programs
    assert channel_depth(family_schedule) == next(
        depth for depth in range(100) if finishes(programs, depth)
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


def test_messages_of_a_link_are_in_the_order_of_their_sends():
    """A file may send the activation of micro-batch 1 before that of 0: the channel then has them
    in this order.
    """
    gpipe = schedule("gpipe", 2, 2)
    sends = [Transfer(Direction.SEND, Message(Kind.F, 0, n), 1) for n in (1, 0)]
    receives = [Transfer(Direction.RECV, Message(Kind.F, 0, n), 0) for n in (1, 0)]
    first, second = (list(program) for program in lower(gpipe, ahead=0).programs)
    first = [action for action in first if action not in sends]
    first[2:2] = sends
    second = receives + [action for action in second if action not in receives]
    lowered = LoweredSchedule((tuple(first), tuple(second)))
    graph = ActionGraph.of(gpipe, lowered, receives_block=True)
    pairs = [
        (first.index(one), len(first) + second.index(other))
        for one, other in zip(sends, receives, strict=True)
    ]
    assert graph.transfers[Link(0, 1)] == pairs
    assert graph.blocked(1) == []


@given(rich_schedules() | custom_streams(), st.integers(0, 3), st.booleans())
@settings(deadline=None, max_examples=40)
def test_the_receive_or_the_op_that_takes_a_message_waits_for_its_send(schedule, ahead, blocks):
    """Every action, the second op of a pair too, also waits for the one before it, and nothing is
    in a cycle where channels have no limit.
    """
    lowered = lower(schedule, ahead)
    graph = ActionGraph.of(schedule, lowered, receives_block=blocks)
    actions = [(rank, action) for rank, row in enumerate(lowered.programs) for action in row]
    assert list(graph.nodes) == actions
    place_of = {node: place for place, node in enumerate(actions)}
    rows = defaultdict(list)
    for link, message, _, consumer in messages(schedule):
        send = place_of[link.source, Transfer(Direction.SEND, message, link.target)]
        receive = place_of[link.target, Transfer(Direction.RECV, message, link.source)]
        taker = place_of[link.target, schedule.programs[link.target][consumer]]
        rows[link].append((send, receive))
        assert (send in graph.waits[receive]) == blocks
        assert (send in graph.waits[taker]) != blocks
    assert dict(graph.transfers) == {link: sorted(pairs) for link, pairs in rows.items()}
    for place, (rank, action) in enumerate(actions):
        is_grouped = isinstance(action, Op) and action.kind is Kind.U
        if not is_grouped and place and actions[place - 1][0] == rank:
            assert place - 1 in graph.waits[place]
    if not blocks or ahead == 0:
        assert graph.blocked() == []


def test_updates_of_copies_wait_for_the_gradients_of_all_copies():
    """Each U waits for the last op of both ranks, and neither for the other U."""
    copies = Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0F2 0B2 0U1")
    graph = ActionGraph.of(copies, lower(copies), receives_block=True)
    waits = {place: sorted(graph.waits[place]) for place in range(len(graph.nodes))}
    assert waits == {0: [], 1: [0], 2: [1, 6], 3: [], 4: [3], 5: [4], 6: [5], 7: [1, 6]}
    # Opposite orders of two stages would wait for each other for ever.
    crossed = Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 1U1 0U1")
    assert ActionGraph.of(crossed, lower(crossed), receives_block=True).blocked() == [4, 5, 10, 11]


def test_what_is_on_a_cycle_or_behind_one_has_no_order():
    """Nodes that are ready come in the order in which they become so."""
    assert topological_order([[2], [], [1], [0, 1]]) == ([1, 2, 0, 3], [])
    assert topological_order([[], [2], [1], [1], [0, 0]]) == ([0, 4], [1, 2, 3])

"""Lower a schedule: add the transfers between ranks, which gives the form that executors run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.rules import FLOWS, feeds, takes


class Direction(str, Enum):
    """Whether a transfer sends a message or posts a receive."""

    SEND = "SEND"
    RECV = "RECV"


class Message(NamedTuple):
    """A value that crosses ranks.

    An activation (F) or an input gradient (B) that `stage` produces for its neighbour, or the
    saved activations of `stage`, on their way to a partner (E) or back (L).
    """

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def target(self) -> int:
        """The stage that takes the value; for E and L the stage whose activations they are."""
        flow = FLOWS.get(self.kind)
        return self.stage if flow is None else self.stage + flow.offset


class Transfer(NamedTuple):
    """One end of a message: a send or a receive.

    `1SEND_F0` passes the activation of stage 1 to the link; `2RECV_F0` posts the receive for it on
    stage 2's rank. A posted receive does not wait; the op that needs the value does.
    """

    direction: Direction
    message: Message
    peer: int

    def __str__(self) -> str:
        """Return the text, e.g. `1SEND_F0`."""
        kind, stage, micro_batch = self.message
        local_stage = stage if self.direction is Direction.SEND else self.message.target
        return f"{local_stage}{self.direction.value}_{kind.value}{micro_batch}"


Action = Op | Transfer


@dataclass(frozen=True)
class LoweredSchedule:
    """The ops and transfers of each rank, in the order in which the executor runs them."""

    programs: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        """Return one line per rank, e.g. `rank 0 | 0F0 0SEND_F0`."""
        return "\n".join(
            f"rank {rank} | {' '.join(map(str, row))}" for rank, row in enumerate(self.programs)
        )


def input_message(op: Op, stages: int) -> Message | None:
    """Return the message that brings the input of `op` if it comes from another rank.

    None if the op takes no value of another stage. E and L take the activations that they move.
    """
    if op.kind in ACTIVATION_MOVES:
        return Message(*op)
    source = takes(op, stages)
    return None if source is None else Message(*source, op.micro_batch)


def output_message(op: Op, stages: int) -> Message | None:
    """Return the message that carries the output of `op` if its consumer is on another rank.

    None if no other stage consumes it. E and L send on the activations that they move.
    """
    if op.kind in ACTIVATION_MOVES:
        return Message(*op)
    output = feeds(op, stages)
    return None if output is None else Message(output[0], op.stage, op.micro_batch)


class Link(NamedTuple):
    """One direction between two ranks."""

    source: int
    target: int


def messages(schedule: Schedule) -> Iterator[tuple[Link, Message, int, int]]:
    """Yield every value that crosses ranks, in the order of sending on its link.

    Yields:
        The link, the message, the index of the producing op in the sender's program, and the index
        of the consuming op in the receiver's program.

    Raises:
        ScheduleError: an op's input is missing, no op takes a value, or the op that takes it is not
            on the rank of its forward.
    """
    dependencies = dependencies_of(schedule)
    first = dependencies.ops.first.tolist()
    rank = dependencies.ops.rank
    producers = np.flatnonzero(dependencies.consumer >= 0)
    consumers = dependencies.consumer[producers]
    rows = (producers, rank[producers], consumers, rank[consumers])
    for producer, source, consumer, target in zip(*(row.tolist() for row in rows), strict=True):
        message = output_message(schedule.ops[producer], schedule.stages)
        assert message is not None, "a value that crosses ranks has a message"
        yield Link(source, target), message, producer - first[source], consumer - first[target]


def partners_of(schedule: Schedule) -> dict[Op, int]:
    """Return for every E and L the rank that holds the evicted activations."""
    partners: dict[Op, int] = {}
    for rank, program in enumerate(schedule.programs):
        for op in program:
            if op.kind in ACTIVATION_MOVES:
                owner = schedule.placement.get((op.stage, op.micro_batch))
                if owner not in (None, rank):
                    partners[op] = rank
    return partners


def lower(
    schedule: Schedule, ahead: int = 1, *, after_dependencies: bool = False
) -> LoweredSchedule:
    """Add the transfers that the placement of ops implies.

    A send stands right after the op that produces the value. A receive is posted `ahead` ops before
    the op that takes the value begins (0: right before it), and earlier where another receive of
    the same link must not overtake it: on every link, receives are posted in the order of the
    sends, which is what backends without tags (NCCL) need.

    Args:
        schedule: a sound schedule (see `verify`).
        ahead: how many ops in advance receives are posted.
        after_dependencies: post no receive before the last op of its rank that the message depends
            on, however large `ahead` is (see `last_dependencies`). Needed where a posted receive
            occupies the device until its message comes.

    Raises:
        ScheduleError: no op takes a value that crosses ranks.
    """
    sends: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    by_link: dict[Link, list[tuple[Message, int, int, int]]] = defaultdict(list)
    rows = list(messages(schedule))
    earliest = [0] * len(rows)
    if after_dependencies:
        earliest = [last + 1 for last in last_dependencies(schedule)]
    for (link, message, producer, consumer), start in zip(rows, earliest, strict=True):
        by_link[link].append((message, producer, consumer, start))
    for link, link_messages in by_link.items():
        latest = len(schedule.programs[link.target])
        posts: list[tuple[int, Message]] = []
        for message, producer, consumer, start in reversed(link_messages):
            sends[link.source, producer].append(Transfer(Direction.SEND, message, link.target))
            latest = min(latest, max(0, consumer - ahead))
            # Later messages of a link depend on all that earlier ones depend on, so `start` does
            # not change the order of posts.
            posts.append((max(latest, start), message))
        for place, message in reversed(posts):
            receives[link.target, place].append(Transfer(Direction.RECV, message, link.source))
    programs: list[tuple[Action, ...]] = []
    for rank, program in enumerate(schedule.programs):
        row: list[Action] = []
        for i, op in enumerate(program):
            row += [*receives[rank, i], op, *sends[rank, i]]
        programs.append(tuple(row))
    return LoweredSchedule(tuple(programs))


def last_dependencies(schedule: Schedule) -> list[int]:
    """For every message, find the last op of the receiving rank that its value depends on.

    A receive that is posted before this op waits for a message that cannot be sent until the
    receiving rank itself has gone on. Under NCCL a posted receive is a kernel on the device, and
    any call that waits until the device is idle (cudaFree, cudaHostAlloc, a synchronize) would
    then deadlock.

    The run time is proportional to the number of ops times the number of ranks.

    Args:
        schedule: a sound schedule.

    Returns:
        Per message, in the order of `messages`, an index in the receiver's program; -1 if the
        value depends on no op of the receiver.
    """
    dependencies = dependencies_of(schedule)
    predecessors = dependencies.predecessors(pairs=False)
    first = dependencies.ops.first.tolist()
    rank_of = dependencies.ops.rank.tolist()
    # Per op, the last op of every rank that it depends on, itself included.
    last = [[-1] * schedule.ranks for _ in predecessors]
    for op in dependencies.graph.order.tolist():
        row = last[op]
        for predecessor in predecessors[op]:
            row = list(map(max, row, last[predecessor]))
        row[rank_of[op]] = op - first[rank_of[op]]
        last[op] = row
    return [
        last[first[link.source] + producer][link.target]
        for link, _, producer, _ in messages(schedule)
    ]

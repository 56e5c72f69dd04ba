"""Lower a schedule: add the transfers between ranks, which gives the form that executors run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.dependencies import Crossing, last_dependencies
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
        ScheduleError: no op takes a value, or the op that takes it is not on the rank of its
            forward.
        KeyError: an E or L has no counterpart on the other rank; `verify` names it.
    """
    index = _index_of_ops(schedule)
    partners = partners_of(schedule)
    for rank, program in enumerate(schedule.programs):
        for i, op in enumerate(program):
            if op.kind in ACTIVATION_MOVES:
                owner, partner = schedule.placement[op.stage, op.micro_batch], partners[op]
                link = Link(owner, partner) if op.kind is Kind.E else Link(partner, owner)
                if rank == link.source:
                    yield link, Message(*op), i, index[link.target, op]
                continue
            output = feeds(op, schedule.stages)
            if output is None:
                continue
            kind, stage = output
            target = schedule.placement.get((stage, op.micro_batch))
            if target != rank:
                consumer = _consumer(index, target, kind, stage, op.micro_batch)
                if target is None or consumer is None:
                    raise ScheduleError(
                        f"rank {rank}: no op takes the output of {op} for stage {stage}"
                    )
                yield Link(rank, target), Message(kind, op.stage, op.micro_batch), i, consumer


def _consumer(
    index: Mapping[tuple[int | None, Op], int],
    rank: int | None,
    kind: Kind,
    stage: int,
    micro_batch: int,
) -> int | None:
    """Return the index of the op that consumes a value on a rank, None if there is none.

    Args:
        index: index of every op in its program, by rank and op.
        rank: the rank of the consuming stage, None if there is none.
        kind, stage, micro_batch: kind of the value, consuming stage, and micro-batch.
    """
    for op_kind in FLOWS[kind].consumers:
        place = index.get((rank, Op(op_kind, stage, micro_batch)))
        if place is not None:
            return place
    return None


def _index_of_ops(schedule: Schedule) -> dict[tuple[int | None, Op], int]:
    """Return the index of every op in its program, by rank and op."""
    index: dict[tuple[int | None, Op], int] = {}
    for rank, program in enumerate(schedule.programs):
        for i, op in enumerate(program):
            index[rank, op] = i
    return index


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
        crossings = [
            Crossing(link.source, producer, link.target, consumer)
            for link, _, producer, consumer in rows
        ]
        earliest = [last + 1 for last in last_dependencies(schedule, crossings)]
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

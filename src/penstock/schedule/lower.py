"""From programs of ops to programs of ops and transfers, the only form that an executor plays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.dependencies import Crossing, last_dependencies
from penstock.schedule.op import HANDING, Kind, Op, Schedule
from penstock.schedule.rules import feeds


class Direction(str, Enum):
    """Whether a transfer sends or posts a receive."""

    SEND = "SEND"
    RECV = "RECV"


_TOWARDS = {Kind.F: 1, Kind.B: -1, Kind.E: 0, Kind.L: 0}


class Message(NamedTuple):
    """A value that crosses ranks: an activation (F) or an input gradient (B) made by `stage` for
    its neighbour, or what `stage` keeps of a micro-batch, on its way to a partner (E) or back (L).
    """

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def target(self) -> int:
        """The stage that takes it; for E and L the one that it belongs to."""
        return self.stage + _TOWARDS[self.kind]


class Transfer(NamedTuple):
    """`1SEND_F0` hands the activation of stage 1 to the link; `2RECV_F0` posts the receive for it
    on stage 2's rank.

    A posted receive does not wait; the op that needs the value does.
    """

    direction: Direction
    message: Message
    peer: int

    def __str__(self) -> str:
        kind, stage, micro_batch = self.message
        own = stage if self.direction is Direction.SEND else self.message.target
        return f"{own}{self.direction.value}_{kind.value}{micro_batch}"


Action = Op | Transfer


@dataclass(frozen=True)
class LoweredSchedule:
    """Per rank, ops and transfers in the order in which the executor takes them."""

    programs: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank} | {' '.join(map(str, row))}" for rank, row in enumerate(self.programs)
        )


class Link(NamedTuple):
    """One direction between two ranks."""

    source: int
    target: int


def messages(schedule: Schedule) -> Iterator[tuple[Link, Message, int, int]]:
    """Every value that crosses ranks, in the order of sending on its link.

    Yields:
        The link, the message, the index of the op that makes it in the sender's program, and of the
        op that takes it in the receiver's program.

    Raises:
        ScheduleError: nobody takes a value, or the op that takes it stands on another rank than its
        forward. KeyError: an E or L lacks its other half; `verify` says which.
    """
    index = {
        (rank, op): i for rank, row in enumerate(schedule.programs) for i, op in enumerate(row)
    }
    takers = {Kind.F: (Kind.F,), Kind.B: (Kind.B, Kind.I)}
    partners = partners_of(schedule)
    for rank, program in enumerate(schedule.programs):
        for i, op in enumerate(program):
            if op.kind in HANDING:
                ends = schedule.placement[op.stage, op.micro_batch], partners[op]
                link = Link(*(ends if op.kind is Kind.E else ends[::-1]))
                if rank == link.source:
                    yield link, Message(*op), i, index[link.target, op]
                continue
            fed = feeds(op, schedule.stages)
            if fed is None:
                continue
            kind, stage = fed
            target = schedule.placement.get((stage, op.micro_batch))
            if target == rank:
                continue
            found = [
                index[target, Op(k, stage, op.micro_batch)]
                for k in takers[kind]
                if target is not None and (target, Op(k, stage, op.micro_batch)) in index
            ]
            if target is None or not found:
                raise ScheduleError(f"rank {rank}: nobody takes what {op} makes for stage {stage}")
            yield Link(rank, target), Message(kind, op.stage, op.micro_batch), i, found[0]


def partners_of(schedule: Schedule) -> dict[Op, int]:
    """For every E and L, the rank that takes the activations in."""
    partners: dict[Op, int] = {}
    for rank, program in enumerate(schedule.programs):
        for op in program:
            if op.kind in HANDING and schedule.placement.get((op.stage, op.micro_batch)) not in (
                None,
                rank,
            ):
                partners[op] = rank
    return partners


def lower(
    schedule: Schedule, ahead: int = 1, *, after_dependencies: bool = False
) -> LoweredSchedule:
    """Add the transfers that placement implies.

    A send stands right after the op that makes the value. A receive is posted `ahead` ops before
    the op that takes the value begins (0: right before it), and earlier where another receive of
    the same link must not overtake it: on every link, receives are posted in the order of the
    sends, which is what backends without tags (NCCL) need.

    Args:
        schedule: a sound schedule (see `verify`).
        ahead: how many ops early receives are posted.
        after_dependencies: post no receive before the last op of its rank that the message depends
        on, however large `ahead` is
            (see `last_dependencies`). Needed where a posted receive occupies the device until its
            message comes.

    Raises:
        ScheduleError: a value that crosses ranks has no taker.
    """
    sends: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    by_link: dict[Link, list[tuple[Message, int, int, int]]] = defaultdict(list)
    rows = list(messages(schedule))
    earliest = [0] * len(rows)
    if after_dependencies:
        crossings = [
            Crossing(link.source, made, link.target, taken) for link, _, made, taken in rows
        ]
        earliest = [last + 1 for last in last_dependencies(schedule, crossings)]
    for (link, message, made, taken), start in zip(rows, earliest, strict=True):
        by_link[link].append((message, made, taken, start))
    for link, crossing in by_link.items():
        latest = len(schedule.programs[link.target])
        posts: list[tuple[int, Message]] = []
        for message, made, taken, start in reversed(crossing):
            sends[link.source, made].append(Transfer(Direction.SEND, message, link.target))
            latest = min(latest, max(0, taken - ahead))
            # Later messages of a link depend on all that earlier ones depend on: the order of posts
            # stays.
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

"""Check transfers that come with a schedule, such as those of a CSV file.

They must carry what the ops need: each value once, between the right ranks, in order. Two ranks
exchange messages without tags (NCCL, and gloo as torch uses it): the first message received is the
first one sent, whatever the receiver expects. A receive in another order gives wrong numbers
without an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from penstock.errors import Finding, ScheduleError
from penstock.schedule.channels import ActionGraph
from penstock.schedule.lower import (
    Direction,
    Link,
    LoweredSchedule,
    Message,
    Transfer,
    messages,
)
from penstock.schedule.op import Op, Program, Schedule

#: Maximum number of findings: a file of a million wrong transfers would give as many.
_MAX_FINDINGS = 1000

#: Findings that the message of an error lists.
_LISTED_FINDINGS = 12


class _Expected(NamedTuple):
    """A value that crosses ranks according to the placement of the ops."""

    link: Link
    producer: Op
    consumer: Op


class _Located(NamedTuple):
    """A transfer with its rank and its place in the rank's program."""

    rank: int
    place: int
    transfer: Transfer


def ops_alone(lowered: LoweredSchedule) -> Schedule:
    """Return the schedule without its transfers."""
    programs: list[Program] = []
    for program in lowered.programs:
        programs.append(tuple(action for action in program if isinstance(action, Op)))
    return Schedule(tuple(programs))


def unsound(name: str, findings: list[Finding]) -> ScheduleError:
    """Return the error that lists the findings of the schedule called `name`."""
    count = "" if len(findings) == 1 else f" ({len(findings)} findings, worst first)"
    lines = [f"{name} is not sound{count}"]
    lines += [f"[{finding.rule}] {finding.message}" for finding in findings[:_LISTED_FINDINGS]]
    if len(findings) > _LISTED_FINDINGS:
        lines.append(f"… and {len(findings) - _LISTED_FINDINGS} more")
    return ScheduleError("\n  ".join(lines), findings)


def transfer_findings(schedule: Schedule, lowered: LoweredSchedule) -> list[Finding]:
    """Return what is wrong with the transfers of `lowered`, most severe first.

    Empty if an op has no input, or a value no consumer, at all: `verify` reports that.

    Args:
        schedule: `lowered` without its transfers.
        lowered: ops and transfers, in the order in which the ranks run them. A receive is posted
            where it stands and waits for nothing; the op that needs the value waits.

    Returns:
        Findings of the rules `one transfer` (every value that crosses ranks is sent once and
        received once, on the right ranks, after the op that produces it and before the one that
        needs it), `receive order` (between two ranks, in the order of sending), and `no cycle`.
        Each names its rank, and the transfer's text as `op`.
    """
    expected: dict[Message, _Expected] = {}
    try:
        for link, message, producer_index, consumer_index in messages(schedule):
            producer = schedule.programs[link.source][producer_index]
            consumer = schedule.programs[link.target][consumer_index]
            expected[message] = _Expected(link, producer, consumer)
    except ScheduleError:
        # The schedule itself is invalid, which its own checks report.
        return []
    located: dict[tuple[Direction, Message], list[_Located]] = defaultdict(list)
    for rank, program in enumerate(lowered.programs):
        for place, action in enumerate(program):
            if isinstance(action, Transfer):
                located[action.direction, action.message].append(_Located(rank, place, action))
    findings = [*islice(_one_transfer(schedule, lowered, expected, located), _MAX_FINDINGS)]
    # Each check relies on what the one before it has found in order.
    return findings or [*_receive_order(lowered)] or [*_no_cycle(schedule, lowered)]


def _one_transfer(
    schedule: Schedule,
    lowered: LoweredSchedule,
    expected: Mapping[Message, _Expected],
    located: Mapping[tuple[Direction, Message], Sequence[_Located]],
) -> Iterator[Finding]:
    """Check that each value that crosses ranks is sent once and received once, at a valid place."""
    places: dict[tuple[int, Op], int] = {}
    for rank, program in enumerate(lowered.programs):
        for place, action in enumerate(program):
            if isinstance(action, Op):
                places[rank, action] = place
    for message, value in expected.items():
        for direction in Direction:
            transfers = located.get((direction, message), ())
            finding = _check_transfer(direction, message, value, transfers, places)
            if finding is not None:
                yield finding
    for (direction, message), transfers in located.items():
        if message in expected:
            continue
        for transfer in transfers:
            yield Finding(
                "one transfer",
                f"{transfer.transfer} on rank {transfer.rank} "
                f"{_needless(schedule, direction, message)}",
                transfer.rank,
                str(transfer.transfer),
            )


def _check_transfer(
    direction: Direction,
    message: Message,
    value: _Expected,
    transfers: Sequence[_Located],
    places: Mapping[tuple[int, Op], int],
) -> Finding | None:
    """Check the sends, or the receives, of one expected value.

    Args:
        direction: which of the two.
        message, value: the expected value.
        transfers: all transfers of this direction and message.
        places: places of the ops in the programs with transfers, by rank and op.
    """
    link, _, consumer = value
    sends = direction is Direction.SEND
    rank, peer = (link.source, link.target) if sends else (link.target, link.source)
    text = str(Transfer(direction, message, peer))
    if not transfers:
        waiting = (
            f"{consumer} on rank {link.target} would wait for it for ever"
            if sends
            else f"{consumer} needs it from rank {link.source}"
        )
        return Finding("one transfer", f"{text} is missing on rank {rank}: {waiting}", rank, text)
    if len(transfers) > 1:
        ranks = ", ".join(str(transfer.rank) for transfer in transfers)
        return Finding(
            "one transfer",
            f"{text} occurs {len(transfers)} times, on ranks {ranks}",
            transfers[1].rank,
            text,
        )
    (transfer,) = transfers
    error = _misplacement(transfer, value, places)
    return None if error is None else Finding("one transfer", error, transfer.rank, text)


def _misplacement(
    located: _Located, value: _Expected, places: Mapping[tuple[int, Op], int]
) -> str | None:
    """Return what is wrong with the place of a transfer, None if it is right.

    Args:
        located: the transfer.
        value: the value that it carries.
        places: places of the ops in the programs with transfers, by rank and op.
    """
    link, producer, consumer = value
    rank, place, transfer = located
    if transfer.direction is Direction.SEND:
        local_rank, local_op, peer, peer_op = link.source, producer, link.target, consumer
    else:
        local_rank, local_op, peer, peer_op = link.target, consumer, link.source, producer
    text = str(transfer)
    if rank != local_rank:
        return f"{text} is on rank {rank}, but {local_op} on rank {local_rank}"
    if transfer.peer != peer:
        recipient = f"is for rank {transfer.peer}, but {peer_op} is on rank {peer}"
        return f"{text} on rank {rank} {recipient}"
    op_place = places[rank, local_op]
    if transfer.direction is Direction.SEND and place < op_place:
        return f"{text} on rank {rank} comes before {producer}, which produces its value"
    if transfer.direction is Direction.RECV and place > op_place:
        return f"{text} on rank {rank} comes after {consumer}, which needs it"
    return None


def _needless(schedule: Schedule, direction: Direction, message: Message) -> str:
    """Return why a message should not cross ranks."""
    source = schedule.placement.get((message.stage, message.micro_batch))
    target = schedule.placement.get((message.target, message.micro_batch))
    if source is not None and source == target:
        return (
            f"carries a value within one rank: stages {message.stage} and {message.target} are "
            f"both on rank {source}"
        )
    verb = "sends" if direction is Direction.SEND else "receives"
    return (
        f"{verb} what no op makes or no op takes: {message.kind.value} of micro-batch "
        f"{message.micro_batch} from stage {message.stage} to {message.target}"
    )


def _links(lowered: LoweredSchedule) -> dict[Link, tuple[list[_Located], list[_Located]]]:
    """Return the sends and the receives of each link, in program order."""
    links: dict[Link, tuple[list[_Located], list[_Located]]] = defaultdict(lambda: ([], []))
    for rank, program in enumerate(lowered.programs):
        for place, action in enumerate(program):
            if isinstance(action, Transfer):
                sends = action.direction is Direction.SEND
                link = Link(rank, action.peer) if sends else Link(action.peer, rank)
                links[link][0 if sends else 1].append(_Located(rank, place, action))
    return links


def _receive_order(lowered: LoweredSchedule) -> Iterator[Finding]:
    """Check that two ranks receive messages in the order in which they are sent."""
    for (source, target), (sends, receives) in _links(lowered).items():
        for number, (send, receive) in enumerate(zip(sends, receives, strict=True)):
            if send.transfer.message != receive.transfer.message:
                yield Finding(
                    "receive order",
                    f"message {number + 1} from rank {source} to rank {target} is sent as "
                    f"{send.transfer} and received as {receive.transfer}: between two ranks "
                    "messages are received in the order in which they are sent, and "
                    f"{receive.transfer} would get the numbers of {send.transfer}",
                    target,
                    str(receive.transfer),
                )
                break


def _no_cycle(schedule: Schedule, lowered: LoweredSchedule) -> Iterator[Finding]:
    """Check that the programs finish, with any number of messages in flight."""
    graph = ActionGraph.of(schedule, lowered, receives_block=False)
    blocked = set(graph.blocked())
    reported_ranks: set[int] = set()
    for node in sorted(blocked):
        rank, action = graph.nodes[node]
        for predecessor in graph.waits[node]:
            peer_rank, awaited = graph.nodes[predecessor]
            if predecessor in blocked and peer_rank != rank and rank not in reported_ranks:
                reported_ranks.add(rank)
                yield Finding(
                    "no cycle",
                    f"rank {rank} cannot start {action}: it needs {awaited} on rank {peer_rank}",
                    rank,
                    str(action),
                )

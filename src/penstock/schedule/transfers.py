"""Transfers that somebody else wrote beside the ops: do they carry what the ops need, each once, on
the right ranks, in order?

Two ranks exchange messages without names (NCCL, and gloo as torch uses it): the first that is
received is the first that was sent, whatever the receiver took it for. A receive in another order
brings wrong numbers, and no error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from penstock.errors import Finding, ScheduleError
from penstock.schedule.graph import Graph
from penstock.schedule.lower import (
    Action,
    Direction,
    Link,
    LoweredSchedule,
    Message,
    Transfer,
    messages,
)
from penstock.schedule.op import Op, Schedule

#: A file of a million stray transfers has as many faults.
_MOST_FINDINGS = 1000


class _Expected(NamedTuple):
    """A value that crosses ranks by the placement of the ops: from where to where, who makes it and
    who needs it.
    """

    link: Link
    maker: Op
    taker: Op


class _Standing(NamedTuple):
    """A transfer in the programs: its rank and place there."""

    rank: int
    place: int
    transfer: Transfer


def ops_alone(
    lowered: LoweredSchedule, name: str = "custom", pairs: frozenset[tuple[Op, Op]] = frozenset()
) -> Schedule:
    """The schedule without its transfers."""
    programs = tuple(
        tuple(action for action in program if isinstance(action, Op))
        for program in lowered.programs
    )
    return Schedule(programs, name, pairs=pairs)


def unsound(name: str, findings: list[Finding]) -> ScheduleError:
    """The error that tells these findings of the schedule called `name`."""
    many = "" if len(findings) == 1 else f" ({len(findings)} findings, worst first)"
    lines = [
        f"{name} is not sound{many}",
        *(f"[{finding.rule}] {finding.message}" for finding in findings[:12]),
    ]
    return ScheduleError(
        "\n  ".join(lines + [f"… and {len(findings) - 12} more"] * (len(findings) > 12)), findings
    )


def transfer_findings(schedule: Schedule, lowered: LoweredSchedule) -> list[Finding]:
    """What is wrong with the transfers of `lowered`, worst first; none where a value has no taker
    at all, which `verify` finds.

    Args:
        schedule: `lowered` without its transfers.
        lowered: ops and transfers, in the order in which the ranks take them. A receive is posted
        where it stands and waits
            for nothing; the op that needs the value waits.

    Returns:
        Findings of the rules `one transfer` (every value that crosses ranks is sent once and
        received once, on its ranks, after the op that makes it and before the one that needs it),
        `receive order` (between two ranks, in the order of sending), and `no cycle`. Each names its
        rank, and the transfer's text as `op`.
    """
    try:
        expected = {
            message: _Expected(
                link, schedule.programs[link.source][made], schedule.programs[link.target][taken]
            )
            for link, message, made, taken in messages(schedule)
        }
    except (ScheduleError, KeyError):
        return []
    standing: dict[tuple[Direction, Message], list[_Standing]] = defaultdict(list)
    for rank, program in enumerate(lowered.programs):
        for place, action in enumerate(program):
            if isinstance(action, Transfer):
                standing[action.direction, action.message].append(_Standing(rank, place, action))
    findings = [*islice(_one_transfer(schedule, lowered, expected, standing), _MOST_FINDINGS)]
    return findings or [*_receive_order(lowered)] or [*_no_cycle(lowered)]


def _one_transfer(
    schedule: Schedule,
    lowered: LoweredSchedule,
    expected: dict[Message, _Expected],
    standing: dict[tuple[Direction, Message], list[_Standing]],
) -> Iterator[Finding]:
    """Each value that crosses ranks is sent once and received once, where and when it can be."""
    places = {
        (rank, op): place
        for rank, row in enumerate(lowered.programs)
        for place, op in enumerate(row)
        if isinstance(op, Op)
    }
    for message, (link, maker, taker) in expected.items():
        for direction in Direction:
            sends = direction is Direction.SEND
            rank, peer, op = (
                (link.source, link.target, maker) if sends else (link.target, link.source, taker)
            )
            text = str(Transfer(direction, message, peer))
            found = standing.get((direction, message), [])
            if not found:
                waiting = (
                    f"{taker} on rank {link.target} would wait for it for ever"
                    if sends
                    else f"{taker} needs it from rank {link.source}"
                )
                yield Finding(
                    "one transfer", f"{text} is missing on rank {rank}: {waiting}", rank, text
                )
                continue
            if len(found) > 1:
                yield Finding(
                    "one transfer",
                    f"{text} stands {len(found)} times, on ranks "
                    f"{', '.join(str(one.rank) for one in found)}",
                    found[1].rank,
                    text,
                )
                continue
            (one,) = found
            if one.rank != rank:
                yield Finding(
                    "one transfer",
                    f"{text} stands on rank {one.rank}, but {op} on rank {rank}",
                    one.rank,
                    text,
                )
            elif one.transfer.peer != peer:
                yield Finding(
                    "one transfer",
                    f"{text} on rank {rank} is for rank {one.transfer.peer}, but "
                    f"{taker if sends else maker} stands on rank {peer}",
                    rank,
                    text,
                )
            elif sends and one.place < places[rank, maker]:
                yield Finding(
                    "one transfer",
                    f"{text} on rank {rank} stands before {maker}, which makes its value",
                    rank,
                    text,
                )
            elif not sends and one.place > places[rank, taker]:
                yield Finding(
                    "one transfer",
                    f"{text} on rank {rank} comes after {taker}, which needs it",
                    rank,
                    text,
                )
    for (direction, message), found in standing.items():
        for one in found if message not in expected else ():
            yield Finding(
                "one transfer",
                f"{one.transfer} on rank {one.rank} {_needless(schedule, direction, message)}",
                one.rank,
                str(one.transfer),
            )


def _needless(schedule: Schedule, direction: Direction, message: Message) -> str:
    """Why a message crosses no ranks."""
    homes = [
        schedule.placement.get((stage, message.micro_batch))
        for stage in (message.stage, message.target)
    ]
    if None not in homes and homes[0] == homes[1]:
        return f"carries what stays there: stages {message.stage} and {message.target} both stand on rank {homes[0]}"
    verb = (
        "sends what no op makes or no op takes"
        if direction is Direction.SEND
        else "receives what no op makes or no op takes"
    )
    return f"{verb}: {message.kind.value} of micro-batch {message.micro_batch} from stage {message.stage} to {message.target}"


def _links(lowered: LoweredSchedule) -> dict[Link, tuple[list[_Standing], list[_Standing]]]:
    """Per link, its sends and its receives in the order of their programs."""
    links: dict[Link, tuple[list[_Standing], list[_Standing]]] = defaultdict(lambda: ([], []))
    for rank, program in enumerate(lowered.programs):
        for place, action in enumerate(program):
            if isinstance(action, Transfer):
                sends = action.direction is Direction.SEND
                link = Link(rank, action.peer) if sends else Link(action.peer, rank)
                links[link][0 if sends else 1].append(_Standing(rank, place, action))
    return links


def _receive_order(lowered: LoweredSchedule) -> Iterator[Finding]:
    """Between two ranks messages are received in the order in which they are sent."""
    for (source, target), (sends, receives) in _links(lowered).items():
        for number, (send, receive) in enumerate(zip(sends, receives, strict=True)):
            if send.transfer.message != receive.transfer.message:
                yield Finding(
                    "receive order",
                    f"message {number + 1} from rank {source} to rank {target} is sent as {send.transfer} and received as "
                    f"{receive.transfer}: between two ranks messages are received in the order in which they are sent, and "
                    f"{receive.transfer} would get the numbers of {send.transfer}",
                    target,
                    str(receive.transfer),
                )
                break


def waits_of(
    lowered: LoweredSchedule,
) -> tuple[list[tuple[int, Action]], list[list[int]], dict[Link, list[tuple[int, int]]]]:
    """Rank and action of each node, what each waits for where channels are endless, and per link
    the nodes of every message's send and receive. Transfers must have passed the rules above the
    cycle's.
    """
    first, nodes = [0], []
    for rank, program in enumerate(lowered.programs):
        nodes += [(rank, action) for action in program]
        first.append(len(nodes))
    waits = [[node - 1] if node > first[rank] else [] for node, (rank, _) in enumerate(nodes)]
    takers = {(rank, message): first[rank] + place for rank, place, message in _takers(lowered)}
    pairs: dict[Link, list[tuple[int, int]]] = {}
    for link, (sends, receives) in _links(lowered).items():
        both = zip(sends, receives, strict=True)
        pairs[link] = [
            (first[send.rank] + send.place, first[receive.rank] + receive.place)
            for send, receive in both
        ]
        for send, _ in pairs[link]:
            message = nodes[send][1].message  # type: ignore[union-attr]  # sends are transfers
            waits[takers[link.target, message]].append(send)
    return nodes, waits, pairs


def _takers(lowered: LoweredSchedule) -> Iterator[tuple[int, int, Message]]:
    """Rank and place of the op that takes each message."""
    schedule = ops_alone(lowered)
    places = [
        [place for place, action in enumerate(program) if isinstance(action, Op)]
        for program in lowered.programs
    ]
    for link, message, _, taken in messages(schedule):
        yield link.target, places[link.target][taken], message


def _no_cycle(lowered: LoweredSchedule) -> Iterator[Finding]:
    """The programs finish, with any number of messages on their way."""
    nodes, waits, _ = waits_of(lowered)
    stuck = set(Graph((), (), tuple(map(tuple, waits))).order()[1])
    told: set[int] = set()
    for node in sorted(stuck):
        rank, action = nodes[node]
        for other in waits[node]:
            if other in stuck and nodes[other][0] != rank and rank not in told:
                told.add(rank)
                home, awaited = nodes[other]
                yield Finding(
                    "no cycle",
                    f"rank {rank} cannot start {action}: it needs {awaited} on rank {home}",
                    rank,
                    str(action),
                )

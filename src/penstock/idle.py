"""What idle ranks wait for: a value that a neighbour has not computed yet, or the link that carries
it.

Before an op that takes a value of another rank, a rank waits for the *neighbour* until the op that
produces the value ends, and for the *link* from then until the value has arrived. The rest is
neither: sums of gradients, the rank's own overhead, and the time before its first and after its
last op in which no value is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from penstock.event import Event, Timeline
from penstock.schedule.op import ACTIVATION_MOVES, Op
from penstock.schedule.rules import needs

#: Share of the makespan below which a gap is a rounding error of the simulator's sums.
_TOLERANCE = 1e-9


class IdleCause(str, Enum):
    """What an idle rank waits for."""

    NEIGHBOUR = "neighbour"  #: a value that another rank has not computed yet
    LINK = "link"  #: a value that has been computed and has not arrived
    REST = "rest"  #: neither of them


class IdleInterval(NamedTuple):
    """A time in which a rank runs no op, for one cause. Times are in seconds.

    Attributes:
        rank: the rank.
        start, end: of the interval.
        cause: what the rank waits for.
        transfer: the transfer of the value that it waits for; None for the rest.
    """

    rank: int
    start: float
    end: float
    cause: IdleCause
    transfer: Event | None


@dataclass(frozen=True)
class IdleSeconds:
    """Idle time of a rank by its cause, in seconds."""

    neighbour: float = 0.0
    link: float = 0.0
    rest: float = 0.0


class LinkTraffic(NamedTuple):
    """The messages in one direction between two ranks, or two hosts.

    Attributes:
        source, target: the ranks, or the names of the hosts.
        messages: number of messages.
        bytes: their size, summed.
        busy_s: seconds in which at least one of them is on its way.
        waited_s: seconds in which the target is idle because of the link.
    """

    source: int | str
    target: int | str
    messages: int
    bytes: int
    busy_s: float
    waited_s: float


def idle_intervals(timeline: Timeline) -> tuple[IdleInterval, ...]:
    """Return all idle intervals of a timeline, rank by rank, in order of time.

    In a measured timeline an op's `wait_s` is what it waited for its value; idle time before that
    is the rank's own (rest). If it is not known, all the time since the previous op counts as
    waiting.

    Examples:
        >>> import penstock as ps
        >>> schedule = ps.schedule("gpipe", stages=2, micro_batches=1)
        >>> timeline = ps.simulate(schedule, ps.Costs(forward=1, backward=1, transfer=0.5))
        >>> for interval in idle_intervals(timeline):
        ...     print(interval.rank, interval.start, interval.end, interval.cause.value)
        0 1.0 3.5 neighbour
        0 3.5 4.0 link
        1 0.0 1.0 neighbour
        1 1.0 1.5 link
        1 3.5 5.0 rest
    """
    incoming: dict[tuple[int, Op], Event] = {}
    op_end: dict[tuple[int, Op], float] = {}
    rows: list[list[Event]] = [[] for _ in range(timeline.ranks)]
    for event in timeline.events:
        if event.to_rank is None:
            rows[event.rank].append(event)
            op_end[event.rank, event.op] = event.end
        else:
            incoming[event.to_rank, event.op] = event
    tolerance = _TOLERANCE * timeline.makespan
    intervals: list[IdleInterval] = []
    for rank, row in enumerate(rows):
        previous_end = 0.0
        for event in row:
            if event.start > previous_end + tolerance:
                transfer = _last_input(event, timeline, incoming)
                producer_end = None
                if transfer is not None:
                    producer_end = op_end.get((transfer.rank, transfer.op), transfer.start)
                intervals += _split_gap(event, previous_end, transfer, producer_end, tolerance)
            previous_end = max(previous_end, event.end)
        if timeline.makespan > previous_end + tolerance:
            end = timeline.makespan
            intervals.append(IdleInterval(rank, previous_end, end, IdleCause.REST, None))
    return tuple(intervals)


def _last_input(
    event: Event, timeline: Timeline, incoming: dict[tuple[int, Op], Event]
) -> Event | None:
    """Return the transfer that arrives last of those that an op waits for; None without any."""
    producers: list[Op] = []
    if event.op.kind in ACTIVATION_MOVES:
        producers.append(event.op)
    for alternatives in needs(event.op, timeline.stages, timeline.slicing):
        producers += alternatives
    transfers = [incoming[event.rank, op] for op in producers if (event.rank, op) in incoming]
    return max(transfers, key=lambda transfer: transfer.end, default=None)


def _split_gap(
    event: Event,
    gap_start: float,
    transfer: Event | None,
    producer_end: float | None,
    tolerance: float,
) -> Iterator[IdleInterval]:
    """Yield the intervals of the idle time before an op.

    Args:
        event: the op.
        gap_start: the end of the rank's previous op.
        transfer: of the value that the op waits for.
        producer_end: when the op that produces the value ends.
        tolerance: length in seconds of intervals that are left out.
    """
    wait_start = wait_end = event.start
    computed = event.start
    if transfer is not None and producer_end is not None:
        wait_start = gap_start
        if event.wait_s is not None:
            wait_start = max(gap_start, event.start - event.wait_s)
        # Clamped to the gap: the value may have been computed, or have arrived, before it.
        wait_end = min(max(transfer.end, wait_start), event.start)
        computed = min(max(producer_end, wait_start), wait_end)
    parts = (
        (gap_start, wait_start, IdleCause.REST),
        (wait_start, computed, IdleCause.NEIGHBOUR),
        (computed, wait_end, IdleCause.LINK),
        (wait_end, event.start, IdleCause.REST),
    )
    for start, end, cause in parts:
        if end > start + tolerance:
            of_transfer = None if cause is IdleCause.REST else transfer
            yield IdleInterval(event.rank, start, end, cause, of_transfer)


def idle_seconds(
    timeline: Timeline, intervals: Sequence[IdleInterval] | None = None
) -> tuple[IdleSeconds, ...]:
    """Return per rank its idle time by cause.

    Args:
        timeline: the timeline.
        intervals: its idle intervals, if the caller has them.
    """
    seconds: list[dict[IdleCause, float]] = []
    for _ in range(timeline.ranks):
        seconds.append(dict.fromkeys(IdleCause, 0.0))
    for interval in idle_intervals(timeline) if intervals is None else intervals:
        seconds[interval.rank][interval.cause] += interval.end - interval.start
    return tuple(
        IdleSeconds(row[IdleCause.NEIGHBOUR], row[IdleCause.LINK], row[IdleCause.REST])
        for row in seconds
    )


def link_traffic(
    timeline: Timeline,
    intervals: Sequence[IdleInterval] | None = None,
    *,
    by_host: bool = False,
) -> tuple[LinkTraffic, ...]:
    """Return the messages between ranks, by sender and receiver, in the order of the ranks.

    Args:
        timeline: the timeline.
        intervals: its idle intervals, if the caller has them.
        by_host: sum up the ranks of a host, and leave out messages within a host: what the network
            card of a host sends to each other host. Empty if the hosts are not known.
    """
    if by_host and len(timeline.hosts) != timeline.ranks:
        return ()
    name: Sequence[int | str] = timeline.hosts if by_host else range(timeline.ranks)
    transfers: dict[tuple[int | str, int | str], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.to_rank is not None:
            transfers[name[event.rank], name[event.to_rank]].append(event)
    waited: dict[tuple[int | str, int | str], float] = defaultdict(float)
    for interval in idle_intervals(timeline) if intervals is None else intervals:
        if interval.cause is IdleCause.LINK and interval.transfer is not None:
            ends = name[interval.transfer.rank], name[interval.rank]
            waited[ends] += interval.end - interval.start
    rows: list[LinkTraffic] = []
    for source, target in sorted(transfers, key=lambda link: [name.index(end) for end in link]):
        if by_host and source == target:
            continue
        events = transfers[source, target]
        total = sum(event.bytes for event in events)
        busy = _covered_seconds(events)
        rows.append(LinkTraffic(source, target, len(events), total, busy, waited[source, target]))
    return tuple(rows)


def _covered_seconds(events: Sequence[Event]) -> float:
    """Return the length of the union of the events' times."""
    covered, reached = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.start):
        covered += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return covered

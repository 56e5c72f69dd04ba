"""A schedule as a graph: what waits for what once ranks are sequential and links carry one message
at a time.

One graph serves all: verify looks for cycles, draw gives every op one unit, simulate gives it
seconds. An op starts when all that it waits for has ended, so times are longest paths and need no
clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from penstock.errors import ScheduleError
from penstock.schedule.lower import Direction, Link, Message, Transfer, lower, messages
from penstock.schedule.op import HANDING, Kind, Op, Schedule
from penstock.schedule.rules import needs
from penstock.schedule.stream import Stream
from penstock.schedule.updates import met_by

#: What happened, as an Event has it: rank, op, start, end, bytes, and the rank it goes to if it is
#: a transfer.
Row = tuple[int, Op, float, float, int, int | None]


@dataclass(frozen=True)
class Graph:
    """Nodes are the ops, rank by rank, then the transfers. `waits_for[n]` are the nodes that end
    before n starts.

    `paired[n]` is the first op of the pair whose second op is n, if it is one: they start and end
    together.
    """

    ops: tuple[tuple[int, Op], ...]
    transfers: tuple[tuple[Link, Message, Op], ...]
    waits_for: tuple[tuple[int, ...], ...]
    paired: Mapping[int, int] = field(default_factory=dict)

    def order(self) -> tuple[list[int], list[int]]:
        """Nodes in an order in which each comes after all it waits for, and the nodes on or behind
        a cycle.
        """
        missing = [len(before) for before in self.waits_for]
        after: list[list[int]] = [[] for _ in self.waits_for]
        for node, before in enumerate(self.waits_for):
            for other in before:
                after[other].append(node)
        ready = [node for node, count in enumerate(missing) if count == 0]
        for node in ready:  # grows while it is read
            for other in after[node]:
                missing[other] -= 1
                if missing[other] == 0:
                    ready.append(other)
        return ready, [node for node, count in enumerate(missing) if count]

    def work(self, node: int) -> tuple[int, Op]:
        """The rank and the op of a node; of a transfer, those that made its value."""
        if node < len(self.ops):
            return self.ops[node]
        link, _, op = self.transfers[node - len(self.ops)]
        return link.source, op

    def events(
        self,
        op_seconds: Callable[[int, Op], float],
        transfer_seconds: Callable[[Link, Message], float],
    ) -> list[Row]:
        """Start and end of everything, in an order in which each row comes after all it waits for.

        Raises nothing: call it on a graph without cycles. `Timeline.of` takes the rows.
        """
        ends = [0.0] * len(self.waits_for)
        events: list[Row] = []
        seconds_of = {first: second for second, first in self.paired.items()}
        starts: dict[int, float] = {}
        for node in self.order()[0]:
            start = max((ends[other] for other in self.waits_for[node]), default=0.0)
            if node in self.paired:
                rank, op = self.ops[node]
                ends[node] = start
                events.append((rank, op, starts[self.paired[node]], start, 0, None))
            elif node < len(self.ops):
                rank, op = self.ops[node]
                ends[node] = start + op_seconds(rank, op)
                if node in seconds_of:
                    starts[node] = start
                    ends[node] += op_seconds(*self.ops[seconds_of[node]])
                events.append((rank, op, start, ends[node], 0, None))
            else:
                link, message, op = self.transfers[node - len(self.ops)]
                ends[node] = start + transfer_seconds(link, message)
                events.append((link.source, op, start, ends[node], 0, link.target))
        return events


def build(schedule: Schedule, overlap: bool = True) -> Graph:
    """The graph of a schedule.

    Args:
        schedule: every op's predecessors must exist.
        overlap: False makes a rank stand still while it sends (transfers then cost the sender's
        time, as blocking sends do).

    Raises:
        ScheduleError: an op's predecessor is missing.
    """
    ops = tuple((rank, op) for rank, program in enumerate(schedule.programs) for op in program)
    first = [0]
    for program in schedule.programs:
        first.append(first[-1] + len(program))
    waits: list[list[int]] = [
        [node - 1] if node > first[rank] else [] for node, (rank, _) in enumerate(ops)
    ]
    by_op = {op: node for node, (_, op) in enumerate(ops) if op.kind not in HANDING}
    carried: dict[tuple[int, Op], int] = {}
    transfers: list[tuple[Link, Message, Op]] = []
    last_on: dict[Link, int] = {}
    for link, message, made, taken in messages(schedule):
        maker = first[link.source] + made
        node = len(ops) + len(transfers)
        waits.append([maker, last_on[link]] if link in last_on else [maker])
        last_on[link] = node
        if message.kind in HANDING:
            waits[first[link.target] + taken].append(node)
        carried[first[link.target] + taken, ops[maker][1]] = node
        transfers.append((link, message, ops[maker][1]))
        if not overlap:
            sender = schedule.programs[link.source]
            after = made + (2 if tuple(sender[made : made + 2]) in schedule.pairs else 1)
            if after < len(sender):
                waits[first[link.source] + after].append(node)
    for node, (rank, op) in enumerate(ops):
        for group in needs(op, schedule.stages, schedule.slicing):
            found = [other for other in group if other in by_op]
            if not found:
                raise ScheduleError(
                    f"rank {rank}: {op} needs {' or '.join(map(str, group))}, which no rank runs"
                )
            waits[node] += [carried.get((node, other), by_op[other]) for other in found]
    _meet(waits, ((node, rank, op) for node, (rank, op) in enumerate(ops)), schedule.stream)
    paired = {
        node + 1: node
        for node in range(len(ops) - 1)
        if (ops[node][1], ops[node + 1][1]) in schedule.pairs
    }
    for second, one in paired.items():
        waits[one] += [other for other in waits[second] if other != one]
        waits[second] = [one]
    return Graph(ops, tuple(transfers), tuple(map(tuple, waits)), paired)


def _meet(
    waits: list[list[int]], ops: Iterable[tuple[int, int, Op]], stream: Stream | None
) -> None:
    """Let every U wait for those of its stage's other copies that it meets or follows (see
    `met_by`).
    """
    standing: dict[Op, dict[int, int]] = defaultdict(dict)
    for node, rank, op in ops:
        if op.kind is Kind.U:
            standing[op].setdefault(rank, node)
    for op, copies in standing.items():
        met = met_by(op, stream)
        if met == op:
            before = sorted({other for node in copies.values() for other in waits[node]})
            for node in copies.values() if len(copies) > 1 else ():
                waits[node] = before
        elif met is not None:
            for rank, node in copies.items():
                waits[node] += [
                    other for home, other in standing.get(met, {}).items() if home != rank
                ]


def channel_depth(schedule: Schedule) -> int:
    """The least k for which the programs finish when sends block while k messages of their link are
    not yet taken.

    A message is taken where its receive stands, right before the op that needs it; 0 is a
    rendezvous. The runtime's sends never block, so any k is fine there: the figure is for backends
    and libraries with bounded channels.
    """
    waits: list[list[int]] = []
    updates: list[tuple[int, int, Op]] = []
    sends: dict[Link, list[int]] = defaultdict(list)
    takes: dict[Link, list[int]] = defaultdict(list)
    for rank, program in enumerate(lower(schedule, ahead=0).programs):
        for i, action in enumerate(program):
            if isinstance(action, Transfer):
                sending = action.direction is Direction.SEND
                link = Link(rank, action.peer) if sending else Link(action.peer, rank)
                (sends if sending else takes)[link].append(len(waits))
            elif action.kind is Kind.U:
                updates.append((len(waits), rank, action))
            waits.append([len(waits) - 1] if i else [])
    _meet(waits, updates, schedule.stream)

    def finishes(depth: int) -> bool:
        bounded = [list(before) for before in waits]
        for link, sent in sends.items():
            for n, (send, take) in enumerate(zip(sent, takes[link], strict=True)):
                bounded[take].append(send)
                # A rendezvous sends when the receiver has come as far as its receive; a channel
                # when it has room.
                bounded[send] += (
                    waits[take]
                    if depth == 0
                    else takes[link][n - depth : n - depth + 1]
                    if n >= depth
                    else ()
                )
        return not Graph((), (), tuple(map(tuple, bounded))).order()[1]

    most = max(map(len, sends.values()), default=0)
    low = high = 0
    while high < most and not finishes(
        high
    ):  # most schedules need 0 or 1: up by doubling before halving
        low, high = high + 1, min(2 * high + 1, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if finishes(middle) else (middle + 1, high)
    return low

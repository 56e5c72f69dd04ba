"""Dependency graph of a schedule: ops and transfers, and what each of them waits for.

Ranks run their programs sequentially, and links carry one message at a time. All users share this
graph: verify looks for cycles, draw gives every op one unit of time, simulate gives it seconds. An
op starts when all that it waits for has ended, so times are longest paths and need no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import ScheduleError
from penstock.schedule.dependencies import add_gradient_sync, topological_order
from penstock.schedule.lower import Direction, Link, Message, Transfer, lower, messages
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.rules import needs

#: The fields of an Event: rank, op, start, end, bytes, and the receiving rank of a transfer.
EventRow = tuple[int, Op, float, float, int, int | None]


@dataclass(frozen=True)
class Graph:
    """Dependency graph whose nodes are numbered: first the ops rank by rank, then the transfers.

    Attributes:
        ops: rank and op of the op nodes.
        transfers: link, message and producing op of the transfer nodes.
        waits_for: per node, the nodes that must end before it starts.
        paired: the second op of every pair to its first op: they start and end together.
    """

    ops: tuple[tuple[int, Op], ...]
    transfers: tuple[tuple[Link, Message, Op], ...]
    waits_for: tuple[tuple[int, ...], ...]
    paired: Mapping[int, int] = field(default_factory=dict)

    def order(self) -> tuple[list[int], list[int]]:
        """Sort the nodes topologically.

        Returns:
            The nodes in an order in which each follows all that it waits for, and the nodes that
            are on a cycle or wait for one.
        """
        return topological_order(self.waits_for)

    def work(self, node: int) -> tuple[int, Op]:
        """Return the rank and op of a node; for a transfer, the sender and the producing op."""
        if node < len(self.ops):
            return self.ops[node]
        link, _, op = self.transfers[node - len(self.ops)]
        return link.source, op

    def events(
        self,
        op_seconds: Callable[[int, Op], float],
        transfer_seconds: Callable[[Link, Message], float],
    ) -> list[EventRow]:
        """Compute the start and end of every op and transfer.

        The graph must have no cycle.

        Args:
            op_seconds: duration of an op on a rank.
            transfer_seconds: duration of a message on a link.

        Returns:
            Rows that `Timeline.of` takes, each after all that it waits for.
        """
        ends = [0.0] * len(self.waits_for)
        events: list[EventRow] = []
        second_of = {first: second for second, first in self.paired.items()}
        pair_starts: dict[int, float] = {}
        for node in self.order()[0]:
            start = max((ends[predecessor] for predecessor in self.waits_for[node]), default=0.0)
            if node in self.paired:
                # The second op of a pair waits for the first alone, which ends both.
                rank, op = self.ops[node]
                ends[node] = start
                events.append((rank, op, pair_starts[self.paired[node]], start, 0, None))
            elif node < len(self.ops):
                rank, op = self.ops[node]
                ends[node] = start + op_seconds(rank, op)
                if node in second_of:
                    pair_starts[node] = start
                    ends[node] += op_seconds(*self.ops[second_of[node]])
                events.append((rank, op, start, ends[node], 0, None))
            else:
                link, message, op = self.transfers[node - len(self.ops)]
                ends[node] = start + transfer_seconds(link, message)
                events.append((link.source, op, start, ends[node], 0, link.target))
        return events


def build_graph(schedule: Schedule, overlap: bool = True) -> Graph:
    """Build the dependency graph of a schedule.

    Args:
        schedule: a schedule in which the predecessors of every op exist.
        overlap: whether transfers overlap with compute. False makes a rank idle while it sends,
            as blocking sends do.

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
    transfers, arrivals = _add_transfers(waits, schedule, first, overlap)
    _add_inputs(waits, schedule, ops, arrivals)
    add_gradient_sync(
        waits, ((node, rank, op) for node, (rank, op) in enumerate(ops)), schedule.stream
    )
    paired = _merge_pairs(waits, schedule, ops)
    return Graph(ops, tuple(transfers), tuple(map(tuple, waits)), paired)


def _merge_pairs(
    waits: list[list[int]], schedule: Schedule, ops: Sequence[tuple[int, Op]]
) -> dict[int, int]:
    """Let the first op of every pair wait for the inputs of both, and the second for the first.

    Returns:
        The node of the first op by that of the second.
    """
    paired: dict[int, int] = {}
    for node in range(len(ops) - 1):
        if (ops[node][1], ops[node + 1][1]) in schedule.pairs:
            paired[node + 1] = node
    for second, first in paired.items():
        waits[first] += [node for node in waits[second] if node != first]
        waits[second] = [first]
    return paired


def _add_transfers(
    waits: list[list[int]], schedule: Schedule, first: Sequence[int], overlap: bool
) -> tuple[list[tuple[Link, Message, Op]], dict[tuple[int, Op], int]]:
    """Append the transfer nodes to `waits`.

    Returns:
        The transfers; and the transfer node of every received value, by the node of the op that
        needs it and the op that produces it.
    """
    op_count = len(waits)
    transfers: list[tuple[Link, Message, Op]] = []
    arrivals: dict[tuple[int, Op], int] = {}
    last_on_link: dict[Link, int] = {}
    for link, message, producer_index, consumer_index in messages(schedule):
        sender_program = schedule.programs[link.source]
        producer = first[link.source] + producer_index
        producer_op = sender_program[producer_index]
        consumer = first[link.target] + consumer_index
        node = op_count + len(transfers)
        waits.append([producer, last_on_link[link]] if link in last_on_link else [producer])
        last_on_link[link] = node
        if message.kind in ACTIVATION_MOVES:
            waits[consumer].append(node)
        arrivals[consumer, producer_op] = node
        transfers.append((link, message, producer_op))
        if not overlap:
            pair = sender_program[producer_index : producer_index + 2]
            next_index = producer_index + (2 if tuple(pair) in schedule.pairs else 1)
            if next_index < len(sender_program):
                waits[first[link.source] + next_index].append(node)
    return transfers, arrivals


def _add_inputs(
    waits: list[list[int]],
    schedule: Schedule,
    ops: Sequence[tuple[int, Op]],
    arrivals: Mapping[tuple[int, Op], int],
) -> None:
    """Let every op wait for its inputs, or for the transfers that bring them."""
    node_of = {op: node for node, (_, op) in enumerate(ops) if op.kind not in ACTIVATION_MOVES}
    for node, (rank, op) in enumerate(ops):
        for alternatives in needs(op, schedule.stages, schedule.slicing):
            inputs = [other for other in alternatives if other in node_of]
            if not inputs:
                raise ScheduleError(
                    f"rank {rank}: {op} needs {' or '.join(map(str, alternatives))}, "
                    "which no rank runs"
                )
            waits[node] += [arrivals.get((node, other), node_of[other]) for other in inputs]


def channel_depth(schedule: Schedule) -> int:
    """Return the minimum channel capacity with which the programs do not deadlock.

    A send blocks while the channel of its link holds that number of messages. A message leaves the
    channel where its receive stands, right before the op that needs it; capacity 0 is a rendezvous.
    The runtime's sends never block, so any capacity is fine there: the figure is for backends and
    libraries with bounded channels.
    """
    waits: list[list[int]] = []
    updates: list[tuple[int, int, Op]] = []
    sends: dict[Link, list[int]] = defaultdict(list)
    receives: dict[Link, list[int]] = defaultdict(list)
    for rank, program in enumerate(lower(schedule, ahead=0).programs):
        for i, action in enumerate(program):
            node = len(waits)
            if not isinstance(action, Transfer):
                if action.kind is Kind.U:
                    updates.append((node, rank, action))
            elif action.direction is Direction.SEND:
                sends[Link(rank, action.peer)].append(node)
            else:
                receives[Link(action.peer, rank)].append(node)
            waits.append([node - 1] if i else [])
    add_gradient_sync(waits, updates, schedule.stream)
    for link, send_nodes in sends.items():
        for send, receive in zip(send_nodes, receives[link], strict=True):
            waits[receive].append(send)
    pairs = {link: list(zip(nodes, receives[link], strict=True)) for link, nodes in sends.items()}
    return minimum_depth(waits, pairs)


def minimum_depth(
    waits: Sequence[Sequence[int]], pairs: Mapping[Link, Sequence[tuple[int, int]]]
) -> int:
    """Return the minimum channel capacity for which a graph with blocking sends has no cycle.

    Args:
        waits: per node, what it waits for if channels are unbounded.
        pairs: per link, the nodes of the send and the receive of each message, in order.
    """
    maximum = max(map(len, pairs.values()), default=0)
    low = high = 0
    # Most schedules need 0 or 1: double the capacity first, then bisect.
    while high < maximum and not _finishes(waits, pairs, high):
        low, high = high + 1, min(2 * high + 1, maximum)
    while low < high:
        middle = (low + high) // 2
        if _finishes(waits, pairs, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _finishes(
    waits: Sequence[Sequence[int]], pairs: Mapping[Link, Sequence[tuple[int, int]]], depth: int
) -> bool:
    """Return whether the graph has no cycle with channels of capacity `depth`."""
    bounded = [list(predecessors) for predecessors in waits]
    for link_messages in pairs.values():
        for number, (send, receive) in enumerate(link_messages):
            if depth == 0:
                # Rendezvous: the send needs the receiver to have reached its receive.
                bounded[send] += [node for node in waits[receive] if node != send]
            elif number >= depth:
                bounded[send].append(link_messages[number - depth][1])
    return not topological_order(bounded)[1]

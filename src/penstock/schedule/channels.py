"""What the ops and transfers of lowered programs wait for, and what their channels must buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.schedule.dependencies import dependencies_of, share_predecessors, successors_of
from penstock.schedule.lower import (
    Action,
    Direction,
    Link,
    LoweredSchedule,
    Transfer,
    lower,
    messages,
)
from penstock.schedule.op import Schedule


@dataclass(frozen=True)
class ActionGraph:
    """Dependency graph whose nodes are the ops and transfers of lowered programs, rank by rank.

    Attributes:
        nodes: rank and action of each node.
        waits: per node, the nodes that it waits for if channels are unbounded.
        transfers: per link, the nodes of the send and the receive of every message, in order.
    """

    nodes: Sequence[tuple[int, Action]]
    waits: Sequence[Sequence[int]]
    transfers: Mapping[Link, Sequence[tuple[int, int]]]

    @classmethod
    def of(
        cls, schedule: Schedule, lowered: LoweredSchedule, *, receives_block: bool
    ) -> ActionGraph:
        """Build the graph of a schedule without cycles and its lowered programs.

        Args:
            schedule: `lowered` without its transfers.
            lowered: ops and transfers, which carry each message once, in the order of its link.
            receives_block: whether a rank waits for a message at its receive. Otherwise a receive
                is posted where it stands, and the op that consumes the message waits.
        """
        nodes: list[tuple[int, Action]] = []
        waits: list[list[int]] = []
        node_of_op: list[int] = []
        node_of_transfer: dict[tuple[int, Transfer], int] = {}
        for rank, program in enumerate(lowered.programs):
            for place, action in enumerate(program):
                if isinstance(action, Transfer):
                    node_of_transfer[rank, action] = len(nodes)
                else:
                    node_of_op.append(len(nodes))
                # An action waits for the one before it on its rank.
                waits.append([len(nodes) - 1] if place else [])
                nodes.append((rank, action))
        dependencies = dependencies_of(schedule)
        first = dependencies.ops.first.tolist()
        transfers: dict[Link, list[tuple[int, int]]] = defaultdict(list)
        for link, message, _, consumer in messages(schedule):
            send = node_of_transfer[link.source, Transfer(Direction.SEND, message, link.target)]
            receive = node_of_transfer[link.target, Transfer(Direction.RECV, message, link.source)]
            transfers[link].append((send, receive))
            waiting = receive if receives_block else node_of_op[first[link.target] + consumer]
            waits[waiting].append(send)
        consumer_of = dependencies.consumer.tolist()
        for op, inputs in enumerate(dependencies.inputs()):
            # Inputs that come as messages are waited for above.
            local = [node_of_op[source] for source in inputs if consumer_of[source] != op]
            waits[node_of_op[op]] += local
        for group in dependencies.groups(pairs=False):
            share_predecessors(waits, [node_of_op[op] for op in group])
        in_order = {link: sorted(link_transfers) for link, link_transfers in transfers.items()}
        return cls(nodes, waits, in_order)

    def blocked(self, depth: int | None = None) -> list[int]:
        """Return the nodes that never start with channels of capacity `depth`; None: unbounded."""
        if depth is None:
            return topological_order(self.waits)[1]
        bounded = [list(predecessors) for predecessors in self.waits]
        for link_transfers in self.transfers.values():
            for number, (send, receive) in enumerate(link_transfers):
                if depth == 0:
                    # Rendezvous: the send needs the receiver to have reached its receive.
                    bounded[send] += [node for node in self.waits[receive] if node != send]
                elif number >= depth:
                    # The channel is full until the message `depth` places before is received.
                    bounded[send].append(link_transfers[number - depth][1])
        return topological_order(bounded)[1]

    def channel_depth(self) -> int:
        """Return the minimum channel capacity with which the programs do not deadlock."""
        most = max(map(len, self.transfers.values()), default=0)
        low = high = 0
        # Most schedules need 0 or 1: double the capacity first, then bisect.
        while high < most and self.blocked(high):
            low, high = high + 1, min(2 * high + 1, most)
        while low < high:
            middle = (low + high) // 2
            if self.blocked(middle):
                low = middle + 1
            else:
                high = middle
        return low


def channel_depth(schedule: Schedule) -> int:
    """Return the minimum channel capacity with which the programs do not deadlock.

    A send blocks while the channel of its link holds that number of messages. A message leaves the
    channel where its receive stands, right before the op that needs it; capacity 0 is a rendezvous.
    The runtime's sends never block, so any capacity is fine there: the figure is for backends and
    libraries with bounded channels.
    """
    return ActionGraph.of(schedule, lower(schedule, ahead=0), receives_block=True).channel_depth()


def topological_order(predecessors: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Sort the nodes of a graph topologically.

    Args:
        predecessors: per node, the nodes that must come before it.

    Returns:
        The nodes in an order in which each follows its predecessors; and the nodes that are on a
        cycle or behind one, which cannot be ordered.
    """
    missing = [len(nodes) for nodes in predecessors]
    successors = successors_of(predecessors)
    ready = [node for node, count in enumerate(missing) if count == 0]
    for node in ready:  # the list grows while it is iterated over
        for successor in successors[node]:
            missing[successor] -= 1
            if missing[successor] == 0:
                ready.append(successor)
    blocked = [node for node, count in enumerate(missing) if count]
    return ready, blocked

"""Dependencies between ops of different ranks.

An op depends on the previous op of its rank, on the ops that produce the values it receives from
other ranks, and, for a U, on what the other copies of its stage have done before theirs (see
`awaited_update`). In-rank inputs come earlier in the same program, so program order covers them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streams import Stream
from penstock.schedule.updates import awaited_update


class Crossing(NamedTuple):
    """A value that crosses ranks.

    Attributes:
        source, target: the ranks that send and receive it.
        producer: index of the op that produces it, in the program of `source`.
        consumer: index of the op that needs it, in the program of `target`.
    """

    source: int
    producer: int
    target: int
    consumer: int


def last_dependencies(schedule: Schedule, crossings: Sequence[Crossing]) -> list[int]:
    """For every crossing, find the last op of its target rank that its value depends on.

    A receive that is posted before this op waits for a message that cannot be sent until the
    receiving rank itself has gone on. Under NCCL a posted receive is a kernel on the device, and
    any call that waits until the device is idle (cudaFree, cudaHostAlloc, a synchronize) would
    then deadlock.

    The run time is proportional to the number of ops times the number of ranks.

    Args:
        schedule: a sound schedule.
        crossings: all of its values that cross ranks.

    Returns:
        Indices in the targets' programs; -1 if the value depends on no op of its target.
    """
    first = [0]
    for program in schedule.programs:
        first.append(first[-1] + len(program))
    predecessors: list[list[int]] = [[] for _ in range(first[-1])]
    for start, end in pairwise(first):
        for node in range(start + 1, end):
            predecessors[node].append(node - 1)
    for source, producer, target, consumer in crossings:
        predecessors[first[target] + consumer].append(first[source] + producer)
    add_gradient_sync(predecessors, _update_nodes(schedule, first), schedule.stream)
    last = _last_of_every_rank(schedule, predecessors)
    return [
        last[first[crossing.source] + crossing.producer][crossing.target] for crossing in crossings
    ]


def _update_nodes(schedule: Schedule, first: Sequence[int]) -> Iterator[tuple[int, int, Op]]:
    """Yield node, rank and op of all U ops; `first` has the first node of each rank."""
    for rank, program in enumerate(schedule.programs):
        for index, op in enumerate(program):
            if op.kind is Kind.U:
                yield first[rank] + index, rank, op


def _last_of_every_rank(
    schedule: Schedule, predecessors: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For every op, find the last op of every rank that it depends on, itself included."""
    rank_and_index = []
    for rank, program in enumerate(schedule.programs):
        rank_and_index += [(rank, index) for index in range(len(program))]
    last = [[-1] * schedule.ranks for _ in predecessors]
    for node in topological_order(predecessors)[0]:
        row = last[node]
        for predecessor in predecessors[node]:
            row = list(map(max, row, last[predecessor]))
        rank, index = rank_and_index[node]
        row[rank] = index
        last[node] = row
    return last


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


def successors_of(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the nodes that each node is a predecessor of."""
    successors: list[list[int]] = [[] for _ in predecessors]
    for node, nodes in enumerate(predecessors):
        for predecessor in nodes:
            successors[predecessor].append(node)
    return successors


def add_gradient_sync(
    predecessors: list[list[int]], ops: Iterable[tuple[int, int, Op]], stream: Stream | None
) -> None:
    """Add the dependencies of every U on the U ops of the stage's other copies (see `awaited_update`).

    Copies that run the same U together start at the same time, so each depends on the predecessors
    of all of them.

    Args:
        predecessors: per node, the nodes that must come before it; changed in place.
        ops: node, rank and op, for all U ops at least.
        stream: stream of the schedule.
    """
    update_nodes: dict[Op, dict[int, int]] = defaultdict(dict)
    for node, rank, op in ops:
        if op.kind is Kind.U:
            update_nodes[op].setdefault(rank, node)
    for op, copies in update_nodes.items():
        awaited = awaited_update(op, stream)
        if awaited == op:
            _share_predecessors(predecessors, list(copies.values()))
        elif awaited is not None:
            awaited_nodes = update_nodes.get(awaited, {}).items()
            for rank, node in copies.items():
                predecessors[node] += [other for home, other in awaited_nodes if home != rank]


def _share_predecessors(predecessors: list[list[int]], nodes: Sequence[int]) -> None:
    """Give each of the nodes the predecessors of all of them."""
    if len(nodes) > 1:
        union: set[int] = set()
        for node in nodes:
            union.update(predecessors[node])
        shared = sorted(union)
        for node in nodes:
            predecessors[node] = shared

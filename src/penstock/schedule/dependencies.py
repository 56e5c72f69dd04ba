"""Which ops of a rank a message from another rank depends on.

An op depends on the op before it on its rank, on the ops that make the values it takes from other
ranks, and at a U on what the other copies of its stage have done before theirs (see `met_by`).
In-rank inputs come earlier in the same program, so program order covers them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.updates import met_by


class Crossing(NamedTuple):
    """A value that one rank makes and another takes: ranks, and indices of the two ops in their
    programs.
    """

    source: int
    made: int
    target: int
    taken: int


def last_dependencies(schedule: Schedule, crossings: Sequence[Crossing]) -> list[int]:
    """For every crossing, the last op of its target that its value depends on.

    A receive that is posted before this op waits for a message that cannot be sent until the
    receiving rank itself has gone on. Under NCCL a posted receive is a kernel on the device, and
    whatever makes the device idle (cudaFree, cudaHostAlloc, a synchronize) would then wait for
    ever.

    Takes time in the number of ops times the number of ranks.

    Args:
        schedule: a sound schedule.
        crossings: all of its values that cross ranks.

    Returns:
        Indices in the targets' programs; -1 where the value depends on no op of its target.
    """
    first = [0]
    for program in schedule.programs:
        first.append(first[-1] + len(program))
    before: list[list[int]] = [[] for _ in range(first[-1])]
    for start, end in pairwise(first):
        for node in range(start + 1, end):
            before[node].append(node - 1)
    for source, made, target, taken in crossings:
        before[first[target] + taken].append(first[source] + made)
    _add_meetings(schedule, first, before)
    last = _last_of_every_rank(schedule, before)
    return [last[first[source] + made][target] for source, made, target, _ in crossings]


def _add_meetings(schedule: Schedule, first: Sequence[int], before: list[list[int]]) -> None:
    """Let every U depend on what the U's of its stage's other copies that it meets or follows
    depend on.
    """
    copies: dict[Op, dict[int, int]] = defaultdict(dict)
    for rank, program in enumerate(schedule.programs):
        for index, op in enumerate(program):
            if op.kind is Kind.U:
                copies[op].setdefault(rank, first[rank] + index)
    for op, nodes in copies.items():
        met = met_by(op, schedule.stream)
        if met == op and len(nodes) > 1:
            shared = sorted({other for node in nodes.values() for other in before[node]})
            for node in nodes.values():
                before[node] = shared
        elif met is not None and met != op:
            for rank, node in nodes.items():
                others = copies.get(met, {})
                before[node] += [other for home, other in others.items() if home != rank]


def _last_of_every_rank(schedule: Schedule, before: Sequence[Sequence[int]]) -> list[list[int]]:
    """For every op, the last op of every rank that it depends on, itself included."""
    place = [
        (rank, index)
        for rank, program in enumerate(schedule.programs)
        for index in range(len(program))
    ]
    last = [[-1] * schedule.ranks for _ in before]
    after: list[list[int]] = [[] for _ in before]
    for node, others in enumerate(before):
        for other in others:
            after[other].append(node)
    missing = [len(others) for others in before]
    ready = [node for node, count in enumerate(missing) if count == 0]
    for node in ready:  # grows while it is read
        rank, index = place[node]
        row = last[node]
        row[rank] = index
        for other in after[node]:
            last[other] = list(map(max, last[other], row))
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    return last

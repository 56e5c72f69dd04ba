"""What ranks wait for while they are idle, and the critical path, in simulated timelines.

An op starts when its rank is free and its inputs have arrived; so before an op that does not start
at the end of the previous one, the rank waits for the input that arrives last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.errors import ScheduleError
from penstock.event import Timeline
from penstock.schedule.arrays import Array
from penstock.schedule.dependencies import Dependencies, dependencies_of
from penstock.schedule.op import Op, Schedule

#: Shares of the makespan below which a gap is a rounding error of the simulator's sums.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Wait:
    """Why a rank is idle before one of its ops.

    Attributes:
        op: the op whose value arrives last.
        rank: the rank that runs it.
        end: when it ends, in seconds.
        arrival: when its value arrives; `end` if it does not cross ranks.
    """

    op: Op
    rank: int
    end: float
    arrival: float


def dependencies_of_timeline(panel: Timeline) -> Dependencies | None:
    """Return the dependencies of the ops of a simulated timeline.

    Returns None for a measured timeline, and for one that is a part of another: its ops wait for
    ops that are not in it.
    """
    if panel.source != "simulated" or panel.log.moves is None:
        return None
    bounds = panel.log.ops.first.tolist()
    ops = panel.log.ops.all_ops()
    programs = [tuple(ops[low:high]) for low, high in pairwise(bounds)]
    try:
        return dependencies_of(Schedule(tuple(programs), panel.title, slicing=panel.slicing))
    except ScheduleError:
        return None


def waits(panel: Timeline, dependencies: Dependencies) -> list[dict[int, Wait]]:
    """Return per rank what it waits for before its ops, by their positions in its program.

    Ops that start at the end of the previous op are absent, and so are those that wait for
    something else than a value, such as an update that waits for other replicas.

    Args:
        panel: a simulated timeline.
        dependencies: of its schedule.
    """
    log, graph = panel.log, dependencies.graph
    if log.moves is None or len(log.start) != len(graph.link):
        return [{} for _ in range(panel.ranks)]
    tolerance = _TOLERANCE * panel.makespan
    arrival = np.where(graph.link >= 0, log.moves.end, log.end)
    by_rank: list[dict[int, Wait]] = []
    bounds = log.ops.first.tolist()
    for low, high in pairwise(bounds):
        previous_end = np.concatenate([[0.0], np.maximum.accumulate(log.end[low:high])])[:-1]
        idle = np.flatnonzero(log.start[low:high] - previous_end > tolerance)
        rank_waits = {}
        for position in idle.tolist():
            source = _last_input(dependencies, low + position, arrival)
            if source is not None and arrival[source] >= previous_end[position] + tolerance:
                rank_waits[position] = Wait(
                    log.ops.op(source),
                    int(log.ops.rank[source]),
                    float(log.end[source]),
                    float(arrival[source]),
                )
        by_rank.append(rank_waits)
    return by_rank


def _last_input(dependencies: Dependencies, row: int, arrival: Array) -> int | None:
    """Return the input of an op that arrives last; also of the op that runs with it as a pair."""
    graph = dependencies.graph
    sources = []
    member = int(graph.leader[row])
    while member >= 0:
        sources += [int(graph.first_input[member]), int(graph.second_input[member])]
        member = int(graph.next_in_group[member])
    inputs = [source for source in sources if source >= 0]
    return max(inputs, key=lambda source: arrival[source]) if inputs else None


def critical_path(panel: Timeline, dependencies: Dependencies) -> list[list[int]]:
    """Return per rank the ops of the critical path, by their positions in its program, ascending.

    The critical path leads from the op that ends last back to the start of the timeline. Before
    each of its ops comes the one that it starts after without a gap: the previous op of its rank,
    or the op whose value arrives last. Time saved elsewhere does not make the timeline shorter,
    unless messages wait for each other on a shared link. The path is cut off at an op that waits
    for something else than a value.

    Args:
        panel: a simulated timeline.
        dependencies: of its schedule.
    """
    log, graph = panel.log, dependencies.graph
    path: list[list[int]] = [[] for _ in range(panel.ranks)]
    if log.moves is None or len(log.start) != len(graph.link) or not len(log.start):
        return path
    tolerance = _TOLERANCE * panel.makespan
    arrival = np.where(graph.link >= 0, log.moves.end, log.end)
    first_row = log.ops.first
    row: int | None = int(np.argmax(log.end))
    while row is not None:
        rank = int(log.ops.rank[row])
        path[rank].append(row - int(first_row[rank]))
        previous = _previous_on_rank(log.start, log.end, int(first_row[rank]), row)
        start = log.start[row] - tolerance
        if previous is not None and log.end[previous] >= start:
            row = previous
        else:
            source = _last_input(dependencies, row, arrival)
            row = source if source is not None and arrival[source] >= start else None
    return [sorted(positions) for positions in path]


def _previous_on_rank(start: Array, end: Array, first: int, row: int) -> int | None:
    """Return the op of the same rank that ended last when an op started; None before the first.

    The op that runs with it as a pair started with it, and does not count.
    """
    previous = row - 1
    while previous >= first and start[previous] >= start[row]:
        previous -= 1
    if previous < first:
        return None
    # The other op of a pair may end later.
    if previous > first and end[previous - 1] > end[previous]:
        previous -= 1
    return previous

"""Place the gradient synchronisation of stages that have copies on several ranks.

A U op of such a stage is a collective operation: all copies take part in it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice

from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.schedule.unit_times import unit_times, usual_units

#: Start and end of the ops of one rank, in order.
TimedOps = list[tuple[float, float, Op]]


def with_gradient_sync(
    programs: Sequence[Sequence[Op]], pairs: frozenset[tuple[Op, Op]] = frozenset()
) -> tuple[Program, ...]:
    """Add the U of every stage to the programs, where it delays no rank.

    The copies of a stage synchronise at the first moment at which all have their gradients and each
    of their ranks is idle (Li and Hoefler 2021, Chimera, section 3.2: early only where bubbles hide
    it). Moments are those of f = 1, b = 2, i = w = 1 and free links. All ranks synchronise their
    stages in the order of these moments, and an op comes before a U only if it begins before that
    moment, so there is no deadlock.

    >>> rows = "1F1 0F0 1B1 0B0", "0F1 1F0 0B1 1B0"
    >>> for row in with_gradient_sync([[Op.parse(word) for word in row.split()] for row in rows]):
    ...     print(*row)
    1F1 0F0 1B1 0B0 1U1 0U1
    0F1 1F0 0B1 1B0 1U1 0U1

    Args:
        programs: sound programs of all ranks, without updates.
        pairs: as in `Schedule`.
    """
    rows = _timed_ops(programs, pairs)
    sync_points = _sync_points(rows)
    updated: list[Program] = []
    for rank, row in enumerate(rows):
        starts = [start for start, *_ in row]
        program = list(programs[rank])
        # From the last to the first, so that earlier indices stay valid.
        for moment, stage, ranks in reversed(sync_points):
            if rank in ranks:
                program.insert(bisect_left(starts, moment), Op(Kind.U, stage, 1))
        updated.append(tuple(program))
    return tuple(updated)


def _sync_points(rows: Sequence[TimedOps]) -> list[tuple[float, int, list[int]]]:
    """Return when each stage synchronises, as (moment, stage, ranks of its copies), earliest first.

    Of stages with the same moment, the one whose gradients are complete first comes first.
    """
    last_gradient: dict[int, float] = {}
    ranks_of_stage: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        for stage in {op.stage for *_, op in row}:
            ranks_of_stage.setdefault(stage, []).append(rank)
            last_end = max(end for _, end, op in row if op.stage == stage)
            last_gradient[stage] = max(last_gradient.get(stage, 0.0), last_end)
    gaps = [_idle_gaps(row) for row in rows]
    moments = []
    for stage, ready in last_gradient.items():
        moment = _all_idle([gaps[rank] for rank in ranks_of_stage[stage]], ready)
        moments.append((moment, ready, stage))
    return [(moment, stage, ranks_of_stage[stage]) for moment, _, stage in sorted(moments)]


def _timed_ops(programs: Sequence[Sequence[Op]], pairs: frozenset[tuple[Op, Op]]) -> list[TimedOps]:
    """Return start, end and op of all ops, by rank."""
    schedule = Schedule(tuple(map(tuple, programs)), pairs=pairs)
    times = unit_times(schedule, usual_units)
    timed = zip(times.start.tolist(), times.end.tolist(), schedule.ops, strict=True)
    return [list(islice(timed, len(program))) for program in schedule.programs]


def _idle_gaps(row: TimedOps) -> list[tuple[float, float]]:
    """Return when a rank is idle after its first op, as (start, end); the last gap has no end."""
    next_starts = [*(start for start, *_ in row[1:]), math.inf]
    return [
        (end, next_start)
        for (_, end, _), next_start in zip(row, next_starts, strict=False)
        if end < next_start
    ]


def _all_idle(ranks: Sequence[Sequence[tuple[float, float]]], earliest: float) -> float:
    """Return the first moment from `earliest` on at which every rank is in one of its gaps."""
    moment = earliest
    moved = True
    # Ends at the latest after the last op of every rank, where its last gap has no end.
    while moved:
        moved = False
        for gaps in ranks:
            # The first gap that ends after the moment.
            start, _ = gaps[bisect_right(gaps, moment, key=lambda gap: gap[1])]
            if start > moment:
                moment, moved = start, True
    return moment

"""Where updates stand in the programs of schedules whose stages have copies: a U is a meeting of
all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from penstock.schedule.graph import build
from penstock.schedule.op import Kind, Op, Program, Schedule

#: What the ops count as where nothing is known of their times.
_SECONDS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def with_meetings(
    programs: Sequence[Sequence[Op]], pairs: frozenset[tuple[Op, Op]] = frozenset()
) -> tuple[Program, ...]:
    """The programs of all ranks with every stage's U where it holds nobody up.

    A stage's copies meet at the first moment at which all have their gradients and each of their
    ranks has nothing to do (Li and Hoefler 2021, Chimera, section 3.2: early only where bubbles
    hide it). Moments are those of f = 1, b = 2, i = w = 1 and free links. Stages meet in the order
    of these moments on all ranks, and an op stands before a meeting only if it begins before it, so
    nobody waits in a circle.

    >>> rows = "1F1 0F0 1B1 0B0", "0F1 1F0 0B1 1B0"
    >>> for row in with_meetings([[Op.parse(word) for word in row.split()] for row in rows]):
    ...     print(*row)
    1F1 0F0 1B1 0B0 1U1 0U1
    0F1 1F0 0B1 1B0 1U1 0U1

    Args:
        programs: sound, without updates.
        pairs: as in `Schedule`.
    """
    rows: list[list[tuple[float, float, Op]]] = [[] for _ in programs]
    graph = build(Schedule(tuple(map(tuple, programs)), pairs=pairs))
    for rank, op, start, end, _, target in graph.events(
        lambda _, op: _SECONDS.get(op.kind, 0.0), lambda *_: 0.0
    ):
        if target is None:
            rows[rank].append((start, end, op))
    last: dict[int, float] = {}
    hosts: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        for stage in {op.stage for *_, op in row}:
            hosts.setdefault(stage, []).append(rank)
            last[stage] = max(
                last.get(stage, 0.0), *(end for _, end, op in row if op.stage == stage)
            )
    gaps = [_gaps(row) for row in rows]
    moments = sorted(
        (_all_idle([gaps[rank] for rank in hosts[stage]], at), at, stage)
        for stage, at in last.items()
    )
    made: list[Program] = []
    for rank, row in enumerate(rows):
        starts = [start for start, *_ in row]
        program = list(programs[rank])
        for moment, _, stage in reversed(moments):
            if rank in hosts[stage]:
                program.insert(bisect_left(starts, moment), Op(Kind.U, stage, 1))
        made.append(tuple(program))
    return tuple(made)


def _gaps(row: Sequence[tuple[float, float, Op]]) -> list[tuple[float, float]]:
    """When a rank stands idle, from its first op on; the last time for ever."""
    starts = [*(start for start, *_ in row[1:]), math.inf]
    return [(end, start) for (_, end, _), start in zip(row, starts, strict=False) if end < start]


def _all_idle(ranks: Sequence[Sequence[tuple[float, float]]], at: float) -> float:
    """The first moment from `at` on in which every rank is in a gap."""
    moved = True
    while moved:
        moved = False
        for gaps in ranks:
            start, _ = gaps[bisect_right(gaps, at, key=lambda gap: gap[1])]
            if start > at:
                at, moved = start, True
    return at

"""Hanayo: the pipeline goes up and down the ranks in waves, and turns without a transfer."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.placement import ranks_for, zigzag
from penstock.schedule.rules import feeds
from penstock.schedule.updates import with_updates


@register(
    "hanayo",
    synchronous=True,
    stages_per_rank="2 x waves",
    splits_backward=False,
    source="Liu et al. 2023, Hanayo; the order is a list scheduler's, since the paper does not "
    "publish its own",
)
def hanayo(stages: int, micro_batches: int, waves: int = 1, ratio: float = 1.0) -> Schedule:
    """Run W waves up and down the ranks; a rank runs any ready op, backwards before forwards.

    Of several backwards the one of the smallest micro-batch comes first, of several forwards the
    one of the latest stage. The order is made as if a backward took `ratio` forwards: 1, as in the
    paper. Where backwards take twice as long, the order for `ratio` 2 is never slower for W = 1 and
    often faster, for more waves sometimes faster and sometimes slower; it holds more micro-batches.

    Facts for f = b per rank (f/2W per stage) and free links, p ranks, m micro-batches:
        makespan            2mf + (p - 1)f/W where p divides m; otherwise (2 - 1/W)f more for
                            every micro-batch missing to the next multiple of p
        in flight           at most 2W min(m, p) on a rank, over all its stages

    >>> print(hanayo(4, 2))
    rank 0 | 0F0 0F1 3F0 3B0 3F1 3B1 3U1 0B0 0B1 0U1
    rank 1 | 1F0 2F0 1F1 2F1 2B0 1B0 2B1 2U1 1B1 1U1

    Args:
        stages: number of stages, a multiple of 2 `waves`; there are p = stages / (2 `waves`) ranks.
        micro_batches: micro-batches per batch, best a multiple of p.
        waves: number of times that the pipeline runs up and down (W).
        ratio: b / f for which the order is made.

    Raises:
        ScheduleError: 2 `waves` does not divide the stages, or `ratio` is not a number above 0.
    """
    ranks = ranks_for("hanayo", stages, "waves", waves, factor=2)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < math.inf:
        raise ScheduleError(f"hanayo takes a ratio of backward to forward above 0, not {ratio!r}")
    programs = _greedy(zigzag(stages, ranks), ranks, micro_batches, ratio)
    return Schedule(tuple(map(with_updates, programs)))


def _greedy(
    placement: tuple[int, ...], ranks: int, micro_batches: int, ratio: float
) -> list[list[Op]]:
    """Return the ops of every rank in the order in which a list scheduler starts them.

    A forward takes 1 unit of time, a backward `ratio`.
    """
    programs: list[list[Op]] = [[] for _ in range(ranks)]
    ready: list[list[tuple[int, int, int, Op]]] = [[] for _ in range(ranks)]  # heaps, by priority
    running: list[tuple[float, int, Op]] = []  # heap of end time, rank, op
    durations = {Kind.F: 1.0, Kind.B: ratio}
    idle, now = set(range(ranks)), 0.0
    for m in range(micro_batches):
        op = Op(Kind.F, 0, m)
        heappush(ready[placement[0]], (*_priority(op), op))
    while True:
        # In the order of the ranks, since the order of a set is not defined.
        for rank in sorted(idle):
            if ready[rank]:
                *_, op = heappop(ready[rank])
                programs[rank].append(op)
                heappush(running, (now + durations[op.kind], rank, op))
                idle.remove(rank)
        if not running:
            return programs
        now = running[0][0]
        for rank, op in _pop_ended(running):
            idle.add(rank)
            for next_op in _next_ops(op, len(placement)):
                heappush(ready[placement[next_op.stage]], (*_priority(next_op), next_op))


def _pop_ended(running: list[tuple[float, int, Op]]) -> list[tuple[int, Op]]:
    """Remove the ops with the earliest end from the heap, and return them with their ranks."""
    now = running[0][0]
    ended = []
    while running and running[0][0] == now:
        _, rank, op = heappop(running)
        ended.append((rank, op))
    return ended


def _priority(op: Op) -> tuple[int, int, int]:
    """Return the sort key of a ready op: backwards first, smallest micro-batch or latest stage."""
    if op.kind is Kind.B:
        return 0, op.micro_batch, 0
    return 1, -op.stage, op.micro_batch


def _next_ops(op: Op, stages: int) -> list[Op]:
    """Return the op that can start when `op` has ended; none after the last backward."""
    output = feeds(op, stages)
    if output is not None:
        kind, stage = output
        return [Op(kind, stage, op.micro_batch)]
    if op.kind is Kind.F:  # on the last stage, whose backward follows
        return [Op(Kind.B, op.stage, op.micro_batch)]
    return []

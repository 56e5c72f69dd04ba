"""Hanayo: the pipeline runs to and fro over the ranks in waves, and turns without a hop."""

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
    source="Liu et al. 2023, Hanayo; the order is a list scheduler's, as the paper's own is not published",
)
def hanayo(stages: int, micro_batches: int, waves: int = 1, ratio: float = 1.0) -> Schedule:
    """W waves up and down the ranks; every rank always runs what it can, a backward before a
    forward.

    Of several backwards the one of the smallest micro-batch goes first, of several forwards the
    deepest. Time is counted as if a backward took `ratio` forwards: 1, as in the paper. Where
    backwards take twice as long, the order made for 2 is never slower for W = 1 and often faster,
    for more waves now faster and now slower; it holds more micro-batches.

    Facts for f = b per rank (f/2W per stage) and free links, p ranks, m micro-batches:
        makespan            2mf + (p - 1)f/W where p divides m; every micro-batch that lacks costs
                            (2 - 1/W)f more
        in flight           at most 2W min(m, p) on a rank, over all its stages

    >>> print(hanayo(4, 2))
    rank 0 | 0F0 0F1 3F0 3B0 3F1 3B1 3U1 0B0 0B1 0U1
    rank 1 | 1F0 2F0 1F1 2F1 2B0 1B0 2B1 2U1 1B1 1U1

    Args:
        stages: number of stages, a multiple of 2 `waves`; there are p = stages / (2 `waves`) ranks.
        micro_batches: micro-batches per batch, best a multiple of p.
        waves: how often the pipeline runs up and down (W).
        ratio: b / f for which the order is made.

    Raises:
        ScheduleError: 2 `waves` does not divide the stages, or `ratio` is not a number above 0.
    """
    ranks = ranks_for("hanayo", stages, "waves", waves, each=2)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < math.inf:
        raise ScheduleError(f"hanayo takes a ratio of backward to forward above 0, not {ratio!r}")
    return Schedule(
        tuple(map(with_updates, _greedy(zigzag(stages, ranks), ranks, micro_batches, ratio)))
    )


def _greedy(
    placement: tuple[int, ...], ranks: int, micro_batches: int, ratio: float
) -> list[list[Op]]:
    """The ops of every rank in the order in which a list scheduler starts them; a forward takes 1."""
    stages = len(placement)
    programs: list[list[Op]] = [[] for _ in range(ranks)]
    ready: list[list[tuple[int, int, int, Op]]] = [
        [] for _ in range(ranks)
    ]  # heaps: backwards first, and so on
    running: list[tuple[float, int, Op]] = []
    idle, now = set(range(ranks)), 0.0
    for m in range(micro_batches):
        heappush(ready[placement[0]], (1, 0, m, Op(Kind.F, 0, m)))
    while True:
        for rank in [rank for rank in idle if ready[rank]]:
            *_, op = heappop(ready[rank])
            programs[rank].append(op)
            heappush(running, (now + (1.0 if op.kind is Kind.F else ratio), rank, op))
            idle.remove(rank)
        if not running:
            return programs
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank, op = heappop(running)
            idle.add(rank)
            fed = feeds(op, stages) or (
                (Kind.B, op.stage) if op.kind is Kind.F else None
            )  # the last stage turns back
            if fed is not None:
                kind, stage = fed
                first = (0, op.micro_batch, 0) if kind is Kind.B else (1, -stage, op.micro_batch)
                heappush(ready[placement[stage]], (*first, Op(kind, stage, op.micro_batch)))

"""Shares: how many micro-batches of a batch a rank runs, on which some rules depend."""

from __future__ import annotations

from collections import Counter

from penstock.schedule.op import Kind, Schedule


def shares_of_batches(schedule: Schedule) -> tuple[int, int]:
    """The fewest and the most micro-batches that a rank runs of a batch on a stage; with replicas
    that is a part of the batch.
    """
    size = max(schedule.micro_batches, 1)
    counts = Counter(
        (rank, op.stage, op.micro_batch // size)
        for rank, program in enumerate(schedule.programs)
        for op in program
        if op.kind is Kind.F
    )
    return min(counts.values(), default=0), max(counts.values(), default=0)

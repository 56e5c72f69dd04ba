"""Numbers of micro-batches per batch and rank, on which some weight rules depend."""

from __future__ import annotations

from collections import Counter

from penstock.schedule.op import Kind, Schedule


def shares_of_batches(schedule: Schedule) -> tuple[int, int]:
    """Return the minimum and maximum number of micro-batches of a batch that a rank runs.

    Counted per stage. With replicas a rank runs only a part of the batch.
    """
    micro_batches = max(schedule.micro_batches, 1)
    counts = Counter(
        (rank, op.stage, op.micro_batch // micro_batches)
        for rank, program in enumerate(schedule.programs)
        for op in program
        if op.kind is Kind.F
    )
    return min(counts.values(), default=0), max(counts.values(), default=0)

"""Rules for streams: whole batches, each with an update of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from penstock.errors import Finding
from penstock.schedule.op import BACKWARD_ENDS, Kind, Op, Schedule
from penstock.schedule.streaming.streams import Stream


def stream_findings(schedule: Schedule) -> Iterator[Finding]:
    """Check how a schedule continues from batch to batch.

    The schedule must already have passed all other rules, except those on updates.
    """
    if schedule.stream is None:
        return
    reason = _why_unsupported(schedule, schedule.stream)
    if reason is not None:
        yield Finding("stream", reason)
        return
    for rank, program in enumerate(schedule.programs):
        for stage in schedule.stages_of_rank[rank]:
            stage_ops = [op for op in program if op.stage == stage]
            yield from _updates_per_batch(rank, stage_ops, schedule.micro_batches)
    if schedule.stream.waves is not None:
        yield from _whole_batches_per_copy(schedule)


def _why_unsupported(schedule: Schedule, stream: Stream) -> str | None:
    """Return why the schedule cannot be a stream at all; None if it can."""
    if schedule.synchronous:
        return (
            "a synchronous schedule describes one batch, and a stream continues without a flush: "
            "leave out one of the two"
        )
    if schedule.slicing is not None:
        return (
            "its micro-batches are cut into slices, which streams do not support: "
            "count slices as micro-batches"
        )
    if schedule.slices % stream.batches:
        return (
            f"{schedule.slices} micro-batches are not {stream.batches} batches of equal size: "
            "give the stream another number of batches, or whole batches"
        )
    return None


def _updates_per_batch(rank: int, ops: Sequence[Op], micro_batches: int) -> Iterator[Finding]:
    """Check that all gradients of a batch, and only these, come before its U.

    Args:
        rank: the rank, for messages.
        ops: the ops of one stage on this rank, in order.
        micro_batches: micro-batches per batch.
    """
    finding = partial(Finding, "update", rank=rank)
    pending_batch: int | None = None
    updated: set[int] = set()
    for op in ops:
        kind, stage, number = op
        if kind is Kind.U and pending_batch is None:
            yield finding(
                f"{op} on rank {rank} follows no gradient that is not in an update yet: every "
                f"batch has one U of stage {stage} there",
                op=str(op),
            )
        elif kind is Kind.U and pending_batch is not None:
            updated.add(pending_batch)
            pending_batch = None
        elif kind in BACKWARD_ENDS:
            batch = number // micro_batches
            if pending_batch not in (None, batch):
                yield finding(
                    f"{op} on rank {rank} is of batch {batch}, but batch {pending_batch} has had "
                    f"no U of stage {stage} yet: its update would include both",
                    op=str(op),
                )
            elif batch in updated:
                yield finding(
                    f"{op} on rank {rank} comes after the U of stage {stage} for its batch "
                    f"{batch}: a batch has one update, after all its gradients",
                    op=str(op),
                )
            pending_batch = batch


def _whole_batches_per_copy(schedule: Schedule) -> Iterator[Finding]:
    """Check that with waves, copy w of a stage runs all of every batch t with t mod copies = w.

    Such copies do not add up gradients, so a batch cannot be divided between them.
    """
    for (stage, number), rank in sorted(schedule.placement.items()):
        ranks = schedule.ranks_of_stage[stage]
        batch = number // schedule.micro_batches
        expected_rank = ranks[batch % len(ranks)]
        if rank != expected_rank:
            yield Finding(
                "stream",
                f"{stage}F{number} of batch {batch} is on rank {rank}: with waves, copies take "
                f"whole batches in turn, this one rank {expected_rank}",
                rank,
                f"{stage}F{number}",
            )

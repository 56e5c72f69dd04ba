"""What a stream must keep besides: whole batches, each with an update of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.errors import Finding
from penstock.schedule.op import Kind, Op, Schedule


def stream_findings(schedule: Schedule) -> Iterator[Finding]:
    """What is wrong with how a schedule, sound in everything else but its updates, goes on from
    batch to batch.
    """
    stream = schedule.stream
    if stream is None:
        return
    if schedule.synchronous:
        yield Finding(
            "stream",
            "a synchronous schedule is of one batch, and a stream goes on without a flush: leave out one of the two",
        )
    elif schedule.slicing is not None:
        yield Finding(
            "stream",
            "its micro-batches are cut, which those of a stream cannot be yet: count slices as micro-batches",
        )
    elif schedule.slices % stream.batches:
        yield Finding(
            "stream",
            f"{schedule.slices} micro-batches are not {stream.batches} batches of equally many: give the stream another "
            "number of batches, or whole batches",
        )
    else:
        for rank, program in enumerate(schedule.programs):
            for stage in schedule.stages_of_rank[rank]:
                yield from _turns(
                    rank, [op for op in program if op.stage == stage], schedule.micro_batches
                )
        if stream.waves is not None:
            yield from _apart(schedule)


def _turns(rank: int, ops: Sequence[Op], size: int) -> Iterator[Finding]:
    """On one rank and stage, all gradients of a batch, its U, all gradients of another batch, its
    U, and so on.
    """
    pending: int | None = None
    done: set[int] = set()
    for op in ops:
        kind, stage, number = op
        if kind is Kind.U and pending is None:
            yield Finding(
                "update",
                f"{op} on rank {rank} has no gradient before it that is not in an update yet: every batch has one U "
                f"of stage {stage} there",
                rank,
                str(op),
            )
        elif kind is Kind.U and pending is not None:
            done.add(pending)
            pending = None
        elif kind in (Kind.B, Kind.W):
            batch = number // size
            if pending not in (None, batch):
                yield Finding(
                    "update",
                    f"{op} on rank {rank} is of batch {batch}, and batch {pending} has had no U of stage {stage} yet: "
                    "its update would take both",
                    rank,
                    str(op),
                )
            elif batch in done:
                yield Finding(
                    "update",
                    f"{op} on rank {rank} comes after the U of stage {stage} for its batch {batch}: a batch has one "
                    "update, after all its gradients",
                    rank,
                    str(op),
                )
            pending = batch


def _apart(schedule: Schedule) -> Iterator[Finding]:
    """With waves, copy w of a stage has all of every batch t with t mod copies = w: they do not add
    up gradients.
    """
    size = schedule.micro_batches
    for (stage, number), rank in sorted(schedule.placement.items()):
        ranks = schedule.ranks_of_stage[stage]
        batch = number // size
        if rank != ranks[batch % len(ranks)]:
            yield Finding(
                "stream",
                f"{stage}F{number} of batch {batch} stands on rank {rank}: with waves, copies have whole batches in "
                f"turn, this one rank {ranks[batch % len(ranks)]}",
                rank,
                f"{stage}F{number}",
            )

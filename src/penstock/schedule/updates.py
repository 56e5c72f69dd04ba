"""Place U ops in programs, and find the U ops of other copies that a U waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.schedule.op import BACKWARD_ENDS, Kind, Op, Program
from penstock.schedule.streaming.streams import Stream


def with_updates(ops: Sequence[Op]) -> Program:
    """Add the U of every stage right after its last backward in the program of one rank.

    On a rank with several stages, the first to finish can synchronise its gradients while the
    others compute. This costs nothing: for ring and zigzag placements the makespan is the same as
    with all updates at the end, however long they are. Not for stages with copies: these
    synchronise at their U, and ranks with two stages might reach them in different orders.

    >>> print(*with_updates([Op.parse(word) for word in "0F0 2F0 2B0 0B0".split()]))
    0F0 2F0 2B0 2U1 0B0 0U1
    """
    without_update = {op.stage for op in ops}
    program = list(ops)
    # Backwards, so that the first backward of a stage that occurs is its last.
    for i in range(len(ops) - 1, -1, -1):
        kind, stage, _ = ops[i]
        if stage in without_update and kind in BACKWARD_ENDS:
            program.insert(i + 1, Op(Kind.U, stage, 1))
            without_update.remove(stage)
            if not without_update:
                break
    return tuple(program)


def with_batch_updates(ops: Sequence[Op], micro_batches: int) -> Program:
    """Add a U of every stage right after its last backward of each batch; versions start at 1.

    So the next forward reads weights that are as new as possible, and a rank that holds a copy
    updates when its own part of the batch is done.

    >>> text = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    >>> print(*with_batch_updates([Op.parse(word) for word in text.split()], 2))
    0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U2

    Args:
        ops: a sound program of one rank; on each stage, all backwards of a batch come before those
            of the next.
        micro_batches: micro-batches per batch.
    """
    remaining = Counter(
        (stage, number // micro_batches) for kind, stage, number in ops if kind in BACKWARD_ENDS
    )
    versions: Counter[int] = Counter()
    program: list[Op] = []
    for op in ops:
        program.append(op)
        kind, stage, number = op
        if kind in BACKWARD_ENDS:
            batch = stage, number // micro_batches
            remaining[batch] -= 1
            if remaining[batch] == 0:
                versions[stage] += 1
                program.append(Op(Kind.U, stage, versions[stage]))
    return tuple(program)


def awaited_update(update: Op, stream: Stream | None) -> Op | None:
    """Return the U op of the stage's other copies that a U waits for.

    Gradient synchronisation is collective: copies start the same U together. Where a stream has
    waves, a U inside a wave waits for no other copy, and the last U of a wave waits for that of the
    others some waves earlier.

    Returns:
        `update` itself if all copies start it together; another op that must have ended on all
        ranks with a copy; or None.
    """
    if stream is None or stream.waves is None:
        return update
    version = stream.waves.awaited(update.micro_batch)
    return None if version is None else update._replace(micro_batch=version)

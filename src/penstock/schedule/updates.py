"""Where updates stand in programs, and which updates of a stage's other copies they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.schedule.op import Kind, Op, Program
from penstock.schedule.stream import Stream


def with_updates(ops: Sequence[Op]) -> Program:
    """The ops of one rank with U of every stage right after its last backward.

    On a rank of several stages the first to finish can synchronise its gradients beside the others'
    work. It costs nothing: for ring and zigzag placements the makespan is that with all updates at
    the end, however long they are. Not for stages with copies: those meet at their U, and ranks
    that hold two stages might come to them in different orders.

    >>> print(*with_updates([Op.parse(word) for word in "0F0 2F0 2B0 0B0".split()]))
    0F0 2F0 2B0 2U1 0B0 0U1
    """
    waiting = {op.stage for op in ops}
    program = list(ops)
    for i in range(len(ops) - 1, -1, -1):
        kind, stage, _ = ops[i]
        if stage in waiting and kind in (Kind.B, Kind.W):
            program.insert(i + 1, Op(Kind.U, stage, 1))
            waiting.remove(stage)
            if not waiting:
                break
    return tuple(program)


def with_updates_of_batches(ops: Sequence[Op], micro_batches: int) -> Program:
    """The ops of one rank with a U of every stage right after each batch's last backward there;
    versions count from 1.

    So the next forward reads weights that are as new as they can be, and a rank that holds a copy
    updates when its own part of the batch is done.

    >>> print(*with_updates_of_batches([Op.parse(word) for word in "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3".split()], 2))
    0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U2

    Args:
        ops: sound; of each stage, those of a batch all come before the backwards of the next.
        micro_batches: of one batch.
    """
    left = Counter(
        (stage, number // micro_batches) for kind, stage, number in ops if kind in (Kind.B, Kind.W)
    )
    versions: Counter[int] = Counter()
    program: list[Op] = []
    for op in ops:
        program.append(op)
        kind, stage, number = op
        if kind in (Kind.B, Kind.W):
            batch = stage, number // micro_batches
            left[batch] -= 1
            if left[batch] == 0:
                versions[stage] += 1
                program.append(Op(Kind.U, stage, versions[stage]))
    return tuple(program)


def met_by(update: Op, stream: Stream | None) -> Op | None:
    """Which U of its stage's other copies a U waits for.

    Gradient synchronisation is a meeting: copies start the same U together. Where a stream has
    waves, a U inside a wave waits for nobody, and the last of a wave for that of the others some
    waves earlier.

    Returns:
        `update` itself, if it starts together with the others' U of that name; another op, which
        must have ended on all ranks that hold a copy; or None.
    """
    if stream is None or stream.waves is None:
        return update
    version = stream.waves.awaited(update.micro_batch)
    return None if version is None else update._replace(micro_batch=version)

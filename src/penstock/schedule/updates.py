"""Where updates stand in the programs of synchronous schedules."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.op import Kind, Op, Program


def with_updates(ops: Sequence[Op]) -> Program:
    """The ops of one rank with U of every stage right after its last backward.

    On a rank of several stages the first to finish can synchronise its gradients beside the others' work. It costs nothing: for
    ring and zigzag placements the makespan is that with all updates at the end, however long they are. Not for stages with copies:
    those meet at their U, and ranks that hold two stages might come to them in different orders.

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

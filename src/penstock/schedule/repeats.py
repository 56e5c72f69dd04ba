"""From where on a program repeats itself, found in arrays: programs of thousands of batches are
tried with every length of loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.schedule.arrays import Array, op_arrays
from penstock.schedule.op import Kind, Program, Schedule


@dataclass(frozen=True, eq=False)
class Row:
    """The program of one rank.

    Attributes:
        program: its ops.
        micro_batches: of one batch.
        kind, stage, number, batch: of every op.
        whole: with so many ops the endless program begins: as long as every kind of op of every
        stage still comes, none is missing
            because it is of a batch that does not.
    """

    program: Program
    micro_batches: int
    kind: Array
    stage: Array
    number: Array
    batch: Array
    whole: int

    @classmethod
    def of(cls, schedule: Schedule, rank: int, batch: Sequence[int]) -> Row:
        """That of a rank, with the batch of each of its ops."""
        ops, size = op_arrays(schedule), max(schedule.micro_batches, 1)
        rows = slice(int(ops.first[rank]), int(ops.first[rank + 1]))
        kind, stage, number = ops.kind[rows], ops.stage[rows], ops.micro_batch[rows]
        program = schedule.programs[rank]
        _, last = np.unique((stage.astype(np.int64) * 256 + kind)[::-1], return_index=True)
        whole = len(program) - int(last.max(initial=0))
        return cls(program, size, kind, stage, number, np.array(batch, np.int64), whole)

    def repeats(self, batches: int, total: int) -> tuple[Program, Program, Counter[int]] | None:
        """Head, loop and versions per loop, if every op comes again so many batches later, in at
        least two loops.

        Args:
            batches: of one loop.
            total: of the program.
        """
        middle = (total // 2) // batches * batches
        inside = (self.batch >= middle) & (self.batch < middle + batches)
        length = int(np.count_nonzero(inside))
        if length == 0:
            return None if self.program else ((), (), Counter())
        is_update = self.kind == ord(Kind.U.value)
        updates = Counter(self.stage[inside & is_update].tolist())
        one, other = slice(0, max(self.whole - length, 0)), slice(length, max(self.whole, length))
        step = np.where(is_update[one], 0, batches * self.micro_batches)
        for stage, versions in updates.items():
            step[is_update[one] & (self.stage[one] == stage)] = versions
        same = (
            (self.kind[one] == self.kind[other])
            & (self.stage[one] == self.stage[other])
            & (self.number[one] + step == self.number[other])
        )
        start = int(np.flatnonzero(~same)[-1]) + 1 if not same.all() else 0
        if self.whole - start < 2 * length:
            return None
        return self.program[:start], self.program[start : start + length], updates

"""Test whether a program repeats with a given period, vectorised over its ops.

Programs of thousands of batches are tested with every possible length of the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.schedule.arrays import Array, op_arrays
from penstock.schedule.op import Kind, Program, Schedule


@dataclass(frozen=True, eq=False)
class ProgramColumns:
    """The program of one rank, with a column per property of its ops.

    Attributes:
        program: its ops.
        micro_batches: micro-batches per batch.
        kind, stage, number, batch: properties of each op; `number` is its micro-batch, or the
            version of a U.
        complete: number of ops before the end of the stream shows. As long as ops of all kinds and
            stages still follow, none is missing for being of a batch that the programs do not have.
    """

    program: Program
    micro_batches: int
    kind: Array
    stage: Array
    number: Array
    batch: Array
    complete: int

    @classmethod
    def of(cls, schedule: Schedule, rank: int, batch: Sequence[int]) -> ProgramColumns:
        """Build the columns of a rank's program from the batch of each of its ops."""
        ops, micro_batches = op_arrays(schedule), max(schedule.micro_batches, 1)
        rows = slice(int(ops.first[rank]), int(ops.first[rank + 1]))
        kind, stage, number = ops.kind[rows], ops.stage[rows], ops.micro_batch[rows]
        program = schedule.programs[rank]
        # A kind is one byte, so that both fit into one number.
        kind_and_stage = stage.astype(np.int64) * 256 + kind
        # In the reversed program, the first of each kind and stage is the last of the program.
        _, from_end = np.unique(kind_and_stage[::-1], return_index=True)
        complete = len(program) - int(from_end.max(initial=0))
        batch_column = np.array(batch, np.int64)
        return cls(program, micro_batches, kind, stage, number, batch_column, complete)

    def split(self, batches: int, total: int) -> tuple[Program, Program, Counter[int]] | None:
        """Split the program into a head and a loop of a given number of batches.

        Args:
            batches: number of batches of one loop.
            total: number of batches of the program.

        Returns:
            The head, the loop, and the number of U ops of each stage in the loop; None if the
            program does not contain the loop at least twice.
        """
        # In the middle of the programs, neither the start nor the end of the stream shows.
        middle = (total // 2) // batches * batches
        in_loop = (self.batch >= middle) & (self.batch < middle + batches)
        length = int(np.count_nonzero(in_loop))
        if length == 0:
            return None if self.program else ((), (), Counter())
        is_update = self.kind == ord(Kind.U.value)
        updates = Counter(self.stage[in_loop & is_update].tolist())
        # Compare every op with the op one loop later; `step` is how much its number must grow.
        now = slice(0, max(self.complete - length, 0))
        later = slice(length, max(self.complete, length))
        step = np.where(is_update[now], 0, batches * self.micro_batches)
        for stage, versions in updates.items():
            step[is_update[now] & (self.stage[now] == stage)] = versions
        repeats = (
            (self.kind[now] == self.kind[later])
            & (self.stage[now] == self.stage[later])
            & (self.number[now] + step == self.number[later])
        )
        start = 0 if repeats.all() else int(np.flatnonzero(~repeats)[-1]) + 1
        if self.complete - start < 2 * length:
            return None
        return self.program[:start], self.program[start : start + length], updates

"""Find the row of an op in `OpArrays` by kind, stage and micro-batch, for many ops at once."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.arrays import Array, op_arrays
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.rules import FLOWS, feeds, needs


class OpIndex:
    """The rows of a schedule's ops.

    Attributes:
        schedule: the schedule.
        ops: its programs.
        kinds: per kind of op, the rows of its ops.
        numbers: the numbers of all micro-batches (or slices).
        column: per op, the position of its number in `numbers`; 0 for updates.
        key: per op, stage * len(numbers) + column.

    Raises:
        ScheduleError: a stage does not run every micro-batch once.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops = ops = op_arrays(schedule)
        self.kinds = {kind: np.flatnonzero(ops.kind == ord(kind.value)) for kind in Kind}
        forwards = ops.micro_batch[self.kinds[Kind.F]]
        # An arange up to a number that no valid schedule has could exhaust the memory.
        if forwards.max(initial=0) >= len(ops):
            self.numbers = np.unique(forwards)
        else:
            self.numbers = np.arange(forwards.max(initial=-1) + 1)
        # Every stage runs every micro-batch; so in a valid schedule the arrays by key are no larger
        # than the programs.
        if (
            ops.stages * len(self.numbers) > len(ops)
            or ops.stage.min(initial=0) < 0
            or ops.micro_batch.min(initial=0) < 0
        ):
            raise_missing(schedule)
        if ops.slicing is not None and len(self.numbers) != len(ops.slicing.share):
            raise_missing(schedule)
        self.column = self._column()
        self.key = ops.stage * len(self.numbers) + self.column
        self._row = {kind: self._rows(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}

    def _column(self) -> Array:
        """Return per op the position of its number; 0 for updates, whose numbers are versions."""
        batched = self.ops.kind != ord(Kind.U.value)
        column = np.where(batched, self.ops.micro_batch, 0)
        if len(self.numbers) and self.numbers[-1] + 1 != len(self.numbers):
            column = np.searchsorted(self.numbers, column)
        is_known = column < len(self.numbers)
        is_known[is_known] = self.numbers[column[is_known]] == self.ops.micro_batch[is_known]
        if not (is_known | ~batched).all():
            raise_missing(self.schedule)
        return column

    def _rows(self, kind: Kind) -> Array:
        """Return the row of this kind of op for every key (stage and micro-batch), or -1."""
        rows = np.full(self.ops.stages * len(self.numbers), -1, np.int32)
        rows[self.key[self.kinds[kind]]] = self.kinds[kind]
        # Two ops of one key share a row: one of them is a duplicate.
        if np.count_nonzero(rows >= 0) < len(self.kinds[kind]):
            raise_missing(self.schedule)
        return rows

    def of_op(self, op: Op) -> int:
        """Return the row of an op."""
        column = int(np.searchsorted(self.numbers, op.micro_batch))
        if (
            op.kind not in self._row
            or not 0 <= op.stage < self.ops.stages
            or column >= len(self.numbers)
        ):
            raise_missing(self.schedule)
        row = int(self._row[op.kind][op.stage * len(self.numbers) + column])
        return row if row >= 0 else raise_missing(self.schedule)

    def of_keys(self, key: Array, kinds: tuple[Kind, ...]) -> Array:
        """Return the row of the op of one of these kinds for every key, or -1."""
        rows = self._row[kinds[0]][key]
        for kind in kinds[1:]:
            # The row that exists, since -1 stands for none.
            rows = np.maximum(rows, self._row[kind][key])
        return rows

    def on_neighbour(
        self, rows: Array, offset: int, kinds: tuple[Kind, ...]
    ) -> tuple[Array, Array]:
        """Return the `rows` that have a stage at this offset, and the rows of its ops.

        The second array contains the op of one of these kinds, or -1.
        """
        stage = self.ops.stage[rows] + offset
        rows = rows[(stage >= 0) & (stage < self.ops.stages)]
        return rows, self.of_keys(self.key[rows] + offset * len(self.numbers), kinds)


def raise_missing(schedule: Schedule) -> NoReturn:
    """Raise the error about a missing op. Slow, op by op, since it ends in an error anyway."""
    rank_of = {op: rank for rank, program in enumerate(schedule.programs) for op in program}
    for rank, program in enumerate(schedule.programs):
        for op in program:
            _check_op(schedule, op, rank, rank_of)
    occurrences = Counter(
        op for op in schedule.ops if op.kind is not Kind.U and op.kind not in ACTIVATION_MOVES
    )
    for op, count in occurrences.items():
        if count > 1:
            raise ScheduleError(f"{schedule.name} is not valid: {op} occurs {count} times")
    raise ScheduleError(f"{schedule.name} is not valid: `verify` reports why")


def _check_op(schedule: Schedule, op: Op, rank: int, rank_of: dict[Op, int]) -> None:
    """Raise an error if no rank runs an op's input, or the consumer of its value."""
    for group in needs(op, schedule.stages, schedule.slicing):
        if not any(alternative in rank_of for alternative in group):
            raise ScheduleError(
                f"rank {rank}: {op} needs {' or '.join(map(str, group))}, which no rank runs"
            )
    output = feeds(op, schedule.stages)
    if output is None:
        return
    value, stage = output
    target = schedule.placement.get((stage, op.micro_batch))
    consumers = [Op(kind, stage, op.micro_batch) for kind in FLOWS[value].consumers]
    consumer_ranks = [rank_of[consumer] for consumer in consumers if consumer in rank_of]
    if target != rank and (target is None or target not in consumer_ranks):
        raise ScheduleError(f"rank {rank}: no op takes the output of {op} for stage {stage}")

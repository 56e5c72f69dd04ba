"""Programs as NumPy arrays, for vectorised passes over millions of ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.rules import ACTIVATION_CHANGE
from penstock.schedule.slicing import Slicing, micro_batches_in

Array = NDArray[Any]

_KINDS = {ord(kind.value): kind for kind in Kind}

#: `ACTIVATION_CHANGE` by the code point of the kind.
_ACTIVATION_CHANGE = np.zeros(128, np.int64)
for _kind, _change in ACTIVATION_CHANGE.items():
    _ACTIVATION_CHANGE[ord(_kind.value)] = _change


@dataclass(frozen=True, eq=False)
class OpArrays:
    """The ops of all programs as arrays: rank by rank, the ops of a rank in program order.

    Attributes:
        rank, kind, stage, micro_batch: one entry per op; `kind` is the code point of the kind's
            letter, e.g. `ord("F")`.
        first: index of the first entry of each rank, followed by the number of entries.
        slicing: how micro-batches are cut into slices, if they are.
    """

    rank: Array
    kind: Array
    stage: Array
    micro_batch: Array
    first: Array
    slicing: Slicing | None = None

    @classmethod
    def of(cls, programs: Iterable[Iterable[Op]], slicing: Slicing | None = None) -> OpArrays:
        """Build the arrays from programs.

        Raises:
            ScheduleError: a stage or micro-batch number does not fit into 64 bits.
        """
        rows = [program if isinstance(program, tuple) else tuple(program) for program in programs]
        sizes = np.array([len(row) for row in rows], np.int64)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        count = int(first[-1])

        def column(field: int) -> Iterator[Any]:
            """Iterate over one field (kind, stage, micro-batch) of all ops."""
            return map(itemgetter(field), chain.from_iterable(rows))

        try:
            return cls(
                np.repeat(np.arange(len(rows), dtype=np.int32), sizes),
                np.fromiter(map(ord, column(0)), np.uint8, count),
                np.fromiter(column(1), np.int64, count),
                np.fromiter(column(2), np.int64, count),
                first,
                slicing,
            )
        except OverflowError as error:
            raise ScheduleError(
                "stages and micro-batches of a schedule are numbers of at most 18 digits"
            ) from error

    def __len__(self) -> int:
        return len(self.rank)

    def op(self, row: int) -> Op:
        """Return the op at index `row`."""
        return Op(_KINDS[int(self.kind[row])], int(self.stage[row]), int(self.micro_batch[row]))

    def all_ops(self) -> list[Op]:
        """Return all ops, in the order of the arrays."""
        kinds = map(_KINDS.__getitem__, self.kind.tolist())
        return list(map(Op, kinds, self.stage.tolist(), self.micro_batch.tolist()))

    def at(self, rows: Array) -> OpArrays:
        """Return some of the ops, in the same order; `rows` are ascending. It has no slicing."""
        return OpArrays(
            self.rank[rows],
            self.kind[rows],
            self.stage[rows],
            self.micro_batch[rows],
            # Where the ops of each rank begin among those that are left.
            np.searchsorted(rows, self.first),
        )

    def of_kind(self, *kinds: Kind) -> Array:
        """Return a mask of the ops whose kind is one of `kinds`."""
        mask = np.zeros(len(self), bool)
        for kind in kinds:
            mask |= self.kind == ord(kind.value)
        return mask

    @cached_property
    def stages(self) -> int:
        """Number of stages: one more than the highest stage that an op names."""
        return int(self.stage.max(initial=-1)) + 1

    @cached_property
    def share(self) -> Array | None:
        """Per op, the share of its slice in its micro-batch; None if micro-batches are not cut."""
        if self.slicing is None:
            return None
        whole = self.of_kind(Kind.U) | (self.micro_batch >= len(self.slicing.share))
        slice_number = np.where(whole, 0, self.micro_batch)
        return np.where(whole, 1.0, np.array(self.slicing.share)[slice_number])

    @cached_property
    def on_partner(self) -> Array:
        """Mask of the E and L ops that stand on the partner's rank, not on the forward's rank."""
        mask = np.zeros(len(self), bool)
        moves = np.flatnonzero(self.of_kind(*ACTIVATION_MOVES))
        if len(moves):
            forward_rank = self._forward_ranks()
            stages, numbers = self.stage[moves].tolist(), self.micro_batch[moves].tolist()
            ranks = self.rank[moves].tolist()
            mask[moves] = [
                forward_rank.get((stage, number)) != rank
                for stage, number, rank in zip(stages, numbers, ranks, strict=True)
            ]
        return mask

    def _forward_ranks(self) -> dict[tuple[int, int], int]:
        """Return the rank of every forward by (stage, micro-batch)."""
        forwards = np.flatnonzero(self.of_kind(Kind.F))
        stages, numbers = self.stage[forwards].tolist(), self.micro_batch[forwards].tolist()
        ranks = self.rank[forwards].tolist()
        return {
            (stage, number): rank
            for stage, number, rank in zip(stages, numbers, ranks, strict=True)
        }

    @cached_property
    def activation_change(self) -> Array:
        """Per op, by how many micro-batches or slices it changes what its rank holds."""
        change = _ACTIVATION_CHANGE[self.kind]
        return np.where(self.on_partner, -change, change)

    @cached_property
    def in_flight_change(self) -> Array:
        """The same in micro-batches, where a slice counts as its share of one."""
        change = self.activation_change
        return change if self.share is None else change * self.share

    @cached_property
    def in_flight(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Peak number of micro-batches whose activations are held, by stage and by rank.

        The peak of a stage is the maximum over its ranks, counting this stage only; the peak of a
        rank counts all its stages and what it holds for a partner. Counted in program order, not
        by time, since ops may take no time at all. A slice counts as its share of a micro-batch.

        Returns:
            The peaks per stage, and the peaks per rank.
        """
        amount = self.in_flight_change
        ranks, peaks = _peaks(amount, self.rank)
        by_rank: list[float] = [0] * (len(self.first) - 1)
        for rank, peak in zip(ranks.tolist(), peaks.tolist(), strict=True):
            by_rank[rank] = micro_batches_in(peak)
        rows = np.flatnonzero((self.activation_change != 0) & ~self.on_partner)
        key = self.rank[rows].astype(np.int64) * self.stages + self.stage[rows]
        if (np.diff(key) < 0).any():  # several stages on a rank: sort by rank and stage
            rows = rows[np.argsort(key, kind="stable")]
            key = self.rank[rows].astype(np.int64) * self.stages + self.stage[rows]
        keys, peaks = _peaks(amount[rows], key)
        by_stage: list[float] = [0] * self.stages
        stages = (keys % max(self.stages, 1)).tolist()
        for stage, peak in zip(stages, peaks.tolist(), strict=True):
            by_stage[stage] = max(by_stage[stage], micro_batches_in(peak))
        return tuple(by_stage), tuple(by_rank)


def _peaks(change: Array, key: Array) -> tuple[Array, Array]:
    """Return the key and the highest cumulative sum (at least 0) of each run of equal keys."""
    starts = runs(key)
    total = np.cumsum(change)
    # One sum runs through all runs: what it was before a run is taken off its peak.
    total_before = total[starts] - change[starts]
    return key[starts], np.maximum(np.maximum.reduceat(total, starts) - total_before, 0)


def runs(key: Array) -> Array:
    """Return the indices at which runs of equal keys begin."""
    return np.flatnonzero(np.concatenate([np.ones(min(len(key), 1), bool), key[1:] != key[:-1]]))


def op_arrays(schedule: Schedule) -> OpArrays:
    """Return the arrays of a schedule's programs, cached on the schedule."""
    arrays = schedule.__dict__.get("_op_arrays")
    if not isinstance(arrays, OpArrays):
        arrays = OpArrays.of(schedule.programs, schedule.slicing)
        schedule.__dict__["_op_arrays"] = arrays
    return arrays

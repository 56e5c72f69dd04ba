"""Programs as NumPy arrays, for whoever walks millions of ops."""

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
from penstock.schedule.op import HANDING, Kind, Op, Schedule
from penstock.schedule.slicing import Slicing, micro_batches_in

Array = NDArray[Any]

_KINDS = {ord(kind.value): kind for kind in Kind}


@dataclass(frozen=True, eq=False)
class OpArrays:
    """One entry per op, rank by rank, a rank's ops in the order of its program.

    Attributes:
        rank, kind, stage, micro_batch: of every op; `kind` is the number of its letter, `ord("F")`.
        first: per rank, its first entry; the number of entries at the end.
        slicing: how micro-batches are cut, if they are.
    """

    rank: Array
    kind: Array
    stage: Array
    micro_batch: Array
    first: Array
    slicing: Slicing | None = None

    @classmethod
    def of(cls, programs: Iterable[Iterable[Op]], slicing: Slicing | None = None) -> OpArrays:
        """The arrays of these programs.

        Raises:
            ScheduleError: a number is larger than a machine's.
        """
        rows = [program if isinstance(program, tuple) else tuple(program) for program in programs]
        sizes = np.array([len(row) for row in rows], np.int64)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        count = int(first[-1])

        def column(place: int) -> Iterator[Any]:
            return map(itemgetter(place), chain.from_iterable(rows))

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
        """The op of one entry."""
        return Op(_KINDS[int(self.kind[row])], int(self.stage[row]), int(self.micro_batch[row]))

    def all_ops(self) -> list[Op]:
        """All ops, in the arrays' order."""
        kinds = map(_KINDS.__getitem__, self.kind.tolist())
        return list(map(Op, kinds, self.stage.tolist(), self.micro_batch.tolist()))

    def of_kind(self, *kinds: Kind) -> Array:
        """Per op, whether it is of one of these kinds."""
        found = np.zeros(len(self), bool)
        for kind in kinds:
            found |= self.kind == ord(kind.value)
        return found

    @cached_property
    def stages(self) -> int:
        """One more than the highest stage named."""
        return int(self.stage.max(initial=-1)) + 1

    @cached_property
    def share(self) -> Array | None:
        """Per op, the share of its micro-batch that its slice is; None where micro-batches are
        whole.
        """
        if self.slicing is None:
            return None
        whole = self.of_kind(Kind.U) | (self.micro_batch >= len(self.slicing.share))
        return np.where(
            whole, 1.0, np.array(self.slicing.share)[np.where(whole, 0, self.micro_batch)]
        )

    @cached_property
    def at_partner(self) -> Array:
        """Per op, whether it is the half of an E or L that stands on the partner's rank, not on
        that of the forward.
        """
        found = np.zeros(len(self), bool)
        rows = np.flatnonzero(self.of_kind(*HANDING))
        if len(rows):
            forwards = np.flatnonzero(self.of_kind(Kind.F))
            home = dict(
                zip(
                    zip(
                        self.stage[forwards].tolist(),
                        self.micro_batch[forwards].tolist(),
                        strict=True,
                    ),
                    self.rank[forwards].tolist(),
                    strict=True,
                )
            )
            places = zip(self.stage[rows].tolist(), self.micro_batch[rows].tolist(), strict=True)
            found[rows] = [
                home.get(place) != rank
                for place, rank in zip(places, self.rank[rows].tolist(), strict=True)
            ]
        return found

    @cached_property
    def in_flight(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The most micro-batches whose activations a rank holds: per stage, of its own ranks' for
        it; per rank, of all stages.

        Not by the clock: ops may take no time at all. Slices count as the shares that they are.
        """
        change = self.of_kind(Kind.F).astype(np.int64) - self.of_kind(Kind.B, Kind.W)
        change += np.where(
            self.of_kind(*HANDING), np.where(self.of_kind(Kind.L) ^ self.at_partner, 1, -1), 0
        )
        amount = change if self.share is None else change * self.share
        ranks, tops = _tops(amount, self.rank)
        by_rank: list[float] = [0] * (len(self.first) - 1)
        for rank, top in zip(ranks.tolist(), tops.tolist(), strict=True):
            by_rank[rank] = micro_batches_in(top)
        own = np.flatnonzero((change != 0) & ~self.at_partner)
        key = self.rank[own].astype(np.int64) * self.stages + self.stage[own]
        if (np.diff(key) < 0).any():  # several stages on a rank
            own = own[np.argsort(key, kind="stable")]
            key = self.rank[own].astype(np.int64) * self.stages + self.stage[own]
        keys, tops = _tops(amount[own], key)
        by_stage: list[float] = [0] * self.stages
        for stage, top in zip((keys % max(self.stages, 1)).tolist(), tops.tolist(), strict=True):
            by_stage[stage] = max(by_stage[stage], micro_batches_in(top))
        return tuple(by_stage), tuple(by_rank)


def _tops(change: Array, key: Array) -> tuple[Array, Array]:
    """For each run of equal keys, the key and the highest sum of changes from its beginning, 0 at
    least.
    """
    starts = runs(key)
    if not len(starts):
        return key, change
    total = np.cumsum(change)
    before = total[starts] - change[starts]
    return key[starts], np.maximum(np.maximum.reduceat(total, starts) - before, 0)


def runs(key: Array) -> Array:
    """Where each run of equal keys begins."""
    return np.flatnonzero(np.concatenate([np.ones(min(len(key), 1), bool), key[1:] != key[:-1]]))


def op_arrays(schedule: Schedule) -> OpArrays:
    """The arrays of a schedule's programs, made once and kept with it."""
    found = schedule.__dict__.get("_op_arrays")
    if not isinstance(found, OpArrays):
        found = schedule.__dict__["_op_arrays"] = OpArrays.of(schedule.programs, schedule.slicing)
    return found

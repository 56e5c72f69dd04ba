"""What of a simulation does not depend on costs: who waits for whom, and an order in which to walk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.arrays import Array, OpArrays, op_arrays, runs
from penstock.schedule.op import HANDING, Kind, Op, Schedule
from penstock.schedule.rules import RULES, SLICE_RULES, feeds, needs
from penstock.schedule.updates import met_by
from penstock.simulate.engine import run
from penstock.simulate.kernels import Waits

#: What takes a value of this kind on the stage that it goes to.
_TAKERS = {Kind.F: (Kind.F,), Kind.B: (Kind.B, Kind.I)}


@dataclass(eq=False)
class Structure:
    """A schedule's graph as arrays.

    Attributes:
        ops: the programs.
        waits: who waits for whom, see there.
        missing: how many others each group waits for, kept with its leader.
        links: per link, the rank that sends and the one that receives.
        source: per op, the op that makes the value it takes from the neighbour stage, wherever that
        stands; or -1. pairs: the first ops of all pairs; the second stands behind it. column: per
        op, the place of its micro-batch (uncut) among `numbers`, those of all. micro_batches: of
        one batch. effort: ops walked in simulations so far; says when Numba pays. cache: what
        others derive from this and the costs' form, once.
    """

    ops: OpArrays
    waits: Waits
    missing: Array
    links: Array
    source: Array
    pairs: Array
    column: Array
    numbers: Array
    micro_batches: int
    effort: int = 0
    cache: dict[object, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.ops.first) - 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ops.stages

    def walk(self, kernel: str, *arguments: object, times: int = 1) -> None:
        """Run a loop over all ops, `times` cost vectors at once."""
        work = len(self.ops) * times
        run(kernel, work, self.effort, *arguments)
        self.effort += work


def structure(schedule: Schedule) -> Structure:
    """The schedule's graph, made once and kept with it.

    Raises:
        ScheduleError: an op's predecessor or a value's taker is missing, or the programs cannot
        finish.
    """
    found = schedule.__dict__.get("_structure")
    if not isinstance(found, Structure):
        found = schedule.__dict__["_structure"] = _Builder(schedule).build()
    return found


class _Builder:
    """The arrays under construction."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops = ops = op_arrays(schedule)
        self.kinds = {kind: np.flatnonzero(ops.kind == ord(kind.value)) for kind in Kind}
        forwards = ops.micro_batch[self.kinds[Kind.F]]
        self.numbers = (
            np.unique(forwards)
            if forwards.max(initial=0) >= len(ops)
            else np.arange(forwards.max(initial=-1) + 1)
        )
        # Every stage runs every micro-batch; so in a sound schedule the tables below are no larger
        # than the programs.
        if (
            ops.stages * len(self.numbers) > len(ops)
            or ops.stage.min(initial=0) < 0
            or ops.micro_batch.min(initial=0) < 0
        ):
            self.lacking()
        if ops.slicing is not None and len(self.numbers) != len(ops.slicing.share):
            self.lacking()
        self.column = self._column()
        self.key = ops.stage * len(self.numbers) + self.column
        self.row = {kind: self._rows(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
        self.takes, self.also_takes, self.source, self.link = (self._none() for _ in range(4))
        self.pairs = self._pairs()

    def build(self) -> Structure:
        """All of them."""
        ops = self.ops
        for kind in RULES:
            self._wait_for_needs(kind)
        links = self._send()
        leader, following = self._groups()
        taker, also_taker = self._none(), self._none()
        for taken, by in ((self.takes, taker), (self.also_takes, also_taker)):
            rows = np.flatnonzero(taken >= 0)
            by[taken[rows]] = rows
        after = np.arange(1, len(ops) + 1, dtype=np.int32)
        after[ops.first[1:][np.diff(ops.first) > 0] - 1] = -1
        after[self.pairs] = after[self.pairs + 1]
        missing = (self.takes >= 0).astype(np.int32) + (self.also_takes >= 0)
        missing += np.bincount(after[after >= 0], minlength=len(ops)).astype(np.int32)
        beside = self._waves(taker, missing)
        followers = np.flatnonzero(leader != np.arange(len(ops)))
        np.add.at(missing, leader[followers], missing[followers])
        waits = Waits(
            ops.rank,
            self.takes,
            self.also_takes,
            taker,
            also_taker,
            after,
            leader,
            following,
            self.link,
            beside,
            self._none(),
        )
        column, numbers = self.column, self.numbers
        if ops.slicing is not None:
            column, numbers = (
                np.array(ops.slicing.micro_batch_of)[column],
                np.arange(len(ops.slicing.shares)),
            )
        made = Structure(
            ops,
            waits,
            missing,
            links,
            self.source,
            self.pairs,
            column,
            numbers,
            self.schedule.micro_batches,
        )
        if run("order_ops", len(ops), 0, waits, missing.copy(), waits.order) < len(ops):
            self._stuck(waits.order)
        return made

    def _none(self) -> Array:
        return np.full(len(self.ops), -1, np.int32)

    def _column(self) -> Array:
        """Per op, the place of its number among all; 0 for updates, whose numbers are versions."""
        batched = self.ops.kind != ord(Kind.U.value)
        column = np.where(batched, self.ops.micro_batch, 0)
        if len(self.numbers) and self.numbers[-1] + 1 != len(self.numbers):
            column = np.searchsorted(self.numbers, column)
        inside = column < len(self.numbers)
        inside[inside] = self.numbers[column[inside]] == self.ops.micro_batch[inside]
        if not (inside | ~batched).all():
            self.lacking()
        return np.where(batched, column, 0)

    def _rows(self, kind: Kind) -> Array:
        """Per stage and micro-batch, where this op stands, or -1."""
        rows = np.full(self.ops.stages * len(self.numbers), -1, np.int32)
        rows[self.key[self.kinds[kind]]] = self.kinds[kind]
        if np.count_nonzero(rows >= 0) < len(self.kinds[kind]):
            self.lacking()
        return rows

    def _pairs(self) -> Array:
        """Where the first ops of the pairs stand, ascending."""
        first = np.array([self._row_of(pair[0]) for pair in self.schedule.pairs], np.int64)
        second = np.array([self._row_of(pair[1]) for pair in self.schedule.pairs], np.int64)
        both = np.concatenate([first, second])
        if (
            (second != first + 1).any()
            or len(np.unique(both)) < len(both)
            or (self.ops.rank[first] != self.ops.rank[second]).any()
        ):
            self.lacking()
        return np.sort(first)

    def _row_of(self, op: Op) -> int:
        place = int(np.searchsorted(self.numbers, op.micro_batch))
        if (
            op.kind not in self.row
            or not 0 <= op.stage < self.ops.stages
            or place >= len(self.numbers)
        ):
            self.lacking()
        row = int(self.row[op.kind][op.stage * len(self.numbers) + place])
        return row if row >= 0 else self.lacking()

    def _found(self, rows: Array, offset: int, kinds: tuple[Kind, ...]) -> tuple[Array, Array]:
        """Those of `rows` that have a stage so far on, and where its op of one of these kinds
        stands; -1 for nowhere.
        """
        stage = self.ops.stage[rows] + offset
        rows = rows[(stage >= 0) & (stage < self.ops.stages)]
        return rows, self._standing(self.key[rows] + offset * len(self.numbers), kinds)

    def _standing(self, key: Array, kinds: tuple[Kind, ...]) -> Array:
        found = self.row[kinds[0]][key]
        for other in kinds[1:]:
            found = np.maximum(found, self.row[other][key])
        return found

    def _wait_for_needs(self, kind: Kind) -> None:
        """Note what ops of this kind wait for beyond their place in the program."""
        for kinds, offset in RULES[kind]:
            rows, found = self._found(self.kinds[kind], offset, kinds)
            self._wait(rows, found)
            if offset:
                self.source[rows] = found
        slicing = self.ops.slicing
        if slicing is not None and slicing.along == "tokens" and kind in SLICE_RULES:
            kinds, offset = SLICE_RULES[kind]
            other = np.array(
                [
                    -1 if slicing.neighbour(n, offset) is None else n + offset
                    for n in range(len(self.numbers))
                ]
            )
            rows = self.kinds[kind][other[self.column[self.kinds[kind]]] >= 0]
            self._wait(rows, self._standing(self.key[rows] + offset, kinds))

    def _wait(self, rows: Array, found: Array) -> None:
        """Let each of `rows` wait for the op found for it, unless its place behind that says so
        already.
        """
        if (found < 0).any():
            self.lacking()
        own = (self.ops.rank[found] == self.ops.rank[rows]) & (found < rows)
        if len(
            self.pairs
        ):  # the ops of a pair start together, so the second cannot wait for the first
            own &= (found != rows - 1) | ~np.isin(found, self.pairs)
        rows, found = rows[~own], found[~own]
        again = self.takes[rows] >= 0
        self.takes[rows[~again]] = found[~again]
        if (self.also_takes[rows[again]] >= 0).any():
            self.lacking()
        self.also_takes[rows[again]] = found[again]

    def _send(self) -> Array:
        """Give every value that crosses ranks its link; returns the links."""
        ranks = self.schedule.ranks
        wires = np.full(len(self.ops), -1, np.int64)
        for kind in RULES:
            fed = feeds(Op(kind, 1, 0), 3)  # asked of a stage in the middle
            if fed is None:
                continue
            rows, home = self._found(self.kinds[kind], fed[1] - 1, (Kind.F,))
            taken = self._found(rows, fed[1] - 1, _TAKERS[fed[0]])[1]
            crossing = (home < 0) | (self.ops.rank[home] != self.ops.rank[rows])
            rows, home, taken = rows[crossing], home[crossing], taken[crossing]
            if (
                (home < 0).any()
                or (taken < 0).any()
                or (self.ops.rank[taken] != self.ops.rank[home]).any()
            ):
                self.lacking()
            wires[rows] = self.ops.rank[rows].astype(np.int64) * ranks + self.ops.rank[taken]
        for kind in HANDING:
            maker, taker = self._handed(kind)
            self.takes[taker] = maker
            wires[maker] = self.ops.rank[maker].astype(np.int64) * ranks + self.ops.rank[taker]
        rows = np.flatnonzero(wires >= 0)
        pairs, number = numbered(wires[rows], ranks * ranks)
        self.link[rows] = number
        return np.stack([pairs // max(ranks, 1), pairs % max(ranks, 1)], axis=1).astype(np.int32)

    def _handed(self, kind: Kind) -> tuple[Array, Array]:
        """Where the two halves of every E or L stand: the one that sends and the one that receives."""
        rows = self.kinds[kind]
        rows = rows[np.argsort(self.key[rows], kind="stable")]
        owner, partner = rows[~self.ops.at_partner[rows]], rows[self.ops.at_partner[rows]]
        if (
            not np.array_equal(self.key[owner], self.key[partner])
            or (np.diff(self.key[owner]) == 0).any()
        ):
            self.lacking()
        return (owner, partner) if kind is Kind.E else (partner, owner)

    def _groups(self) -> tuple[Array, Array]:
        """Who starts together: per op its leader, and the next of its group."""
        leader, following = np.arange(len(self.ops), dtype=np.int32), self._none()
        leader[self.pairs + 1] = self.pairs
        following[self.pairs] = self.pairs + 1
        for update, copies in self._updates(least=2).items():
            if met_by(update, self.schedule.stream) == update:
                leader[copies] = copies[0]
                following[copies[:-1]] = copies[1:]
        return leader, following

    def _updates(self, least: int) -> dict[Op, Array]:
        """Where every U stands that has at least so many copies, by rank."""
        updates = self.kinds[Kind.U]
        updates = updates[
            np.lexsort(
                (self.ops.rank[updates], self.ops.micro_batch[updates], self.ops.stage[updates])
            )
        ]
        starts = np.union1d(runs(self.ops.stage[updates]), runs(self.ops.micro_batch[updates]))
        ends = np.append(starts[1:], len(updates)) if len(starts) else starts
        many = ends - starts >= least
        return {
            self.ops.op(updates[low]): updates[low:high]
            for low, high in zip(starts[many], ends[many], strict=True)
        }

    def _waves(self, taker: Array, missing: Array) -> Array:
        """Let the last U of every wave wait for those of earlier waves on all ranks; returns who
        stands beside whom.

        It waits for its own copy's too, which its place says already: so all of them wait for the
        same ops.
        """
        stream = self.schedule.stream
        if stream is None or stream.waves is None or stream.waves.distance == 0:
            return np.zeros(0, np.int32)
        beside = self._none()
        standing = self._updates(least=1)
        for copies in standing.values():
            beside[copies[:-1]] = copies[1:]
        for update, copies in standing.items():
            met = met_by(update, stream)
            if met in standing:
                self.takes[copies] = standing[met][0]
                taker[standing[met]] = copies[0]
                missing[copies] += len(standing[met])
        return beside

    def lacking(self) -> NoReturn:
        """Say which op or taker is missing: slowly, op by op, since the answer is an error."""
        programs = self.schedule.programs
        where = {op: rank for rank, program in enumerate(programs) for op in program}
        stages = self.ops.stages
        for rank, program in enumerate(programs):
            for op in program:
                for group in needs(op, stages, self.schedule.slicing):
                    if not any(other in where for other in group):
                        raise ScheduleError(
                            f"rank {rank}: {op} needs {' or '.join(map(str, group))}, which no rank runs"
                        )
                fed = feeds(op, stages)
                if fed is not None and not any(
                    Op(kind, fed[1], op.micro_batch) in where for kind in _TAKERS[fed[0]]
                ):
                    raise ScheduleError(
                        f"rank {rank}: nobody takes what {op} makes for stage {fed[1]}"
                    )
        raise ScheduleError(
            f"{self.schedule.name} is not sound, so it has no times: `verify` says what is wrong"
        )

    def _stuck(self, order: Array) -> NoReturn:
        """Say where every rank stands that cannot go on."""
        walked = np.zeros(len(self.ops), bool)
        walked[order[order >= 0]] = True
        stuck = np.flatnonzero(~walked)
        ranks, places = np.unique(self.ops.rank[stuck], return_index=True)
        waiting = ", ".join(
            f"rank {rank} at {self.ops.op(stuck[place])}"
            for rank, place in zip(ranks[:4], places[:4], strict=True)
        )
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        raise ScheduleError(
            f"{self.schedule.name} cannot finish: it stands with {waiting}{more}; `verify` says who waits for whom"
        )


def numbered(keys: Array, bound: int) -> tuple[Array, Array]:
    """The different keys, ascending, and for each key its place among them; without sorting where
    the bound allows.
    """
    if bound > 4 * len(keys) + 1024:
        found, places = np.unique(keys, return_inverse=True)
        return found, places
    present = np.zeros(bound, bool)
    present[keys] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[keys]

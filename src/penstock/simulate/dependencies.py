"""The dependencies of a schedule as arrays, with a topological order; independent of costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from penstock.compiled import run
from penstock.errors import ScheduleError
from penstock.schedule.arrays import Array, OpArrays, op_arrays, runs
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.rules import RULES, SLICE_RULES, feeds, needs
from penstock.schedule.updates import awaited_update
from penstock.simulate.kernels import ITERATIONS_PER_OP, OpGraph, order_ops

#: Kinds of op that consume a value of this kind on the receiving stage.
_CONSUMERS = {Kind.F: (Kind.F,), Kind.B: (Kind.B, Kind.I)}


@dataclass(eq=False)
class Dependencies:
    """The dependency graph of a schedule as arrays.

    Attributes:
        ops: the programs.
        graph: dependencies of every op.
        pending: number of ops that each group waits for, at the index of its leader.
        links: per link, the rank that sends and the one that receives.
        source: per op, the op that produces the value it receives from the neighbour stage, on
            whatever rank that is; or -1.
        pairs: the first ops of all pairs; the second is the next entry.
        column: per op, the position of its (uncut) micro-batch in `numbers`.
        numbers: the numbers of all micro-batches.
        micro_batches: micro-batches of one batch.
        cache: what other modules derive from this once.
    """

    ops: OpArrays
    graph: OpGraph
    pending: Array
    links: Array
    source: Array
    pairs: Array
    column: Array
    numbers: Array
    micro_batches: int
    cache: dict[object, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.ops.first) - 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ops.stages

    def walk(self, kernel: Callable[..., Any], *arguments: object, vectors: int = 1) -> None:
        """Run a kernel over all ops, for `vectors` cost vectors at once."""
        run(kernel, ITERATIONS_PER_OP * len(self.ops) * vectors, *arguments, on_lists=True)


def dependencies_of(schedule: Schedule) -> Dependencies:
    """Return the dependencies of a schedule, computed once and cached on it.

    Raises:
        ScheduleError: an op's predecessor or a value's consumer is missing, or the programs
            deadlock.
    """
    dependencies = schedule.__dict__.get("_dependencies")
    if not isinstance(dependencies, Dependencies):
        dependencies = _DependencyBuilder(schedule).build()
        schedule.__dict__["_dependencies"] = dependencies
    return dependencies


class _DependencyBuilder:
    """Builds the arrays of `Dependencies`.

    Attributes:
        schedule: the schedule.
        ops: its programs.
        kinds: per kind of op, the rows of its ops.
        numbers: the numbers of all micro-batches (or slices).
        column: per op, the position of its number in `numbers`.
        key: per op, stage * len(numbers) + column.
        row: per kind of op, the row of every key, or -1.
        first_input, second_input, source, link, pairs: see `OpGraph` and `Dependencies`.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ops = ops = op_arrays(schedule)
        self.kinds = {kind: np.flatnonzero(ops.kind == ord(kind.value)) for kind in Kind}
        forwards = ops.micro_batch[self.kinds[Kind.F]]
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
            self._raise_missing()
        if ops.slicing is not None and len(self.numbers) != len(ops.slicing.share):
            self._raise_missing()
        self.column = self._column()
        self.key = ops.stage * len(self.numbers) + self.column
        self.row = {kind: self._rows(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
        self.first_input, self.second_input = self._no_ops(), self._no_ops()
        self.source, self.link = self._no_ops(), self._no_ops()
        self.pairs = self._pairs()

    def build(self) -> Dependencies:
        """Build the dependencies and their topological order."""
        ops = self.ops
        for kind in RULES:
            self._add_inputs(kind)
        links = self._add_links()
        leader, next_in_group = self._groups()
        first_consumer = self._inverse(self.first_input)
        second_consumer = self._inverse(self.second_input)
        after = np.arange(1, len(ops) + 1, dtype=np.int32)
        after[ops.first[1:][np.diff(ops.first) > 0] - 1] = -1
        after[self.pairs] = after[self.pairs + 1]
        pending = (self.first_input >= 0).astype(np.int32) + (self.second_input >= 0)
        pending += np.bincount(after[after >= 0], minlength=len(ops)).astype(np.int32)
        next_replica = self._add_waves(first_consumer, pending)
        followers = np.flatnonzero(leader != np.arange(len(ops)))
        np.add.at(pending, leader[followers], pending[followers])
        graph = OpGraph(
            rank=ops.rank,
            first_input=self.first_input,
            second_input=self.second_input,
            first_consumer=first_consumer,
            second_consumer=second_consumer,
            after=after,
            leader=leader,
            next_in_group=next_in_group,
            link=self.link,
            next_replica=next_replica,
            order=self._no_ops(),
        )
        column, numbers = self.column, self.numbers
        if ops.slicing is not None:
            column = np.array(ops.slicing.micro_batch_of)[column]
            numbers = np.arange(len(ops.slicing.shares))
        dependencies = Dependencies(
            ops,
            graph,
            pending,
            links,
            self.source,
            self.pairs,
            column,
            numbers,
            self.schedule.micro_batches,
        )
        work = ITERATIONS_PER_OP * len(ops)
        ordered = run(order_ops, work, graph, pending.copy(), graph.order, on_lists=True)
        if ordered < len(ops):
            self._raise_deadlock(graph.order)
        return dependencies

    def _no_ops(self) -> Array:
        """Return an array with -1 for every op."""
        return np.full(len(self.ops), -1, np.int32)

    def _inverse(self, inputs: Array) -> Array:
        """Return the consumer of every op, given every consumer's input."""
        consumer = self._no_ops()
        rows = np.flatnonzero(inputs >= 0)
        consumer[inputs[rows]] = rows
        return consumer

    def _column(self) -> Array:
        """Return per op the position of its number; 0 for updates, whose numbers are versions."""
        batched = self.ops.kind != ord(Kind.U.value)
        column = np.where(batched, self.ops.micro_batch, 0)
        if len(self.numbers) and self.numbers[-1] + 1 != len(self.numbers):
            column = np.searchsorted(self.numbers, column)
        is_known = column < len(self.numbers)
        is_known[is_known] = self.numbers[column[is_known]] == self.ops.micro_batch[is_known]
        if not (is_known | ~batched).all():
            self._raise_missing()
        return np.where(batched, column, 0)

    def _rows(self, kind: Kind) -> Array:
        """Return the row of this kind of op for every key (stage and micro-batch), or -1."""
        rows = np.full(self.ops.stages * len(self.numbers), -1, np.int32)
        rows[self.key[self.kinds[kind]]] = self.kinds[kind]
        if np.count_nonzero(rows >= 0) < len(self.kinds[kind]):
            self._raise_missing()
        return rows

    def _pairs(self) -> Array:
        """Return the rows of the first ops of all pairs, ascending."""
        first = np.array([self._row_of(pair[0]) for pair in self.schedule.pairs], np.int64)
        second = np.array([self._row_of(pair[1]) for pair in self.schedule.pairs], np.int64)
        both = np.concatenate([first, second])
        if (
            (second != first + 1).any()
            or len(np.unique(both)) < len(both)
            or (self.ops.rank[first] != self.ops.rank[second]).any()
        ):
            self._raise_missing()
        return np.sort(first)

    def _row_of(self, op: Op) -> int:
        """Return the row of an op."""
        column = int(np.searchsorted(self.numbers, op.micro_batch))
        if (
            op.kind not in self.row
            or not 0 <= op.stage < self.ops.stages
            or column >= len(self.numbers)
        ):
            self._raise_missing()
        row = int(self.row[op.kind][op.stage * len(self.numbers) + column])
        return row if row >= 0 else self._raise_missing()

    def _rows_on_neighbour(
        self, rows: Array, offset: int, kinds: tuple[Kind, ...]
    ) -> tuple[Array, Array]:
        """Return the `rows` that have a stage at this offset, and the rows of its ops.

        The second array contains the op of one of these kinds, or -1.
        """
        stage = self.ops.stage[rows] + offset
        rows = rows[(stage >= 0) & (stage < self.ops.stages)]
        return rows, self._rows_of_keys(self.key[rows] + offset * len(self.numbers), kinds)

    def _rows_of_keys(self, key: Array, kinds: tuple[Kind, ...]) -> Array:
        """Return the row of the op of one of these kinds for every key, or -1."""
        rows = self.row[kinds[0]][key]
        for kind in kinds[1:]:
            rows = np.maximum(rows, self.row[kind][key])
        return rows

    def _add_inputs(self, kind: Kind) -> None:
        """Add what ops of this kind wait for in addition to their place in the program."""
        for kinds, offset in RULES[kind]:
            rows, inputs = self._rows_on_neighbour(self.kinds[kind], offset, kinds)
            self._add_edges(rows, inputs)
            if offset:
                self.source[rows] = inputs
        slicing = self.ops.slicing
        if slicing is not None and slicing.along == "tokens" and kind in SLICE_RULES:
            kinds, offset = SLICE_RULES[kind]
            has_neighbour = np.array(
                [slicing.neighbour(n, offset) is not None for n in range(len(self.numbers))], bool
            )
            rows = self.kinds[kind]
            rows = rows[has_neighbour[self.column[rows]]]
            self._add_edges(rows, self._rows_of_keys(self.key[rows] + offset, kinds))

    def _add_edges(self, rows: Array, inputs: Array) -> None:
        """Let every row wait for its input, unless it follows it in the same program."""
        if (inputs < 0).any():
            self._raise_missing()
        implied = (self.ops.rank[inputs] == self.ops.rank[rows]) & (inputs < rows)
        if len(self.pairs):
            # The ops of a pair start together, so the second cannot wait for the first.
            implied &= (inputs != rows - 1) | ~np.isin(inputs, self.pairs)
        rows, inputs = rows[~implied], inputs[~implied]
        has_input = self.first_input[rows] >= 0
        self.first_input[rows[~has_input]] = inputs[~has_input]
        if (self.second_input[rows[has_input]] >= 0).any():
            self._raise_missing()
        self.second_input[rows[has_input]] = inputs[has_input]

    def _add_links(self) -> Array:
        """Assign a link to every value that crosses ranks; return the links."""
        ranks = self.schedule.ranks
        # Sending rank * ranks + receiving rank, or -1.
        wires = np.full(len(self.ops), -1, np.int64)
        for kind in RULES:
            # Every stage in the middle follows the same rule: ask for stage 1 of 3.
            sent = feeds(Op(kind, 1, 0), 3)
            if sent is None:
                continue
            value_kind, stage = sent
            # The receiver's rank is that of its F of the micro-batch.
            rows, receiver = self._rows_on_neighbour(self.kinds[kind], stage - 1, (Kind.F,))
            consumer = self._rows_on_neighbour(rows, stage - 1, _CONSUMERS[value_kind])[1]
            crossing = (receiver < 0) | (self.ops.rank[receiver] != self.ops.rank[rows])
            rows, receiver, consumer = rows[crossing], receiver[crossing], consumer[crossing]
            if (
                (receiver < 0).any()
                or (consumer < 0).any()
                or (self.ops.rank[consumer] != self.ops.rank[receiver]).any()
            ):
                self._raise_missing()
            wires[rows] = self.ops.rank[rows].astype(np.int64) * ranks + self.ops.rank[consumer]
        for kind in ACTIVATION_MOVES:
            sender, receiver = self._handed(kind)
            self.first_input[receiver] = sender
            wires[sender] = self.ops.rank[sender].astype(np.int64) * ranks + self.ops.rank[receiver]
        rows = np.flatnonzero(wires >= 0)
        pairs, number = number_keys(wires[rows], ranks * ranks)
        self.link[rows] = number
        return np.stack([pairs // max(ranks, 1), pairs % max(ranks, 1)], axis=1).astype(np.int32)

    def _handed(self, kind: Kind) -> tuple[Array, Array]:
        """Return the rows of the sending and of the receiving half of every E or L."""
        rows = self.kinds[kind]
        rows = rows[np.argsort(self.key[rows], kind="stable")]
        owner, partner = rows[~self.ops.on_partner[rows]], rows[self.ops.on_partner[rows]]
        if (
            not np.array_equal(self.key[owner], self.key[partner])
            or (np.diff(self.key[owner]) == 0).any()
        ):
            self._raise_missing()
        return (owner, partner) if kind is Kind.E else (partner, owner)

    def _groups(self) -> tuple[Array, Array]:
        """Return per op the leader of its group (ops that start together), and the next member."""
        leader, next_in_group = np.arange(len(self.ops), dtype=np.int32), self._no_ops()
        leader[self.pairs + 1] = self.pairs
        next_in_group[self.pairs] = self.pairs + 1
        for update, replicas in self._updates(least=2).items():
            if awaited_update(update, self.schedule.stream) == update:
                leader[replicas] = replicas[0]
                next_in_group[replicas[:-1]] = replicas[1:]
        return leader, next_in_group

    def _updates(self, least: int) -> dict[Op, Array]:
        """Return the rows, by rank, of every U with at least this many replicas."""
        rows = self.kinds[Kind.U]
        rank, stage, version = self.ops.rank, self.ops.stage, self.ops.micro_batch
        rows = rows[np.lexsort((rank[rows], version[rows], stage[rows]))]
        starts = np.union1d(runs(stage[rows]), runs(version[rows]))
        ends = np.append(starts[1:], len(rows)) if len(starts) else starts
        enough = ends - starts >= least
        return {
            self.ops.op(rows[low]): rows[low:high]
            for low, high in zip(starts[enough], ends[enough], strict=True)
        }

    def _add_waves(self, first_consumer: Array, pending: Array) -> Array:
        """Let the last U of every wave wait for those of earlier waves on all ranks.

        It also waits for the one on its own rank, which its place in the program implies already:
        so all of them wait for the same ops, and share one chain of `next_replica`.

        Returns:
            `next_replica`; empty without waves.
        """
        stream = self.schedule.stream
        if stream is None or stream.waves is None or stream.waves.distance == 0:
            return np.zeros(0, np.int32)
        next_replica = self._no_ops()
        updates = self._updates(least=1)
        for replicas in updates.values():
            next_replica[replicas[:-1]] = replicas[1:]
        for update, replicas in updates.items():
            awaited = awaited_update(update, stream)
            if awaited in updates:
                self.first_input[replicas] = updates[awaited][0]
                first_consumer[updates[awaited]] = replicas[0]
                pending[replicas] += len(updates[awaited])
        return next_replica

    def _raise_missing(self) -> NoReturn:
        """Raise the error about a missing op. Slow, op by op, since it ends in an error anyway."""
        programs = self.schedule.programs
        rank_of = {op: rank for rank, program in enumerate(programs) for op in program}
        for rank, program in enumerate(programs):
            for op in program:
                self._check_op(op, rank, rank_of)
        raise ScheduleError(
            f"{self.schedule.name} is not valid, so it cannot be simulated; `verify` reports why"
        )

    def _check_op(self, op: Op, rank: int, rank_of: dict[Op, int]) -> None:
        """Raise an error if no rank runs an op's input, or the consumer of its value."""
        stages = self.ops.stages
        for group in needs(op, stages, self.schedule.slicing):
            if not any(alternative in rank_of for alternative in group):
                raise ScheduleError(
                    f"rank {rank}: {op} needs {' or '.join(map(str, group))}, which no rank runs"
                )
        sent = feeds(op, stages)
        if sent is None:
            return
        value_kind, stage = sent
        consumers = [Op(kind, stage, op.micro_batch) for kind in _CONSUMERS[value_kind]]
        if not any(consumer in rank_of for consumer in consumers):
            raise ScheduleError(
                f"rank {rank}: no op consumes the value that {op} produces for stage {stage}"
            )

    def _raise_deadlock(self, order: Array) -> NoReturn:
        """Raise the error about a deadlock, with the op at which every rank blocks."""
        ordered = np.zeros(len(self.ops), bool)
        ordered[order[order >= 0]] = True
        blocked = np.flatnonzero(~ordered)
        ranks, places = np.unique(self.ops.rank[blocked], return_index=True)
        waiting = ", ".join(
            f"rank {rank} at {self.ops.op(blocked[place])}"
            for rank, place in zip(ranks[:4], places[:4], strict=True)
        )
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        raise ScheduleError(
            f"{self.schedule.name} deadlocks: it stops with {waiting}{more}; "
            f"`verify` reports the cycle"
        )


def number_keys(keys: Array, bound: int) -> tuple[Array, Array]:
    """Return the unique keys, ascending, and the position of each key among them.

    Keys are below `bound`; if that is small, no sorting is needed.
    """
    if bound > 4 * len(keys) + 1024:
        unique, positions = np.unique(keys, return_inverse=True)
        return unique, positions
    present = np.zeros(bound, bool)
    present[keys] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[keys]

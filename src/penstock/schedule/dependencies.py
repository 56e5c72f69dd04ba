"""The dependencies of a schedule: what every op waits for, and which values cross ranks.

This is the only place that applies the rules of `rules` and `updates` to whole programs. verify
looks for cycles here; lower reads the messages; simulate gives ops and messages seconds.

An op waits for the previous op of its rank and for its inputs (`rules.needs`); where an input is
produced on another rank, for its message. The halves of an E or L on two ranks exchange a message
too. A U of a stage with copies waits for those of the other copies (`updates.awaited_update`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from penstock.compiled import run
from penstock.errors import ScheduleError
from penstock.schedule.arrays import Array, OpArrays, runs
from penstock.schedule.kernels import (
    ITERATIONS_PER_OP,
    Durations,
    OpGraph,
    Times,
    order_ops,
    time_ops,
)
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.op_index import OpIndex, raise_missing
from penstock.schedule.rules import FLOWS, RULES, SLICE_RULES
from penstock.schedule.updates import awaited_update


@dataclass(eq=False)
class Dependencies:
    """The dependency graph of a schedule as arrays.

    Attributes:
        name: name of the schedule.
        ops: the programs.
        graph: dependencies of every op; its `order` ends with -1 for each op on or behind a cycle.
        pending: number of ops that each group waits for, at the index of its leader.
        links: per link, the rank that sends and the one that receives.
        source: per op, the op that produces the value it receives from the neighbour stage, on
            whatever rank that is; or -1.
        consumer: per op whose value crosses ranks, the op that consumes it there; else -1.
        pairs: the first ops of all pairs; the second is the next entry.
        column: per op, the position of its (uncut) micro-batch in `numbers`.
        numbers: the numbers of all micro-batches.
        micro_batches: micro-batches of one batch.
        cache: what other modules derive from this once.
    """

    name: str
    ops: OpArrays
    graph: OpGraph
    pending: Array
    links: Array
    source: Array
    consumer: Array
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

    @cached_property
    def blocked(self) -> Array:
        """The ops that never start, since they are on a cycle or wait for an op on one."""
        is_blocked = np.ones(len(self.ops), bool)
        is_blocked[self.graph.order[self.graph.order >= 0]] = False
        return np.flatnonzero(is_blocked)

    def inputs(self) -> list[list[int]]:
        """Return per op the ops that it waits for beside the previous one of its rank.

        Inputs that precede the op in its program are left out.
        """
        first, second = self.graph.first_input.tolist(), self.graph.second_input.tolist()
        next_replica = self.graph.next_replica.tolist()
        inputs: list[list[int]] = []
        for row in range(len(self.ops)):
            sources = []
            source = first[row]
            while source >= 0:
                sources.append(source)
                source = next_replica[source] if next_replica else -1
            if second[row] >= 0:
                sources.append(second[row])
            inputs.append(sources)
        return inputs

    def groups(self, *, pairs: bool = True) -> Iterator[list[int]]:
        """Yield the ops of every group that start together: pairs, and replicas of an update.

        Args:
            pairs: include pairs. Executors may run the two ops of a pair one after the other.
        """
        next_in_group = self.graph.next_in_group.tolist()
        is_pair = set(self.pairs.tolist())
        leaders = np.flatnonzero(self.graph.leader == np.arange(len(self.ops)))
        for leader in leaders.tolist():
            if next_in_group[leader] >= 0 and (pairs or leader not in is_pair):
                group = []
                member = leader
                while member >= 0:
                    group.append(member)
                    member = next_in_group[member]
                yield group

    def predecessors(self, *, pairs: bool = True) -> list[list[int]]:
        """Return per op the ops that must have ended before it can start.

        Ops that start together wait for all that one of them waits for.

        Args:
            pairs: as for `groups`.
        """
        predecessors = self.inputs()
        first = set(self.ops.first.tolist())
        for row, inputs in enumerate(predecessors):
            if row not in first:
                inputs.insert(0, row - 1)
        for group in self.groups(pairs=pairs):
            share_predecessors(predecessors, group)
        return predecessors

    def pair_seconds(self, seconds: Array) -> Array:
        """Return the seconds of every pair, those of its ops together; ops are the last axis."""
        total: Array = seconds[..., self.pairs] + seconds[..., self.pairs + 1]
        return total

    def time_ops(self, durations: Durations, times: Times) -> None:
        """Compute `times` where every directed pair of ranks has a link of its own."""
        rank_free, link_free = np.zeros(self.ranks), np.zeros(len(self.links))
        self.walk(time_ops, self.graph, durations, rank_free, link_free, times)

    def walk(self, kernel: Callable[..., Any], *arguments: object, vectors: int = 1) -> None:
        """Run a kernel over all ops, for `vectors` cost vectors at once."""
        run(kernel, ITERATIONS_PER_OP * len(self.ops) * vectors, *arguments, on_lists=True)


def dependencies_of(schedule: Schedule) -> Dependencies:
    """Return the dependencies of a schedule, computed once and cached on it.

    The programs may have a cycle (see `Dependencies.blocked`).

    Raises:
        ScheduleError: an op's predecessor or a value's consumer is missing.
    """
    dependencies = schedule.__dict__.get("_dependencies")
    if not isinstance(dependencies, Dependencies):
        dependencies = _Builder(schedule).build()
        # Into the dict, since a frozen dataclass takes no new attribute.
        schedule.__dict__["_dependencies"] = dependencies
    return dependencies


def acyclic_dependencies_of(schedule: Schedule) -> Dependencies:
    """Return the dependencies of a schedule whose programs finish.

    Raises:
        ScheduleError: as `dependencies_of`, or the programs deadlock; then it has the op at which
            every rank blocks.
    """
    dependencies = dependencies_of(schedule)
    blocked = dependencies.blocked
    if len(blocked):
        ranks, places = np.unique(dependencies.ops.rank[blocked], return_index=True)
        waiting = ", ".join(
            f"rank {rank} at {dependencies.ops.op(blocked[place])}"
            for rank, place in zip(ranks[:4], places[:4], strict=True)
        )
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        raise ScheduleError(
            f"{schedule.name} deadlocks: it stops with {waiting}{more}; `verify` reports the cycle"
        )
    return dependencies


class _Builder:
    """Builds the arrays of `Dependencies`.

    Attributes:
        schedule: the schedule.
        ops: its programs.
        index: finds rows.
        first_input, second_input, source, consumer, link, pairs: see `OpGraph` and `Dependencies`.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.index = OpIndex(schedule)
        self.ops = self.index.ops
        self.first_input, self.second_input = self._no_ops(), self._no_ops()
        self.source, self.consumer, self.link = self._no_ops(), self._no_ops(), self._no_ops()
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
        has_ops = np.diff(ops.first) > 0
        last_of_rank = ops.first[1:][has_ops] - 1
        after[last_of_rank] = -1
        # The second op of a pair does not come after the first: both precede the op after the pair.
        after[self.pairs] = after[self.pairs + 1]
        # An op waits for its inputs, and for what precedes it on its rank.
        pending = (self.first_input >= 0).astype(np.int32) + (self.second_input >= 0)
        pending += np.bincount(after[after >= 0], minlength=len(ops)).astype(np.int32)
        next_replica = self._add_waves(first_consumer, pending)
        # A group starts when no member waits any more, which its leader counts for all.
        followers = np.flatnonzero(leader != np.arange(len(ops)))
        # `pending[...] +=` would count only one of the followers of a leader.
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
        work = ITERATIONS_PER_OP * len(ops)
        run(order_ops, work, graph, pending.copy(), graph.order, on_lists=True)
        column, numbers = self.index.column, self.index.numbers
        if ops.slicing is not None:
            column = np.array(ops.slicing.micro_batch_of)[column]
            numbers = np.arange(len(ops.slicing.shares))
        return Dependencies(
            self.schedule.name,
            ops,
            graph,
            pending,
            links,
            self.source,
            self.consumer,
            self.pairs,
            column,
            numbers,
            self.schedule.micro_batches,
        )

    def _no_ops(self) -> Array:
        return np.full(len(self.ops), -1, np.int32)

    def _inverse(self, inputs: Array) -> Array:
        """Return the consumer of every op, given every consumer's input."""
        consumer = self._no_ops()
        rows = np.flatnonzero(inputs >= 0)
        consumer[inputs[rows]] = rows
        return consumer

    def _pairs(self) -> Array:
        """Return the rows of the first ops of all pairs, ascending."""
        first = np.array([self.index.of_op(pair[0]) for pair in self.schedule.pairs], np.int64)
        second = np.array([self.index.of_op(pair[1]) for pair in self.schedule.pairs], np.int64)
        both = np.concatenate([first, second])
        if (
            (second != first + 1).any()
            or len(np.unique(both)) < len(both)
            or (self.ops.rank[first] != self.ops.rank[second]).any()
        ):
            raise_missing(self.schedule)
        return np.sort(first)

    def _add_inputs(self, kind: Kind) -> None:
        """Add what ops of this kind wait for in addition to their place in the program."""
        index = self.index
        for kinds, offset in RULES[kind]:
            rows, inputs = index.on_neighbour(index.kinds[kind], offset, kinds)
            self._add_edges(rows, inputs)
            if offset:
                self.source[rows] = inputs
        slicing = self.ops.slicing
        if slicing is not None and slicing.along == "tokens" and kind in SLICE_RULES:
            kinds, offset = SLICE_RULES[kind]
            numbers = range(len(index.numbers))
            has_neighbour = np.array(
                [slicing.neighbour(n, offset) is not None for n in numbers], bool
            )
            rows = index.kinds[kind]
            rows = rows[has_neighbour[index.column[rows]]]
            self._add_edges(rows, index.of_keys(index.key[rows] + offset, kinds))

    def _add_edges(self, rows: Array, inputs: Array) -> None:
        """Make every row wait for its input, unless it follows it in the same program."""
        if (inputs < 0).any():
            raise_missing(self.schedule)
        is_local = self.ops.rank[inputs] == self.ops.rank[rows]
        implied = is_local & (inputs < rows)
        if len(self.pairs):
            # The ops of a pair start together, so the second cannot wait for the first.
            implied &= (inputs != rows - 1) | ~np.isin(inputs, self.pairs)
        rows, inputs = rows[~implied], inputs[~implied]
        has_first, has_second = self.first_input[rows] >= 0, self.second_input[rows] >= 0
        self.first_input[rows[~has_first]] = inputs[~has_first]
        second = has_first & ~has_second
        self.second_input[rows[second]] = inputs[second]
        # An op has a third input only if it precedes one of them in its program, and then it never
        # starts anyway.
        for row, third in zip(rows[has_second], inputs[has_second], strict=True):
            waits = np.array([self.first_input[row], self.second_input[row], third])
            if not ((self.ops.rank[waits] == self.ops.rank[row]) & (waits >= row)).any():
                raise_missing(self.schedule)

    def _add_links(self) -> Array:
        """Assign a link to every value that crosses ranks; return the links."""
        ranks = self.schedule.ranks
        rank = self.ops.rank.astype(np.int64)
        flows = [(kind, flow) for flow in FLOWS.values() for kind in flow.producers]
        for kind, flow in flows:
            # The receiver's rank is that of its F of the micro-batch.
            rows, receiver = self.index.on_neighbour(self.index.kinds[kind], flow.offset, (Kind.F,))
            consumer = self.index.on_neighbour(rows, flow.offset, flow.consumers)[1]
            crossing = (receiver < 0) | (rank[receiver] != rank[rows])
            rows, receiver, consumer = rows[crossing], receiver[crossing], consumer[crossing]
            is_missing = (receiver < 0) | (consumer < 0) | (rank[consumer] != rank[receiver])
            if is_missing.any():
                raise_missing(self.schedule)
            self.consumer[rows] = consumer
        for kind in ACTIVATION_MOVES:
            sender, receiver = self._sender_and_receiver(kind)
            self.first_input[receiver] = sender
            self.consumer[sender] = receiver
        rows = np.flatnonzero(self.consumer >= 0)
        wires = rank[rows] * ranks + rank[self.consumer[rows]]
        pairs, number = number_keys(wires, ranks * ranks)
        self.link[rows] = number
        return np.stack([pairs // max(ranks, 1), pairs % max(ranks, 1)], axis=1).astype(np.int32)

    def _sender_and_receiver(self, kind: Kind) -> tuple[Array, Array]:
        """Return the rows of the sending and of the receiving half of every E or L."""
        rows = self.index.kinds[kind]
        key = self.index.key
        rows = rows[np.argsort(key[rows], kind="stable")]
        owner, partner = rows[~self.ops.on_partner[rows]], rows[self.ops.on_partner[rows]]
        if not np.array_equal(key[owner], key[partner]) or (np.diff(key[owner]) == 0).any():
            raise_missing(self.schedule)
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
        rows = self.index.kinds[Kind.U]
        rank, stage, version = self.ops.rank, self.ops.stage, self.ops.micro_batch
        # Sorted by stage, then version, then rank: the last key of lexsort comes first.
        rows = rows[np.lexsort((rank[rows], version[rows], stage[rows]))]
        starts = np.union1d(runs(stage[rows]), runs(version[rows]))
        # A rank that runs one U twice, which verify refuses, takes part in the group once.
        rows = rows[np.union1d(starts, runs(rank[rows]))]
        starts = np.union1d(runs(stage[rows]), runs(version[rows]))
        ends = np.append(starts[1:], len(rows)) if len(starts) else starts
        enough = ends - starts >= least
        return {
            self.ops.op(rows[low]): rows[low:high]
            for low, high in zip(starts[enough], ends[enough], strict=True)
        }

    def _add_waves(self, first_consumer: Array, pending: Array) -> Array:
        """Make the last U of every wave wait for those of earlier waves on all ranks.

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


def share_predecessors(predecessors: list[list[int]], group: Sequence[int]) -> None:
    """Give every node of a group that starts together the predecessors of all of them."""
    union: dict[int, None] = {}
    for node in group:
        union.update(dict.fromkeys(predecessors[node]))
    shared = [node for node in union if node not in group]
    for node in group:
        predecessors[node] = shared


def successors_of(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the nodes that each node of a graph is a predecessor of."""
    successors: list[list[int]] = [[] for _ in predecessors]
    for node, nodes in enumerate(predecessors):
        for predecessor in nodes:
            successors[predecessor].append(node)
    return successors


def number_keys(keys: Array, bound: int) -> tuple[Array, Array]:
    """Return the unique keys, ascending, and the position of each key among them.

    Keys are below `bound`; if that is small, no sorting is needed.
    """
    # A table of all possible keys would be mostly empty, and larger than what sorting needs.
    if bound > 4 * len(keys) + 1024:
        unique, positions = np.unique(keys, return_inverse=True)
        return unique, positions
    present = np.zeros(bound, bool)
    present[keys] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[keys]

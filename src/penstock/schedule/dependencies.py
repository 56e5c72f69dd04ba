"""The dependencies of a schedule: what every op waits for, and which values cross ranks.

Here and in `op_inputs`, and nowhere else, the rules of `rules` and `updates` are applied to whole
programs. verify looks for cycles here; lower reads the messages; simulate gives ops and messages
seconds.

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
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.op_inputs import OpInputs, no_ops
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
        dependencies = _build(schedule)
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


def _build(schedule: Schedule) -> Dependencies:
    """Build the dependencies of a schedule and their topological order."""
    inputs = OpInputs(schedule)
    graph, pending = _unordered_graph(schedule, inputs)
    # The kernel counts `pending` down.
    work = ITERATIONS_PER_OP * len(inputs.ops)
    run(order_ops, work, graph, pending.copy(), graph.order, on_lists=True)
    column, numbers = inputs.index.column, inputs.index.numbers
    slicing = schedule.slicing
    if slicing is not None:
        # `numbers` are those of slices until here.
        column = np.array(slicing.micro_batch_of)[column]
        numbers = np.arange(len(slicing.shares))
    return Dependencies(
        name=schedule.name,
        ops=inputs.ops,
        graph=graph,
        pending=pending,
        links=inputs.links,
        source=inputs.source,
        consumer=inputs.consumer,
        pairs=inputs.pairs,
        column=column,
        numbers=numbers,
        micro_batches=schedule.micro_batches,
    )


def _unordered_graph(schedule: Schedule, inputs: OpInputs) -> tuple[OpGraph, Array]:
    """Return the graph before its `order` is computed, and `Dependencies.pending`."""
    leader, next_in_group = _groups(schedule, inputs)
    graph = OpGraph(
        rank=inputs.ops.rank,
        first_input=inputs.first,
        second_input=inputs.second,
        first_consumer=_consumers(inputs.first),
        second_consumer=_consumers(inputs.second),
        after=_next_of_rank(inputs),
        leader=leader,
        next_in_group=next_in_group,
        link=inputs.link,
        next_replica=np.zeros(0, np.int32),
        order=no_ops(len(inputs.ops)),
    )
    pending = _predecessor_counts(graph)
    graph = _with_waves(graph, pending, schedule, inputs)
    # A group starts when no member waits any more: its leader counts for all.
    followers = np.flatnonzero(leader != np.arange(len(leader)))
    # `pending[...] +=` would count only one of the followers of a leader.
    np.add.at(pending, leader[followers], pending[followers])
    return graph, pending


def _groups(schedule: Schedule, inputs: OpInputs) -> tuple[Array, Array]:
    """Return per op the leader of its group (ops that start together), and the next member."""
    count, pairs = len(inputs.ops), inputs.pairs
    leader, next_in_group = np.arange(count, dtype=np.int32), no_ops(count)
    leader[pairs + 1] = pairs
    next_in_group[pairs] = pairs + 1
    for update, replicas in _replicas_of_updates(inputs, least=2).items():
        if awaited_update(update, schedule.stream) == update:
            leader[replicas] = replicas[0]
            next_in_group[replicas[:-1]] = replicas[1:]
    return leader, next_in_group


def _consumers(inputs: Array) -> Array:
    """Return the consumer of every op, given every consumer's input."""
    consumer = no_ops(len(inputs))
    rows = np.flatnonzero(inputs >= 0)
    consumer[inputs[rows]] = rows
    return consumer


def _next_of_rank(inputs: OpInputs) -> Array:
    """Return per op the next op of its rank; for both ops of a pair, the one after the pair."""
    first = inputs.ops.first
    after = np.arange(1, len(inputs.ops) + 1, dtype=np.int32)
    has_ops = np.diff(first) > 0
    last_of_rank = first[1:][has_ops] - 1
    after[last_of_rank] = -1
    after[inputs.pairs] = after[inputs.pairs + 1]
    return after


def _predecessor_counts(graph: OpGraph) -> Array:
    """Return per op how many ops it waits for: its inputs, and those before it on its rank."""
    has_first, has_second = graph.first_input >= 0, graph.second_input >= 0
    counts: Array = has_first.astype(np.int32) + has_second
    earlier = np.bincount(graph.after[graph.after >= 0], minlength=len(counts))
    counts += earlier.astype(np.int32)
    return counts


def _with_waves(graph: OpGraph, pending: Array, schedule: Schedule, inputs: OpInputs) -> OpGraph:
    """Return the graph in which the last U of a wave waits for that of an earlier wave on all ranks.

    It waits for the first replica of the earlier U, from which a chain leads to the others. The
    replica on its own rank precedes it anyway; waiting for all lets the ranks share one chain.

    Args:
        graph: without waves; its inputs and consumers are changed.
        pending: per op, the number of ops that it waits for; changed.
        schedule: the schedule.
        inputs: of its ops.
    """
    stream = schedule.stream
    if stream is None or stream.waves is None or stream.waves.distance == 0:
        return graph
    updates = _replicas_of_updates(inputs, least=1)
    next_replica = no_ops(len(inputs.ops))
    for replicas in updates.values():
        next_replica[replicas[:-1]] = replicas[1:]
    for update, replicas in updates.items():
        awaited = awaited_update(update, stream)
        if awaited in updates:
            graph.first_input[replicas] = updates[awaited][0]
            graph.first_consumer[updates[awaited]] = replicas[0]
            pending[replicas] += len(updates[awaited])
    return graph._replace(next_replica=next_replica)


def _replicas_of_updates(inputs: OpInputs, least: int) -> dict[Op, Array]:
    """Return the rows, by rank, of every U with at least this many replicas."""
    ops, rows = inputs.ops, inputs.index.kinds[Kind.U]
    stage, version, rank = ops.stage[rows], ops.micro_batch[rows], ops.rank[rows]
    # Sorted by stage, then version (the last key of lexsort comes first), then rank: lexsort is
    # stable, and the rows are in the order of the ranks.
    order = np.lexsort((version, stage))
    rows, stage, version, rank = rows[order], stage[order], version[order], rank[order]
    starts = np.union1d(runs(stage), runs(version))
    # A rank that runs one U twice, which verify refuses, takes part in the group once.
    once = np.union1d(starts, runs(rank))
    rows = rows[once]
    starts = np.searchsorted(once, starts)
    ends = np.append(starts[1:], len(rows))[: len(starts)]
    enough = ends - starts >= least
    return {
        ops.op(rows[low]): rows[low:high]
        for low, high in zip(starts[enough], ends[enough], strict=True)
    }


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

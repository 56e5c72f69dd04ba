"""Simulate one schedule for many cost vectors at once, for planners that try thousands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from penstock.compiled import compiled, is_worth_compiling
from penstock.deprecation import current_names
from penstock.errors import SettingError
from penstock.schedule.arrays import Array, runs
from penstock.schedule.dependencies import acyclic_dependencies_of
from penstock.schedule.kernels import (
    ITERATIONS_PER_OP,
    Durations,
    OpGraph,
    RankSpans,
    Times,
    time_vectors,
)
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Schedule
from penstock.schedule.op_inputs import number_keys
from penstock.schedule.recompute import Recompute
from penstock.simulate.cost_arrays import Amounts
from penstock.simulate.costs import FIELDS, RENAMED, Costs
from penstock.simulate.lookup import Tables
from penstock.simulate.memory_curves import Memory, peaks_in_order
from penstock.simulate.network import Network
from penstock.simulate.simulate import times_of
from penstock.simulate.weight_versions import with_stream_memory

#: Vectors per chunk, least and most, and the numbers that a chunk may store (512 MiB). Wide chunks
#: are fast: with 64 vectors 1F1B 64 x 256 took 0.4 times as long per vector as with 8.
_CHUNK_VECTORS = (4, 64)
_CHUNK_NUMBERS = 2**26

#: Fields of costs on which peaks of memory without boundary buffers depend.
_MEMORY_FIELDS = (
    "activation_bytes",
    "activation_bytes_after_input_grad",
    "input_bytes",
    "saved_bytes",
    "recompute_peak_bytes",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "weight_versions",
)


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Results of `simulate_many`, as arrays whose first axis is the cost vectors.

    Attributes:
        makespan: seconds, (vectors).
        busy: seconds of work per rank, (vectors, ranks).
        span_bubble_ratio: (vectors), see `Timeline`.
        parts: positions of vectors and their batch, from which `peak_memory` is computed on demand.
    """

    makespan: Array
    busy: Array
    span_bubble_ratio: Array
    parts: tuple[tuple[Array, _Batch], ...]

    @cached_property
    def bubble_ratio(self) -> Array:
        """Idle time of all ranks / (ranks x makespan), (vectors)."""
        return _idle_ratio(self.busy.sum(axis=1), self.makespan, self.busy.shape[1])

    @cached_property
    def peak_memory(self) -> Array | None:
        """Peak bytes per rank, (vectors, ranks), or None if a vector contains no bytes.

        It takes longer than the rest if memory differs between vectors.
        """
        peaks = np.zeros(self.busy.shape, np.int64)
        for positions, batch in self.parts:
            if not batch.has_bytes:
                return None
            peaks[positions] = batch.peak_memory()
        return peaks


def simulate_many(
    schedule: Schedule,
    costs: Sequence[Costs] | Mapping[str, ArrayLike | str | bool],
    *,
    overlap: bool = True,
    recompute: str = Recompute.NEVER,
) -> Outcomes:
    """Simulate a schedule for many cost vectors at once.

    >>> from penstock.schedule.op import Schedule
    >>> simulate_many(Schedule.parse("0F0 0B0 0U1"), {"forward": [1, 2, 3], "update": 0.5}).makespan
    array([3.5, 6.5, 9.5])

    Args:
        schedule: a valid schedule.
        costs: a sequence of Costs; or a mapping from names of their fields to arrays of shape
            (vectors), (vectors, stages or boundaries) or (vectors, stages or boundaries,
            micro-batches), or to single numbers for all. Other fields have their defaults.
        overlap, recompute: as in `simulate_schedule`.

    Raises:
        SettingError: there are no costs, or they do not fit the schedule.
        ScheduleError: the schedule is not valid.
    """
    parts = tuple(_batches(schedule, costs, _Mode(overlap, Recompute.parse(recompute))))
    count = sum(len(positions) for positions, _ in parts)
    makespan, span_bubble_ratio = np.zeros(count), np.zeros(count)
    busy = np.zeros((count, acyclic_dependencies_of(schedule).ranks))
    for positions, batch in parts:
        figures = batch.figures()
        makespan[positions], busy[positions], span_bubble_ratio[positions] = figures
    return Outcomes(makespan, busy, span_bubble_ratio, parts)


def _batches(
    schedule: Schedule, costs: Sequence[Costs] | Mapping[str, ArrayLike | str | bool], mode: _Mode
) -> Iterator[tuple[Array, _Batch]]:
    """Yield the positions and the batch of all vectors that give the same fields."""
    dependencies = acyclic_dependencies_of(schedule)
    stages, numbers = dependencies.stages, dependencies.numbers.tolist()
    if isinstance(costs, Mapping):
        fields = current_names(costs, RENAMED, stacklevel=1)
        links = str(fields.pop("links", "duplex"))
        buffers = bool(fields.pop("boundary_buffers", True))
        network = cast("Network | None", fields.pop("network", None))
        Costs(links=links, network=network)  # refuses links that contradict each other
        amounts = with_stream_memory(Amounts.batched(fields, stages, numbers), schedule)
        tables = Tables(dependencies, amounts, mode.recompute)
        yield np.arange(amounts.vectors), _Batch(tables, mode, links, network, buffers)
        return
    # Tables are built once for all vectors that have the same fields.
    positions_of: dict[tuple[object, ...], list[int]] = {}
    for position, vector in enumerate(costs):
        missing = [getattr(vector, name) is None for name in FIELDS]
        form = (
            vector.links,
            vector.network,
            vector.boundary_buffers,
            vector.bytes_of_ranks,
            *missing,
        )
        positions_of.setdefault(form, []).append(position)
    if not positions_of:
        raise SettingError("simulate_many needs at least one Costs")
    for positions in positions_of.values():
        vectors = [costs[position] for position in positions]
        amounts = with_stream_memory(Amounts.of(vectors, stages, numbers), schedule)
        first = vectors[0]
        tables = Tables(dependencies, amounts, mode.recompute, first.bytes_of_ranks)
        batch = _Batch(tables, mode, first.links, first.network, first.boundary_buffers)
        yield np.array(positions), batch


@dataclass(frozen=True)
class _Mode:
    """Options of the simulation that all vectors share; see `simulate_schedule`."""

    overlap: bool
    recompute: Recompute


@dataclass(frozen=True, eq=False)
class _Batch:
    """Cost vectors that give the same fields."""

    tables: Tables
    mode: _Mode
    links: str
    network: Network | None
    buffers: bool

    @property
    def has_bytes(self) -> bool:
        """Whether the costs contain bytes."""
        return bool({"activation_bytes", "weight_bytes"} & self.tables.amounts.arrays.keys())

    def figures(self) -> tuple[Array, Array, Array]:
        """Return makespan, busy seconds and span bubble ratio."""
        dependencies, amounts = self.tables.dependencies, self.tables.amounts
        table = self.tables.seconds
        seconds = np.broadcast_to(table, (amounts.vectors, table.shape[1]))
        work = ITERATIONS_PER_OP * len(dependencies.ops) * amounts.vectors
        has_plain_links = self.links == "duplex" and self.network is None
        if work and has_plain_links and is_worth_compiling(time_vectors, work):
            # Compiled now, since the work of a single chunk may be too short for that.
            compiled(time_vectors)
            makespan, span = self._in_chunks(seconds)
        else:
            makespan, span = self._one_by_one(seconds)
        is_compute = ~dependencies.ops.of_kind(Kind.U, *ACTIVATION_MOVES)
        busy = self._busy(seconds, np.ones(len(dependencies.ops), bool))
        compute = self._busy(seconds, is_compute)
        return makespan, busy, _idle_ratio(compute.sum(axis=1), span, dependencies.ranks)

    def peak_memory(self) -> Array:
        """Return the peak bytes, (vectors, ranks)."""
        tables, amounts = self.tables, self.tables.amounts
        ranks = tables.dependencies.ranks
        # Buffers, and activations on their way to a partner, are held until they have arrived.
        moves = tables.dependencies.ops.of_kind(*ACTIVATION_MOVES).any()
        depends_on_times = moves or (self.buffers and "boundary_bytes" in amounts.arrays)
        arrays = [amounts.arrays[name] for name in _MEMORY_FIELDS if name in amounts.arrays]
        same = all(len(array) == 1 or (array == array[0]).all() for array in arrays)
        if same and not depends_on_times:
            return np.broadcast_to(peaks_in_order(tables), (amounts.vectors, ranks))
        rows = []
        for number in range(amounts.vectors):
            vector = replace(tables, amounts=amounts.vector(number))
            rows.append(self._timed_peaks(vector) if depends_on_times else peaks_in_order(vector))
        return np.array(rows, np.int64).reshape(amounts.vectors, ranks)

    def _timed_peaks(self, tables: Tables) -> tuple[int, ...]:
        """Return the peak bytes of every rank, including buffers, for one vector."""
        times = times_of(tables, tables.seconds[0], self.mode.overlap, self.links, self.network)
        return tuple(curve.peak for curve in Memory(tables, times, self.buffers).curves)

    def _one_by_one(self, seconds: Array) -> tuple[Array, Array]:
        """Return the makespan and the longest span of a rank, vector by vector."""
        first, last = self._ends()
        makespan, span = np.zeros(len(seconds)), np.zeros(len(seconds))
        for number, row in enumerate(seconds):
            times: Times = times_of(self.tables, row, self.mode.overlap, self.links, self.network)
            makespan[number] = times.end.max(initial=0.0)
            span[number] = (times.end[last] - times.start[first]).max(initial=0.0)
        return makespan, span

    def _in_chunks(self, seconds: Array) -> tuple[Array, Array]:
        """Return the makespan and the longest span of a rank, many vectors at once."""
        dependencies = self.tables.dependencies
        count, ops, ranks = len(seconds), len(dependencies.ops), dependencies.ranks
        first, last = self._ends()
        mark = np.zeros(ops, np.uint8)
        # Bit 0: the span of the op's rank begins here; bit 1: it ends here.
        mark[first] += 1
        mark[last] += 2
        order = dependencies.graph.order
        graph, mark = _sorted_by_order(dependencies.graph), mark[order]
        op_entry, message_entry = self.tables.op_entry[order], self.tables.message_entry[order]
        least, most = _CHUNK_VECTORS
        width = min(max(_CHUNK_NUMBERS // max(ops, 1), least), most)
        arrived = np.zeros((ops, width))
        makespan, span = np.zeros(count), np.zeros(count)
        for low in range(0, count, width):
            # The last chunk is filled up by repeating its last vector.
            chunk = np.arange(low, low + width).clip(max=count - 1)
            # Transposed, because the kernel's inner loop runs over vectors: they must lie side by
            # side.
            table = np.ascontiguousarray(seconds[chunk].T)
            starts_of_span, ends_of_span = np.zeros((ranks, width)), np.zeros((ranks, width))
            spans = RankSpans(mark, np.zeros(width), starts_of_span, ends_of_span)
            durations = Durations(op_entry, message_entry, table, self.mode.overlap)
            rank_free = np.zeros((ranks + 1, width))
            link_free = np.zeros((len(dependencies.links), width))
            arguments = (graph, durations, rank_free, link_free, arrived, spans)
            dependencies.walk(time_vectors, *arguments, vectors=width)
            makespan[chunk] = spans.makespan
            span[chunk] = (spans.last - spans.first).max(axis=0, initial=0.0)
        return makespan, span

    def _ends(self) -> tuple[Array, Array]:
        """Return, per rank that computes, the ops with which its span begins and ends."""
        ops = self.tables.dependencies.ops
        rows = np.flatnonzero(~ops.of_kind(Kind.U, *ACTIVATION_MOVES))
        starts = runs(ops.rank[rows])
        return rows[starts], rows[np.append(starts[1:], len(rows)) - 1] if len(rows) else rows

    def _busy(self, seconds: Array, counted: Array) -> Array:
        """Return the seconds of the counted ops, (vectors, ranks); a pair counts once."""
        dependencies = self.tables.dependencies
        counted = counted.copy()
        counted[dependencies.pairs + 1] = False
        rows = np.flatnonzero(counted)
        width = seconds.shape[1]
        keys = dependencies.ops.rank[rows].astype(np.int64) * width + self.tables.op_entry[rows]
        repeats: Array | int = 1
        if not self.tables.detailed:
            # Ops of one stage and kind share an entry: multiply by their number instead of adding.
            keys, number = number_keys(keys, dependencies.ranks * width)
            repeats = np.bincount(number, minlength=len(keys))
        busy = np.zeros((len(seconds), dependencies.ranks))
        starts = runs(keys // max(width, 1))
        if len(starts):
            entry_seconds = seconds[:, keys % width] * repeats
            busy[:, keys[starts] // width] = np.add.reduceat(entry_seconds, starts, axis=1)
        return busy


def _sorted_by_order(graph: OpGraph) -> OpGraph:
    """Return the graph with the ops renumbered in the order in which they are processed.

    With many vectors an op's row is long; processing rows in sequence keeps them in the cache.
    """
    order = graph.order
    position = np.empty_like(order)
    position[order] = np.arange(len(position))

    def renumber(ops: Array) -> Array:
        """Return an array of ops, in the new order and with new numbers."""
        ops = ops[order]
        return np.where(ops >= 0, position[ops], -1).astype(np.int32)

    return graph._replace(
        rank=graph.rank[order],
        first_input=renumber(graph.first_input),
        second_input=renumber(graph.second_input),
        next_in_group=renumber(graph.next_in_group),
        link=graph.link[order],
        next_replica=renumber(graph.next_replica)
        if len(graph.next_replica)
        else graph.next_replica,
        order=np.arange(len(position), dtype=np.int32),
    )


def _idle_ratio(busy: Array, span: Array, ranks: int) -> Array:
    """Return the idle share of ranks x span, 0 if the span is 0."""
    whole = ranks * span
    ratio = 1.0 - busy / np.where(whole > 0, whole, 1.0)
    return np.where(whole > 0, np.maximum(ratio, 0.0), 0.0)

"""Many cost vectors for one schedule at once: what planners need, who try thousands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from penstock.errors import SettingError
from penstock.schedule.arrays import Array, runs
from penstock.schedule.op import HANDING, Kind, Schedule
from penstock.simulate.amounts import Amounts
from penstock.simulate.costs import FIELDS, LINKS, Costs
from penstock.simulate.engine import WORTH_LOADING, load_compiled
from penstock.simulate.kernels import Price, Sums, Times, Waits
from penstock.simulate.memory import Memory, peaks_in_order
from penstock.simulate.simulate import times_of
from penstock.simulate.structure import numbered, structure
from penstock.simulate.tables import Tables, recomputes
from penstock.simulate.versions import weighed

#: Lanes of a chunk, least and most, and the numbers that it may keep (512 MiB). Wide is fast: with
#: 64 lanes 1F1B 64 x 256 took
#: 0.4 times as long per vector as with 8.
_LANES = (4, 64)
_KEPT = 2**26


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What `simulate` would say for each cost vector, as arrays whose first axis is the vectors.

    Attributes:
        makespan: seconds, (vectors).
        busy: seconds of work per rank, (vectors, ranks).
        span_bubble_ratio: (vectors), see `Timeline`.
        parts: the vectors' places and their tables, for those who need more.
    """

    makespan: Array
    busy: Array
    span_bubble_ratio: Array
    parts: tuple[tuple[Array, _Batch], ...]

    @cached_property
    def bubble_ratio(self) -> Array:
        """Idle time of all ranks / (ranks x makespan), (vectors)."""
        return _idle(self.busy.sum(axis=1), self.makespan, self.busy.shape[1])

    @cached_property
    def peak_memory(self) -> Array | None:
        """Bytes per rank, (vectors, ranks), or None where some vector has none. Costs more than the
        rest, where it differs.
        """
        found = np.zeros(self.busy.shape, np.int64)
        for places, batch in self.parts:
            if not batch.weighs:
                return None
            found[places] = batch.peak_memory()
        return found


def simulate_many(
    schedule: Schedule,
    costs: Sequence[Costs] | Mapping[str, ArrayLike | str | bool],
    *,
    overlap: bool = True,
    recompute: str = "never",
) -> Outcomes:
    """Simulate a schedule for many costs at once.

    >>> from penstock.schedule.op import Schedule
    >>> simulate_many(Schedule.parse("0F0 0B0 0U1"), {"forward": [1, 2, 3], "update": 0.5}).makespan
    array([3.5, 6.5, 9.5])

    Args:
        schedule: a sound schedule.
        costs: a sequence of Costs; or a mapping of their fields' names to arrays of shape
        (vectors), (vectors, stages or
            boundaries) or (vectors, stages or boundaries, micro-batches), or to single numbers for
            all. Fields that are not given have their defaults.
        overlap, recompute: as for `simulate_schedule`.

    Raises:
        SettingError: there are no costs, or they do not fit the schedule.
        ScheduleError: the schedule is not sound.
    """
    recomputes(recompute, 0, 1)
    made = structure(schedule)
    parts = tuple(_batches(schedule, costs, _Way(overlap, recompute)))
    count = sum(len(places) for places, _ in parts)
    makespan, span, busy = np.zeros(count), np.zeros(count), np.zeros((count, made.ranks))
    for places, batch in parts:
        makespan[places], busy[places], span[places] = batch.figures()
    return Outcomes(makespan, busy, span, parts)


def _batches(
    schedule: Schedule, costs: Sequence[Costs] | Mapping[str, ArrayLike | str | bool], way: _Way
) -> Iterator[tuple[Array, _Batch]]:
    """The vectors, together where they give the same fields."""
    made = structure(schedule)
    numbers = made.numbers.tolist()
    if isinstance(costs, Mapping):
        links, buffers = (
            str(costs.get("links", "duplex")),
            bool(costs.get("boundary_buffers", True)),
        )
        if links not in LINKS:
            raise SettingError(f"costs: links are one of {', '.join(LINKS)}, not {links!r}")
        given = {
            name: value
            for name, value in costs.items()
            if name not in ("links", "boundary_buffers")
        }
        amounts = weighed(Amounts.batched(given, made.stages, numbers), schedule)
        yield (
            np.arange(amounts.vectors),
            _Batch(Tables(made, amounts, way.recompute), way, links, buffers),
        )
        return
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, each in enumerate(costs):
        form = (
            each.links,
            each.boundary_buffers,
            *(getattr(each, name) is None for name in FIELDS),
        )
        alike.setdefault(form, []).append(place)
    if not alike:
        raise SettingError("simulate_many needs at least one Costs")
    for places in alike.values():
        one = costs[places[0]]
        amounts = weighed(
            Amounts.of([costs[place] for place in places], made.stages, numbers), schedule
        )
        yield (
            np.array(places),
            _Batch(Tables(made, amounts, way.recompute), way, one.links, one.boundary_buffers),
        )


@dataclass(frozen=True)
class _Way:
    """How all of them are simulated."""

    overlap: bool
    recompute: str


@dataclass(frozen=True, eq=False)
class _Batch:
    """Vectors that give the same fields."""

    tables: Tables
    way: _Way
    links: str
    buffers: bool

    @property
    def weighs(self) -> bool:
        """Whether there are bytes."""
        return bool({"activation_bytes", "weight_bytes"} & self.tables.amounts.given.keys())

    def figures(self) -> tuple[Array, Array, Array]:
        """Makespan, busy seconds and span bubble ratio."""
        made, amounts = self.tables.made, self.tables.amounts
        seconds = np.broadcast_to(
            self.tables.seconds, (amounts.vectors, self.tables.seconds.shape[1])
        )
        fast = (
            self.links == "duplex"
            and len(made.ops) * amounts.vectors >= WORTH_LOADING
            and load_compiled() is not None
        )
        makespan, span = self._in_lanes(seconds) if fast else self._one_by_one(seconds)
        compute = ~made.ops.of_kind(Kind.U, *HANDING)
        busy, spent = (
            self._busy(seconds, np.ones(len(made.ops), bool)),
            self._busy(seconds, compute),
        )
        return makespan, busy, _idle(spent.sum(axis=1), span, made.ranks)

    def peak_memory(self) -> Array:
        """Bytes, (vectors, ranks)."""
        tables, amounts = self.tables, self.tables.amounts
        timed = self.buffers and "boundary_bytes" in amounts.given
        by_bytes = [
            array
            for name, array in amounts.given.items()
            if name.endswith(("bytes", "_grad", "versions"))
        ]
        if not timed and all(len(array) == 1 or (array == array[0]).all() for array in by_bytes):
            return np.broadcast_to(peaks_in_order(tables), (amounts.vectors, tables.made.ranks))
        rows = []
        for number in range(amounts.vectors):
            one = Tables(tables.made, amounts.vector(number), tables.recompute)
            if timed:
                memory = Memory(one, times_of(one, one.seconds[0], self.way.overlap, self.links))
                rows.append(tuple(curve.peak for curve in memory.curves))
            else:
                rows.append(peaks_in_order(one))
        return np.array(rows, np.int64).reshape(amounts.vectors, tables.made.ranks)

    def _one_by_one(self, seconds: Array) -> tuple[Array, Array]:
        """Makespan and longest span of a rank, vector by vector."""
        first, last = self._ends()
        makespan, span = np.zeros(len(seconds)), np.zeros(len(seconds))
        for number, row in enumerate(seconds):
            times: Times = times_of(self.tables, row, self.way.overlap, self.links)
            makespan[number] = times.end.max(initial=0.0)
            span[number] = (times.end[last] - times.start[first]).max(initial=0.0)
        return makespan, span

    def _in_lanes(self, seconds: Array) -> tuple[Array, Array]:
        """The same, many vectors side by side."""
        made = self.tables.made
        count, ops, ranks = len(seconds), len(made.ops), made.ranks
        first, last = self._ends()
        mark = np.zeros(ops, np.uint8)
        mark[first] += 1
        mark[last] += 2
        order = made.waits.order
        waits, mark = _in_order(made.waits), mark[order]
        work, hop = self.tables.work[order], self.tables.hop[order]
        width = min(max(_KEPT // ops, _LANES[0]), _LANES[1])
        arrived = np.zeros((ops, width))
        makespan, span = np.zeros(count), np.zeros(count)
        for low in range(0, count, width):
            some = np.arange(low, low + width).clip(
                max=count - 1
            )  # the last chunk runs its last vector more than once
            table = np.ascontiguousarray(seconds[some].T)
            sums = Sums(mark, np.zeros(width), np.zeros((ranks, width)), np.zeros((ranks, width)))
            price = Price(work, hop, table, self.way.overlap)
            made.walk(
                "lanes",
                waits,
                price,
                np.zeros((ranks + 1, width)),
                np.zeros((len(made.links), width)),
                arrived,
                sums,
                times=width,
            )
            makespan[some] = sums.makespan
            span[some] = (sums.last - sums.first).max(axis=0, initial=0.0)
        return makespan, span

    def _ends(self) -> tuple[Array, Array]:
        """Per rank that computes, the ops with which its span begins and ends."""
        ops = self.tables.made.ops
        rows = np.flatnonzero(~ops.of_kind(Kind.U, *HANDING))
        starts = runs(ops.rank[rows])
        return rows[starts], rows[np.append(starts[1:], len(rows)) - 1] if len(rows) else rows

    def _busy(self, seconds: Array, counted: Array) -> Array:
        """Seconds of the counted ops, (vectors, ranks); those of a pair once."""
        made = self.tables.made
        counted = counted.copy()
        counted[made.pairs + 1] = False
        rows = np.flatnonzero(counted)
        width = seconds.shape[1]
        keys = made.ops.rank[rows].astype(np.int64) * width + self.tables.work[rows]
        found, number = (keys, None) if self.tables.detailed else numbered(keys, made.ranks * width)
        times = 1 if number is None else np.bincount(number, minlength=len(found))
        busy = np.zeros((len(seconds), made.ranks))
        starts = runs(found // max(width, 1))
        if len(starts):
            busy[:, found[starts] // width] = np.add.reduceat(
                seconds[:, found % width] * times, starts, axis=1
            )
        return busy


def _in_order(waits: Waits) -> Waits:
    """The same with the ops in the order in which they are walked: lanes are wide, and what lies
    apart is not in the cache.
    """
    place = np.empty_like(waits.order)
    place[waits.order] = np.arange(len(place))

    def moved(others: Array) -> Array:
        others = others[waits.order]
        return np.where(others >= 0, place[others], -1).astype(np.int32)

    takes, also_takes, following = map(moved, (waits.takes, waits.also_takes, waits.following))
    beside = moved(waits.beside) if len(waits.beside) else waits.beside
    return waits._replace(
        rank=waits.rank[waits.order],
        takes=takes,
        also_takes=also_takes,
        following=following,
        link=waits.link[waits.order],
        beside=beside,
        order=np.arange(len(place), dtype=np.int32),
    )


def _idle(work: Array, longest: Array, ranks: int) -> Array:
    """The share of ranks x longest in which nobody works."""
    whole = ranks * longest
    return np.where(whole > 0, np.maximum(1.0 - work / np.where(whole > 0, whole, 1.0), 0.0), 0.0)

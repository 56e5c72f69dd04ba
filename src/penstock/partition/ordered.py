"""The cut for ranks of a few kinds, and the order of the kinds along the chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError
from penstock.partition.bottleneck import ROUNDING
from penstock.partition.checks import Costs, Floats, check_costs, numbers_of, rows_of, sums_of
from penstock.partition.compiled import run
from penstock.partition.kind_loops import reach, reach_furthest
from penstock.partition.limited import limited

Ints = npt.NDArray[np.int64]

#: Up to so many pairs of (ranks of each kind so far, layer) all are looked at. Beyond, up to so
#: many numbers of ranks of each
#: kind, of each the furthest layer; and beyond that, per stage, so many of them.
PAIRS, STATES, WIDTH = 20_000_000, 40_000_000, 300


class OrderOptions(TypedDict, total=False):
    """What `best_order` takes besides seconds, counts and stages.

    transfer: shape (layers - 1,): seconds of the cut after a layer, the same between any ranks;
    none if not given. holds, kept: bytes that a layer takes, and that it keeps for a micro-batch in
    flight, shape (layers,) or (kinds, layers). in_flight: micro-batches that each stage has in
    flight at most, shape (stages,); 1 if not given. limits_of_kind: bytes of a rank, shape
    (kinds,); infinite if not given.
    """

    transfer: Sequence[float] | Floats | None
    holds: Costs | None
    kept: Costs | None
    in_flight: Sequence[float] | None
    limits_of_kind: Sequence[float] | None


class Order(NamedTuple):
    """The lengths of the stages, and of each the kind of its rank."""

    lengths: list[int]
    kinds: list[int]


def best_order(
    seconds_of_kind: Costs, counts: Sequence[int], stages: int, **options: Unpack[OrderOptions]
) -> Order | None:
    """The cut, and the order of ranks of unlike kinds, whose slowest stage or link is fastest.

    For the order that is found, the cut is that of `limited`. Not all ranks need to be used, but
    `stages` of them.

    >>> best_order([[1, 1, 1, 1, 1], [3, 3, 3, 3, 3]], counts=[1, 2], stages=2)
    Order(lengths=[4, 1], kinds=[0, 1])
    >>> best_order([[1, 1, 1, 1]] * 2, [1, 1], 2, kept=[2, 2, 2, 2], in_flight=[2, 1], limits_of_kind=[6, 9])
    Order(lengths=[2, 2], kinds=[1, 0])

    Args:
        seconds_of_kind: shape (kinds, layers): what a layer takes for a micro-batch on a rank of
        that kind. counts: how many ranks of each kind there are, shape (kinds,). stages: how many
        stages to make. options: see `OrderOptions`.

    Returns:
        Lengths and kinds, None if none was found that fits.

    Raises:
        PartitionError: more stages than ranks or layers, or numbers that do not fit each other.

    Source: our own. A search over bounds, which are what some stage or cut can take. Of a bound,
    and of every number of ranks of each kind, the layers that those ranks can end before, whatever
    their order: exact, with as many states as those numbers have combinations, times the layers, up
    to 20 million. Beyond that the furthest layer stands for all: a longer beginning is never worse,
    unless a stage is left with a single layer that is too much for its rank, and only then can the
    result be above the least. Beyond 40 million combinations, per stage the 300 that get furthest
    go on: a beam, without a bound for what it misses. On one shared core 100 layers on 1,024 ranks
    of 4 kinds take 0.05 s in up to 32 stages, 0.7 s in 64 and 1.2 s in 100.
    """
    chain = _chain(seconds_of_kind, counts, stages, options)
    bounds = chain.bounds()
    kinds = chain.order(float(bounds[-1]))
    if kinds is None:
        return None
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        found = chain.order(float(bounds[middle]))
        low, high, kinds = (middle + 1, high, kinds) if found is None else (low, middle, found)
    lengths = chain.cut(kinds)
    assert lengths is not None
    return Order(lengths, kinds)


@dataclass(frozen=True)
class _Chain:
    """Prefix sums of seconds, shape (kinds, layers + 1), and what a rank of a kind fits as a stage,
    and how many there are.
    """

    seconds: Floats
    counts: Ints
    links: Floats
    holds: Floats
    kept: Floats
    in_flight: Floats
    limits: Floats

    @property
    def layers(self) -> int:
        return int(self.seconds.shape[1]) - 1

    @property
    def stages(self) -> int:
        return len(self.in_flight)

    @cached_property
    def fitting(self) -> Ints:
        """Shape (kinds, stages, layers + 1): how far a rank of a kind, as that stage, can go from a
        layer by its memory.
        """
        far = np.empty((len(self.counts), self.stages, self.layers + 1), np.int64)
        for kind, limit in enumerate(self.limits):
            for stage, flying in enumerate(self.in_flight):
                need = np.concatenate(
                    ([0.0], np.cumsum(self.holds[kind] + flying * self.kept[kind]))
                )
                far[kind, stage] = np.searchsorted(need, need + limit, side="right") - 1
        return far

    def bounds(self) -> Floats:
        """All that a stage or cut can take."""
        first, end = np.triu_indices(self.layers + 1, 1)
        return np.unique(
            np.concatenate(((self.seconds[:, end] - self.seconds[:, first]).ravel(), self.links))
        )

    def order(self, bound: float) -> list[int] | None:
        """The kinds of the stages of some cut within the bound; None if none was found."""
        top = bound * (1 + ROUNDING)
        quick = np.stack(
            [np.searchsorted(row, row + top, side="right") - 1 for row in self.seconds]
        )
        far = np.minimum(self.fitting, quick[:, None])
        free = (self.links <= top).astype(np.int64)
        states = int(np.prod(self.counts + 1.0))
        if states * (self.layers + 1) <= PAIRS:
            return self._all(far, free, states)
        layer = np.arange(self.layers + 1)
        # The last allowed cut no further than the furthest layer, and one layer left for every
        # stage to come.
        nearest = np.maximum.accumulate(np.where(free == 1, layer, 0))
        most = self.layers - np.arange(self.stages - 1, -1, -1)
        far = nearest[np.minimum(far, most[:, None])]
        far[far <= layer] = -1
        return self._furthest(far, states) if states <= STATES else self._beam(far)

    def _all(self, far: Ints, free: Ints, states: int) -> list[int] | None:
        reached = np.zeros((states, self.layers + 1), np.int8)
        state = run(reach, 16 * states * self.layers, far, free, self.counts, reached)
        if state < 0:
            return None
        end, kinds = self.layers, []
        for stage in range(self.stages - 1, -1, -1):
            for kind, before in self._before(state):
                starts = np.flatnonzero(reached[before, :end] & (far[kind, stage, :end] >= end))
                if len(starts):
                    break
            kinds.append(kind)
            state, end = before, int(starts[-1])
        return kinds[::-1]

    def _furthest(self, far: Ints, states: int) -> list[int] | None:
        furthest = np.full(states, -1, np.int32)
        state = run(reach_furthest, 16 * states, far, self.counts, furthest)
        if state < 0:
            return None
        kinds = []
        for stage in range(self.stages - 1, -1, -1):
            ways = ((kind, before) for kind, before in self._before(state) if furthest[before] >= 0)
            kind, state = next(
                (kind, before)
                for kind, before in ways
                if far[kind, stage, furthest[before]] == furthest[state]
            )
            kinds.append(kind)
        return kinds[::-1]

    def _beam(self, far: Ints) -> list[int] | None:
        ways: dict[tuple[int, ...], tuple[int, list[int]]] = {(0,) * len(self.counts): (0, [])}
        for stage in range(self.stages):
            following: dict[tuple[int, ...], tuple[int, list[int]]] = {}
            for used, (at, kinds) in ways.items():
                for kind, count in enumerate(self.counts):
                    end = int(far[kind, stage, at])
                    key = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                    if used[kind] < count and end > following.get(key, (-1, []))[0]:
                        following[key] = (end, [*kinds, kind])
            ways = dict(sorted(following.items(), key=lambda item: -item[1][0])[:WIDTH])
        return next((kinds for at, kinds in ways.values() if at == self.layers), None)

    def _before(self, state: int) -> list[tuple[int, int]]:
        """The kinds that a state has ranks of, and the state with one rank of that kind less."""
        stride, found = 1, []
        for kind in range(len(self.counts) - 1, -1, -1):
            if state // stride % (self.counts[kind] + 1) > 0:
                found.append((kind, int(state - stride)))
            stride *= int(self.counts[kind]) + 1
        return found

    def cut(self, kinds: list[int]) -> list[int] | None:
        """The best cut for ranks of these kinds."""
        rows = np.diff(self.seconds, axis=1)[kinds]
        return limited(
            rows,
            self.links[1:-1],
            self.holds[kinds],
            self.kept[kinds],
            self.in_flight.tolist(),
            self.limits[kinds].tolist(),
        )


def _chain(seconds: Costs, counts: Sequence[int], stages: int, options: OrderOptions) -> _Chain:
    numbers = np.atleast_2d(numbers_of(seconds, "seconds_of_kind"))
    kinds, layers = numbers.shape
    there = np.asarray(counts)
    if there.shape != (kinds,) or there.dtype.kind not in "iu" or (there < 0).any():
        raise PartitionError(
            f"counts is {counts!r}; it must be one whole number of ranks for each of {kinds} kinds"
        )
    if not 1 <= stages <= min(layers, int(there.sum())):
        raise PartitionError(
            f"cannot make {stages} stages from {layers} layers on {int(there.sum())} ranks: every stage needs one of each"
        )
    transfer, flying, limits = (
        options.get("transfer"),
        options.get("in_flight"),
        options.get("limits_of_kind"),
    )
    links = np.zeros(layers + 1)
    if transfer is not None:
        links[1:-1] = check_costs(transfer, "transfer", layers - 1)
    in_flight = np.ones(stages) if flying is None else check_costs(flying, "in_flight", stages)
    allowed = np.full(kinds, np.inf) if limits is None else np.asarray(limits, dtype=np.float64)
    if allowed.shape != (kinds,) or np.isnan(allowed).any():
        raise PartitionError(
            f"limits_of_kind: {limits!r} must be one number of bytes for each of {kinds} kinds"
        )
    nothing = np.zeros(layers)
    named = (("holds", options.get("holds")), ("kept", options.get("kept")))
    holds, kept = (
        rows_of(numbers_of(nothing if each is None else each, name), name, kinds, layers)
        for name, each in named
    )
    rows = sums_of(rows_of(numbers, "seconds_of_kind", kinds, layers))
    return _Chain(
        rows, np.minimum(there, stages).astype(np.int64), links, holds, kept, in_flight, allowed
    )

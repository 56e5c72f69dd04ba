"""DAPPLE's search: cuts, copies of every stage, and the places of these, for the least latency of a
step.

    state         | the first layers are stages on certain devices; the rest is one stage on all
                  others
    one step on   | some layers of the rest become a stage of their own, on some of the others

A state is the number of layers and of devices used on each node; of all ways to it only some are
kept. The paper keeps one, and ranks them, as far as we know, by the latency with the rest as one
stage. That is often the slowest stage by far, so that ways which differ much look alike: straight
pipelines of eight stages came out half again as slow as they could be. So as many are kept again,
ranked by the latency with the rest spread evenly over the devices that are left.

Latency is no sum over stages, so that the best whole may have a part that is not kept: with `keep`
large enough the search is exact, and the tests say how near it comes with few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from penstock.search.planners.dapple_places import Network, Place, placements
from penstock.search.planners.layer_costs import LayerCosts, Numbers, before

#: Ways to a state that are kept of each ranking, unless the caller says otherwise.
KEEP = 1


@final
@dataclass(frozen=True)
class Task:
    """What is to be planned.

    Attributes:
        costs: by the number of copies k, from 1: of a k-th of a micro-batch's samples, but
        `output_bytes` of all of them in the first.
            As many entries as a stage may have copies.
        sizes: devices of every node.
        network: links.
        micro_batches: of a step.
        stages: how many; None leaves it free.
    """

    costs: Sequence[LayerCosts]
    sizes: tuple[int, ...]
    network: Network
    micro_batches: int
    stages: int | None = None


@final
@dataclass(frozen=True)
class Placed:
    """A pipeline: first layer, one past the last, and the place of every stage."""

    seconds: float
    stages: tuple[tuple[int, int, Place], ...]


@dataclass(frozen=True)
class _Move:
    """A stage on `place`, so that `used` is, and the rest on `rest`; with what `extend` takes of
    it.
    """

    place: Place
    used: Place
    sums: Numbers
    numbers: Numbers


@dataclass
class _Prefix:
    """Stages so far, up to layer `start`."""

    start: int
    used: Place
    stages: tuple[tuple[int, int, Place], ...]
    rows: list[tuple[float, float, float]]  # forward, backward, all-reduce; transfers too


@dataclass
class _Table:
    """The ways to use certain devices, by the layer that the rest starts with."""

    values: Numbers
    origins: Numbers = field(repr=False)


def search(task: Task, keep: int = KEEP) -> list[Placed]:
    """The pipeline with the least latency for every number of stages that the search came by; the
    best of all first.
    """
    return _Search(task, keep).run()


class _Search:
    def __init__(self, task: Task, keep: int) -> None:
        self.task, self.keep = task, keep
        self.layers = len(task.costs[0])
        self.most = len(task.costs)
        self.own = [
            np.stack([before(each.forward_s), before(each.backward_s)]) for each in task.costs
        ]
        work = np.min(
            [copies * np.asarray(each.seconds) for copies, each in enumerate(task.costs, 1)], axis=0
        )
        self.sums = np.stack(
            [
                np.concatenate(([0.0], task.costs[0].output_bytes)),
                before(task.costs[0].parameter_bytes),
                before(work),
            ]
        )
        self.prefixes: list[_Prefix] = []
        self.moves: list[_Move] = []
        self.moves_from: dict[Place, list[int]] = {}
        self.tables: dict[tuple[object, ...], _Table] = {}
        self.found: dict[
            int, tuple[float, int, int, int]
        ] = {}  # by stages: seconds, prefix, move, where the rest starts
        self.transfers: dict[tuple[Place, Place], tuple[float, float]] = {}
        self.known = np.inf

    def run(self) -> list[Placed]:
        """See `search`."""
        whole = self._whole()
        if whole is not None:
            self.known = whole.seconds
        nothing = tuple(0 for _ in self.task.sizes)
        self._expand(_Prefix(0, nothing, (), []))
        for start in range(1, self.layers):
            for table in list(self.tables.values()):
                slots = np.flatnonzero(np.isfinite(table.values[:, start]))
                for parent, move in dict.fromkeys(
                    map(tuple, table.origins[:, slots, start].T.astype(int).tolist())
                ):
                    self._expand(self._after(self.prefixes[parent], self.moves[move], start))
        found = [self._placed(*each) for each in self.found.values()]
        found += [] if whole is None else [whole]
        return sorted(found, key=lambda each: (each.seconds, len(each.stages)))

    def _whole(self) -> Placed | None:
        """All layers on all devices, or on as many as may have copies."""
        if self.task.stages not in (None, 1):
            return None
        place = self._rest(tuple(0 for _ in self.task.sizes))
        own, (latency, per_byte) = (
            self.own[sum(place) - 1][:, -1],
            self.task.network.all_reduce(place),
        )
        seconds = (
            self.task.micro_batches * float(own.sum())
            + latency
            + per_byte * float(self.sums[1, -1])
        )
        return Placed(seconds, ((0, self.layers, place),))

    def _rest(self, used: Place) -> Place:
        """The devices that are left, or as many as may have copies."""
        taken, left = [], self.most
        for size, count in zip(self.task.sizes, used, strict=True):
            taken.append(min(size - count, left))
            left -= taken[-1]
        return tuple(taken)

    def _expand(self, prefix: _Prefix) -> None:
        """One more stage behind the prefix, in all ways."""
        from penstock.search.planners_dapple.compiled import Numbered, extend

        depth = len(prefix.stages)
        if (self.task.stages is not None and depth + 2 > self.task.stages) or self._hopeless(
            prefix
        ):
            return
        number = len(self.prefixes)
        self.prefixes.append(prefix)
        rows = np.zeros((3, len(prefix.rows) + 4))
        rows[:, : len(prefix.rows)] = np.array(prefix.rows).T if prefix.rows else np.zeros((3, 0))
        last = prefix.stages[-1][2] if prefix.stages else None
        at, crossing = len(prefix.rows) + (last is not None), float(self.sums[0, prefix.start])
        counts = self.task.stages in (None, depth + 2)
        for move in self._moves(prefix.used):
            step = self.moves[move]
            table = self._table(step.used, depth + 1)
            numbers = step.numbers
            numbers[Numbered.KNOWN], numbers[Numbered.PREFIX] = self.known, number
            if last is not None:
                latency, per_byte = self._transfer(last, step.place)
                rows[:2, at - 1] = latency + per_byte * crossing
            best, where = extend(
                rows, at, prefix.start, step.sums, numbers, (table.values, table.origins)
            )
            if where >= 0 and counts:
                self.known = min(self.known, best)
                if best < self.found.get(depth + 2, (np.inf,))[0]:
                    self.found[depth + 2] = best, number, move, where

    def _hopeless(self, prefix: _Prefix) -> bool:
        """Whether no pipeline with these stages can be as good as what is known: none is faster
        than its first stage once and any stage, or an even share of the layers that are left, M - 1
        times.
        """
        if not prefix.rows:
            return False
        devices = sum(self.task.sizes) - sum(prefix.used)
        share = float(self.sums[2, -1] - self.sums[2, prefix.start]) / devices
        most = max(share, *(f + b for f, b, _ in prefix.rows))
        return (self.task.micro_batches - 1) * most + sum(prefix.rows[0][:2]) > self.known

    def _transfer(self, one: Place, other: Place) -> tuple[float, float]:
        if (one, other) not in self.transfers:
            self.transfers[one, other] = self.task.network.transfer(one, other)
        return self.transfers[one, other]

    def _moves(self, used: Place) -> list[int]:
        """All that can be done with the devices that are left, at least one left over."""
        if used not in self.moves_from:
            own = []
            for devices in range(1, min(self.most, sum(self.task.sizes) - sum(used) - 1) + 1):
                for place in placements(self.task.sizes, used, devices):
                    after = tuple(a + b for a, b in zip(used, place, strict=True))
                    own.append(len(self.moves))
                    self.moves.append(self._move(place, after, len(self.moves)))
            self.moves_from[used] = own
        return self.moves_from[used]

    def _move(self, place: Place, used: Place, number: int) -> _Move:
        from penstock.search.planners_dapple.compiled import Numbered

        network, rest = self.task.network, self._rest(used)
        numbers = Numbered(
            self.task.micro_batches,
            network.transfer(place, rest),
            network.all_reduce(place),
            network.all_reduce(rest),
            sum(self.task.sizes) - sum(used),
            number,
        )
        sums = np.concatenate([self.own[sum(place) - 1], self.own[sum(rest) - 1], self.sums])
        return _Move(place, used, sums, numbers.array())

    def _table(self, used: Place, depth: int) -> _Table:
        """Nodes of equal size are alike: which of them are used does not make another state."""
        key = (*sorted(zip(self.task.sizes, used, strict=True)), depth if self.task.stages else 0)
        if key not in self.tables:
            shape = (2 * self.keep, self.layers + 1)
            self.tables[key] = _Table(np.full(shape, np.inf), np.zeros((2, *shape)))
        return self.tables[key]

    def _after(self, prefix: _Prefix, move: _Move, stop: int) -> _Prefix:
        network, rows = self.task.network, list(prefix.rows)
        if prefix.stages:
            latency, per_byte = network.transfer(prefix.stages[-1][2], move.place)
            seconds = latency + per_byte * float(self.sums[0, prefix.start])
            rows.append((seconds, seconds, 0.0))
        forward, backward = (
            self.own[sum(move.place) - 1][:, stop] - self.own[sum(move.place) - 1][:, prefix.start]
        )
        latency, per_byte = network.all_reduce(move.place)
        rows.append(
            (
                float(forward),
                float(backward),
                latency + per_byte * float(self.sums[1, stop] - self.sums[1, prefix.start]),
            )
        )
        return _Prefix(stop, move.used, (*prefix.stages, (prefix.start, stop, move.place)), rows)

    def _placed(self, seconds: float, prefix: int, move: int, where: int) -> Placed:
        before, step = self.prefixes[prefix], self.moves[move]
        rest = (where, self.layers, self._rest(step.used))
        return Placed(float(seconds), (*before.stages, (before.start, where, step.place), rest))


def devices_of(placed: Placed, nodes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The ranks of every stage, taken from every node in order."""
    left: list[Iterator[int]] = [iter(node) for node in nodes]
    return [
        tuple(next(left[node]) for node, count in enumerate(place) for _ in range(count))
        for _, _, place in placed.stages
    ]

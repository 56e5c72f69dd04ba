"""DAPPLE's search: cuts, replicas of every stage, and their places with the least latency of a
step.

    state         | the first layers are stages on certain devices; the rest is one stage on all
                  | other devices
    one step on   | some layers of the rest become a stage of their own, on some of these devices

A state is the number of layers and of devices used on each node; of all pipelines that lead to it
only the best are stored. The paper stores one, and ranks them, as far as we know, by the latency
with the rest as one stage. That is often the slowest stage by far, so that pipelines which differ
much look alike: straight pipelines of eight stages came out half again as slow as possible.
Therefore the same number is also stored by a second ranking, the latency with the rest divided
evenly among the remaining devices.

Latency is no sum over stages, so that the best pipeline may have a prefix that is not stored: with
`keep` large enough the search is exact, and the tests measure how near it comes with few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import final

import numpy as np

from penstock.search.planners.dapple_places import Network, Place, placements
from penstock.search.planners.layer_costs import LayerCosts, Numbers, before

#: Number of pipelines per state that are stored for each ranking, by default.
KEEP = 1


@final
@dataclass(frozen=True)
class Task:
    """The input of the search.

    Attributes:
        costs: indexed by the number k of replicas minus 1: costs of a k-th of a micro-batch's
            samples; only the `output_bytes` of the first entry, of all samples, are used. Its
            length is the maximum number of replicas of a stage.
        sizes: number of devices of every node.
        network: the links.
        micro_batches: number of micro-batches of a step.
        stages: number of stages; None leaves it free.
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
    """A new stage on certain devices.

    Attributes:
        place: its devices.
        used: all devices in use after it; the rest gets all others.
        sums, numbers: input of `dapple_kernel.extend`.
    """

    place: Place
    used: Place
    sums: Numbers
    numbers: Numbers


@dataclass
class _Prefix:
    """The stages so far.

    Attributes:
        start: first layer of the next stage.
        used: devices in use.
        stages: first layer, one past the last, and place of every stage.
        rows: seconds of forward, backward and all-reduce of every stage and transfer.
    """

    start: int
    used: Place
    stages: tuple[tuple[int, int, Place], ...]
    rows: list[tuple[float, float, float]]


@dataclass
class _Table:
    """The best pipelines of a state.

    Attributes:
        values: [2 keep, layers + 1]: latencies of both rankings by the first layer of the rest.
        origins: [2, 2 keep, layers + 1]: their prefixes and moves, as indices.
    """

    values: Numbers
    origins: Numbers


def search(task: Task, keep: int = KEEP) -> list[Placed]:
    """Return the pipeline with the least latency for every number of stages that the search found;
    the best of all first.
    """
    return _Search(task, keep).run()


class _Search:
    """The search at work.

    Attributes:
        replica_sums: by number of replicas minus 1, forward and backward seconds before every
            layer.
        sums: output bytes of the layer before, weights, and least work, before every layer.
        prefixes, moves: all so far; tables and pipelines refer to them by their indices.
        moves_from: the moves that are possible with certain devices in use.
        tables: by state, see `_table`.
        best_of: by number of stages, the best pipeline: seconds, prefix, move, first layer of the
            rest.
        transfers: latency and seconds per byte between two places.
        cutoff_s: the least latency so far.
    """

    def __init__(self, task: Task, keep: int) -> None:
        self.task, self.keep = task, keep
        self.layers = len(task.costs[0])
        self.most = len(task.costs)
        self.replica_sums = [
            np.stack([before(costs.forward_s), before(costs.backward_s)]) for costs in task.costs
        ]
        device_seconds = [
            replicas * np.asarray(costs.seconds) for replicas, costs in enumerate(task.costs, 1)
        ]
        self.sums = np.stack(
            [
                np.concatenate(([0.0], task.costs[0].output_bytes)),
                before(task.costs[0].parameter_bytes),
                before(np.min(device_seconds, axis=0)),
            ]
        )
        self.prefixes: list[_Prefix] = []
        self.moves: list[_Move] = []
        self.moves_from: dict[Place, list[int]] = {}
        self.tables: dict[tuple[object, ...], _Table] = {}
        self.best_of: dict[int, tuple[float, int, int, int]] = {}
        self.transfers: dict[tuple[Place, Place], tuple[float, float]] = {}
        self.cutoff_s = np.inf

    def run(self) -> list[Placed]:
        """Search all prefixes, by the number of their layers; see `search`."""
        single_stage = self._single_stage()
        if single_stage is not None:
            self.cutoff_s = single_stage.seconds
        unused = tuple(0 for _ in self.task.sizes)
        self._expand(_Prefix(0, unused, (), []))
        for start in range(1, self.layers):
            # A copy: expansions add tables, whose pipelines all reach beyond `start`.
            for table in list(self.tables.values()):
                slots = np.flatnonzero(np.isfinite(table.values[:, start]))
                origins = table.origins[:, slots, start].T.astype(int).tolist()
                # Both rankings may have stored the same pipeline.
                for parent, move in dict.fromkeys(map(tuple, origins)):
                    self._expand(self._after(self.prefixes[parent], self.moves[move], start))
        pipelines = [self._placed(*best) for best in self.best_of.values()]
        if single_stage is not None:
            pipelines.append(single_stage)
        return sorted(pipelines, key=lambda placed: (placed.seconds, len(placed.stages)))

    def _single_stage(self) -> Placed | None:
        """Return the pipeline of one stage on all devices, or on as many as it may have replicas;
        None if another number of stages is required.
        """
        if self.task.stages not in (None, 1):
            return None
        place = self._rest(tuple(0 for _ in self.task.sizes))
        compute_s = float(self.replica_sums[sum(place) - 1][:, -1].sum())
        latency, per_byte = self.task.network.all_reduce(place)
        seconds = self.task.micro_batches * compute_s + latency + per_byte * float(self.sums[1, -1])
        return Placed(seconds, ((0, self.layers, place),))

    def _rest(self, used: Place) -> Place:
        """Return the unused devices, or as many of them as a stage may have replicas."""
        counts, remaining = [], self.most
        for size, count in zip(self.task.sizes, used, strict=True):
            counts.append(min(size - count, remaining))
            remaining -= counts[-1]
        return tuple(counts)

    def _expand(self, prefix: _Prefix) -> None:
        """Add one more stage to the prefix, on every possible place and up to every possible layer.

        For each place, `extend` puts the pipelines with every last layer of the new stage into the
        table of the state that they lead to, and returns the best of them; a shorter latency than
        all before becomes the cutoff.
        """
        from penstock.search.cut_search.dapple_kernel import StepNumbers, extend

        # The new stage, and the rest as the last stage, complete a pipeline of this many.
        stages = len(prefix.stages) + 2
        too_deep = self.task.stages is not None and stages > self.task.stages
        if too_deep or self._cannot_improve(prefix):
            return
        prefix_index = len(self.prefixes)
        self.prefixes.append(prefix)
        rows, new_row = self._rows_with_room(prefix)
        for move_index in self._moves(prefix.used):
            move = self.moves[move_index]
            table = self._table(move.used, stages - 1)
            move.numbers[StepNumbers.CUTOFF] = self.cutoff_s
            move.numbers[StepNumbers.PREFIX] = prefix_index
            if prefix.stages:
                rows[:2, new_row - 1] = self._transfer_s(prefix, move.place)
            best_s, rest_start = extend(
                rows, new_row, prefix.start, move.sums, move.numbers, (table.values, table.origins)
            )
            is_complete = rest_start >= 0 and self.task.stages in (None, stages)
            if is_complete:
                self.cutoff_s = min(self.cutoff_s, best_s)
                if stages not in self.best_of or best_s < self.best_of[stages][0]:
                    self.best_of[stages] = best_s, prefix_index, move_index, rest_start

    @staticmethod
    def _rows_with_room(prefix: _Prefix) -> tuple[Numbers, int]:
        """Return the input array of `extend` with the rows of a prefix, and the column of the new
        stage.

        Behind the prefix there is room for the transfer to the new stage, unless that is the first,
        the new stage, the transfer to the rest, and the rest.
        """
        count = len(prefix.rows)
        rows = np.zeros((3, count + 4))
        if prefix.rows:
            rows[:, :count] = np.array(prefix.rows).T
        return rows, count + 1 if prefix.stages else count

    def _cannot_improve(self, prefix: _Prefix) -> bool:
        """Return whether no pipeline with these stages can be better than the cutoff.

        A step takes at least its first stage once, and M - 1 times its slowest stage or an even
        share of the remaining layers.
        """
        if not prefix.rows:
            return False
        devices = sum(self.task.sizes) - sum(prefix.used)
        share = float(self.sums[2, -1] - self.sums[2, prefix.start]) / devices
        most = max(share, *(f + b for f, b, _ in prefix.rows))
        return (self.task.micro_batches - 1) * most + sum(prefix.rows[0][:2]) > self.cutoff_s

    def _transfer_s(self, prefix: _Prefix, place: Place) -> float:
        """Return the seconds of the transfer from a prefix's last stage to the next one."""
        places = prefix.stages[-1][2], place
        if places not in self.transfers:
            self.transfers[places] = self.task.network.transfer(*places)
        latency, per_byte = self.transfers[places]
        return latency + per_byte * float(self.sums[0, prefix.start])

    def _moves(self, used: Place) -> list[int]:
        """Return all ways to place a stage on unused devices so that at least one is left over, as
        indices of `self.moves`.
        """
        if used not in self.moves_from:
            indices = []
            for devices in range(1, min(self.most, sum(self.task.sizes) - sum(used) - 1) + 1):
                for place in placements(self.task.sizes, used, devices):
                    after = tuple(a + b for a, b in zip(used, place, strict=True))
                    indices.append(len(self.moves))
                    self.moves.append(self._move(place, after, len(self.moves)))
            self.moves_from[used] = indices
        return self.moves_from[used]

    def _move(self, place: Place, used: Place, number: int) -> _Move:
        """Return the move that places a stage, after which `used` devices are in use."""
        from penstock.search.cut_search.dapple_kernel import StepNumbers

        network, rest = self.task.network, self._rest(used)
        numbers = StepNumbers(
            self.task.micro_batches,
            network.transfer(place, rest),
            network.all_reduce(place),
            network.all_reduce(rest),
            sum(self.task.sizes) - sum(used),
            number,
        )
        sums = np.concatenate(
            [self.replica_sums[sum(place) - 1], self.replica_sums[sum(rest) - 1], self.sums]
        )
        return _Move(place, used, sums, numbers.array())

    def _table(self, used: Place, depth: int) -> _Table:
        """Return the table of a state. Nodes of equal size are interchangeable, so that states that
        differ in their order share a table.
        """
        key = (*sorted(zip(self.task.sizes, used, strict=True)), depth if self.task.stages else 0)
        if key not in self.tables:
            shape = (2 * self.keep, self.layers + 1)
            self.tables[key] = _Table(np.full(shape, np.inf), np.zeros((2, *shape)))
        return self.tables[key]

    def _after(self, prefix: _Prefix, move: _Move, stop: int) -> _Prefix:
        """Return the prefix with one more stage, which ends before layer `stop`."""
        rows = list(prefix.rows)
        if prefix.stages:
            seconds = self._transfer_s(prefix, move.place)
            rows.append((seconds, seconds, 0.0))
        stage_sums = self.replica_sums[sum(move.place) - 1]
        forward, backward = stage_sums[:, stop] - stage_sums[:, prefix.start]
        latency, per_byte = self.task.network.all_reduce(move.place)
        weights = float(self.sums[1, stop] - self.sums[1, prefix.start])
        rows.append((float(forward), float(backward), latency + per_byte * weights))
        return _Prefix(stop, move.used, (*prefix.stages, (prefix.start, stop, move.place)), rows)

    def _placed(self, seconds: float, prefix: int, move: int, rest_start: int) -> Placed:
        """Return the pipeline of a prefix, a move, and the rest from layer `rest_start`."""
        before, step = self.prefixes[prefix], self.moves[move]
        new_stage = (before.start, rest_start, step.place)
        rest = (rest_start, self.layers, self._rest(step.used))
        return Placed(float(seconds), (*before.stages, new_stage, rest))


def devices_of(placed: Placed, nodes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the ranks of every stage, taken from every node in order."""
    unused: list[Iterator[int]] = [iter(node) for node in nodes]
    stages = []
    for _, _, place in placed.stages:
        ranks: list[int] = []
        for node, count in enumerate(place):
            ranks += islice(unused[node], count)
        stages.append(tuple(ranks))
    return stages

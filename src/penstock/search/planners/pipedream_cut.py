"""PipeDream's partitioning: where to cut and how often to replicate each stage, level by level of
the machine.

    level 1   | devices of one node, joined by the link inside it
    level 2   | nodes, joined by the network

At every level a range of layers is cut into stages, each on some of the level's components. The
time of one component for a range is the best that the level below achieves with all components that
it has; at the lowest level it is one device's forward and backward.

    A[i, j, m]  | the slowest stage of layers i .. j on m components: the best of
                | one stage on m components:        time(i, j, m)
                | one more cut, behind layer k:     max(A[i, k, m - m'], transfer of k's output,
                |                                       time(k + 1, j, m'))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.search.planners.layer_costs import LayerCosts, Numbers, over_ranges

Indices = NDArray[np.int64]


@final
@dataclass(frozen=True)
class Level:
    """A number of components joined by links of this bandwidth: devices at the lowest level, else
    the level below.
    """

    components: int
    bandwidth_bytes_per_s: float


@final
@dataclass(frozen=True)
class Rules:
    """Limits on a cut, and how its costs count.

    Attributes:
        form: "paper": a stage takes max(compute, sync) / m, with a sync of 2 (m - 1)/m of its
            weights over the link; a boundary takes 2 a, for the activation and its gradient.
            "code", as in the authors' optimizer with `activation_compression_ratio=1`: a stage
            takes (compute + 4 (m - 1)/m of its weights) / m, a boundary 2 a / m', towards the
            layers before and behind alike; and a level's all-reduce of a stage that is a whole
            range by itself counts for a component of the level below only.
        straight: no stage is replicated, as with `--straight_pipeline`.
        most_replicas: maximum number of components of a stage; None is no limit.
        stages: number of stages; None leaves it free. Only for a single level.
        memory_bytes: memory of a component; None is no limit. With w micro-batches waiting behind a
            stage, w = ceil(components behind / components of the stage), it holds activations of
            w + 1, and as many versions of the weights, gradients and momenta. In the code: w times
            activations and weights only.
        stash: weights have a version for every micro-batch in flight; else one.
        other_state_factor: bytes of gradients and optimizer states per byte of weights; momenta by
            default.
    """

    form: Literal["paper", "code"] = "paper"
    straight: bool = False
    most_replicas: int | None = None
    stages: int | None = None
    memory_bytes: float | None = None
    stash: bool = True
    other_state_factor: float = 2.0


@final
@dataclass(frozen=True)
class Part:
    """A stage: layers `start` to `stop` (exclusive) on `replicas` components, each of them cut
    further into `inner`, which is empty at the lowest level.
    """

    start: int
    stop: int
    replicas: int
    inner: tuple[Part, ...] = ()


@final
@dataclass(frozen=True)
class Cut:
    """The slowest stage or link in seconds per minibatch, and the parts of the highest level."""

    slowest_s: float
    parts: tuple[Part, ...]


def hierarchical_cut(costs: LayerCosts, levels: Sequence[Level], rules: Rules | None = None) -> Cut:
    """Return the best cut that uses every component of every level; of equal ones the one that cuts
    earliest.

    Complexity: n layers, m components at a level: O(n^2 m^2) at the highest, O(n^3 m^2) below.

    Args:
        costs: costs of one minibatch on one component.
        levels: the levels, lowest first.
        rules: limits on the cut; the paper's by default.

    Raises:
        PlanError: all components cannot be used, with `straight` or with few replicas.

    Source: Narayanan et al. 2019, PipeDream, section 3.1; optimizer_graph_hierarchical.py of
    github.com/msr-fiddle/pipedream.
    """
    rules = rules or Rules()
    ranges = _RangeCosts(
        over_ranges(costs.seconds),
        over_ranges(costs.parameter_bytes),
        over_ranges(costs.activation_bytes),
        np.asarray(costs.output_bytes, float),
    )
    components_below, tables = 1, []
    for number, level in enumerate(levels):
        table = _Table(ranges, level, rules)
        table.fill(components_below, whole_only=number == len(levels) - 1)
        # To the level above, a range of layers is as slow as its best cut over this whole level.
        ranges = replace(ranges, seconds=table.all_components())
        components_below = level.components
        tables.append(table)
    slowest = tables[-1].best(0, len(costs) - 1)
    if not np.isfinite(slowest):
        components = " x ".join(str(level.components) for level in levels)
        raise PlanError(
            f"{len(costs)} layers cannot be spread over {components} components: "
            f"{_describe_limits(rules)}"
        )
    return Cut(float(slowest), _parts(tables, 0, len(costs) - 1))


def _describe_limits(rules: Rules) -> str:
    """Return the limits on a cut as text."""
    limits = []
    if rules.stages is not None:
        limits.append(f"{rules.stages} stages are requested")
    if rules.straight:
        limits.append("no stage may be replicated")
    elif rules.most_replicas is not None:
        limits.append(f"no stage may have more than {rules.most_replicas} replicas")
    if rules.memory_bytes is not None:
        limits.append(f"and a component has {rules.memory_bytes:.3g} bytes")
    return ", ".join(limits)


def _parts(tables: Sequence[_Table], start: int, stop: int) -> tuple[Part, ...]:
    """Return the parts of layers `start` to `stop` (inclusive) at the highest of these levels."""
    parts = tables[-1].parts(start, stop)
    if len(tables) == 1:
        return parts
    return tuple(
        replace(part, inner=_parts(tables[:-1], part.start, part.stop - 1)) for part in parts
    )


@final
@dataclass(frozen=True)
class _RangeCosts:
    """Costs of a minibatch, summed over ranges of layers.

    Attributes:
        seconds, parameter_bytes, activation_bytes: entry [i, j] is for layers i .. j on one
            component; infinite for j < i.
        output_bytes: of every layer.
    """

    seconds: Numbers
    parameter_bytes: Numbers
    activation_bytes: Numbers
    output_bytes: Numbers


class _Table:
    """The dynamic program of one level: the best cut of every range of layers on every number of
    components.

    Attributes:
        slowest_s: the slowest stage or link, A of the module's docstring: an array [i, j, m] for
            layers i .. j on m components. With a required number of stages there is one array for
            every number of stages up to it, else a single array for any number.
        last_cut: in the same form, the layer before the last cut; -1 for a single stage.
        last_replicas: in the same form, the components of the last stage.
    """

    def __init__(self, ranges: _RangeCosts, level: Level, rules: Rules) -> None:
        self.ranges, self.level, self.rules = ranges, level, rules
        self.layers, self.components = len(ranges.output_bytes), level.components
        limit = 1 if rules.straight else rules.most_replicas or self.components
        self.most_replicas = min(self.components, limit)
        self.replica_counts = np.arange(1, self.most_replicas + 1).astype(float)
        # Seconds of the transfers into a stage behind a layer and out of a stage that ends with it,
        # indexed [layer, replicas - 1]. In the form "code" the replicas share a transfer, and a
        # stage's output counts as well; that of the last layer is not sent.
        is_code = rules.form == "code"
        senders = self.replica_counts if is_code else np.ones(self.most_replicas)
        self.input_s = 2 * ranges.output_bytes[:, None] / (level.bandwidth_bytes_per_s * senders)
        self.output_s = self.input_s.copy() if is_code else np.zeros_like(self.input_s)
        self.output_s[-1] = 0.0

    def fill(self, components_below: int, *, whole_only: bool) -> None:
        """Compute all entries.

        Args:
            components_below: number of components of the level below, 1 at the lowest.
            whole_only: compute only the ranges that start with the first layer.
        """
        starts = 1 if whole_only else self.layers
        tables = self.rules.stages or 1
        # By number of components from 0; no range runs on 0, so that column stays infinite.
        shape = (starts, self.layers, self.components + 1)
        self.slowest_s = [np.full(shape, np.inf) for _ in range(tables)]
        self.last_cut = [np.full(shape, -1, np.int32) for _ in range(tables)]
        self.last_replicas = [np.zeros(shape, np.int32) for _ in range(tables)]
        for j in range(self.layers):
            rows = slice(0, min(j + 1, starts))
            # A single stage on m components has the other components of the level behind it.
            exceeds = self._exceeds_memory(rows, j, self.components - self.replica_counts)
            single_s = np.where(exceeds, np.inf, self._stage_s(rows, j, components_below))
            self.slowest_s[0][rows, j, 1 : self.most_replicas + 1] = single_s
            self.last_replicas[0][rows, j, 1 : self.most_replicas + 1] = self.replica_counts
        if self.rules.stages is None:
            # The single array is updated in place. Its entries for ranges that end before j are
            # complete when those that end with j are computed.
            table_pairs = [(0, 0)]
        else:
            table_pairs = [(stages - 1, stages) for stages in range(1, tables)]
        for earlier, table in table_pairs:
            for j in range(1, self.layers):
                self._add_last_stage(earlier, table, j)

    def _stage_s(self, starts: slice, j: int, components_below: int = 1) -> Numbers:
        """Return the seconds of stages from each of `starts` to layer j, by number of replicas."""
        replicas = self.replica_counts
        compute_s = self.ranges.seconds[starts, j, None]
        parameter_bytes = self.ranges.parameter_bytes[starts, j, None]
        sync_s: Numbers = (
            2 * (replicas - 1) / replicas * parameter_bytes / self.level.bandwidth_bytes_per_s
        )
        if self.rules.form == "code":
            total_s: Numbers = compute_s + 2 * sync_s / components_below
        else:
            total_s = np.maximum(compute_s, sync_s)
        return np.asarray(total_s / replicas)

    def _exceeds_memory(
        self, starts: slice, j: int, components_behind: Numbers | int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return whether the stages from each of `starts` to layer j exceed the memory, by number
        of replicas.
        """
        if self.rules.memory_bytes is None:
            return np.zeros((1, 1), bool)
        waiting: Numbers = np.ceil(components_behind / self.replica_counts)
        parameter_bytes = self.ranges.parameter_bytes[starts, j, None]
        activation_bytes = self.ranges.activation_bytes[starts, j, None]
        if self.rules.form == "code":
            total: Numbers = waiting * (parameter_bytes + activation_bytes)
        else:
            versions = waiting + 1 if self.rules.stash else 1
            state_factor = versions + self.rules.other_state_factor
            total = (waiting + 1) * activation_bytes + state_factor * parameter_bytes
        return total > self.rules.memory_bytes

    def _add_last_stage(self, earlier: int, table: int, j: int) -> None:
        """Improve the entries of all ranges that end with layer j, by one more cut.

        This is the recurrence's second line: of layers i .. k on m - r components and a last stage
        of layers k + 1 .. j on r, the slower counts; the best k and r are chosen for every i and m.

        Args:
            earlier: index of the array with the layers before the last stage.
            table: index of the array to improve.
            j: last layer of the ranges.
        """
        cuts = slice(0, j)  # k
        # [k, r - 1]: the last stage, and the transfers into it and out of it.
        last_s = np.maximum(self._stage_s(slice(1, j + 1), j), self.input_s[cuts])
        last_s = np.maximum(last_s, self.output_s[j])
        starts = min(j, len(self.slowest_s[table]))
        for m in range(2, self.components + 1):
            most = min(m - 1, self.most_replicas)
            exceeds = self._exceeds_memory(slice(1, j + 1), j, self.components - m)
            fitting_s = np.where(exceeds, np.inf, last_s)[:, :most]
            # [i, k, r - 1]. The slice runs backwards, since the more components the last stage has,
            # the fewer are left for the layers before it.
            earlier_s = self.slowest_s[earlier][:starts, cuts, m - 1 : m - 1 - most : -1]
            best_s, cut, replicas = _best_pair(earlier_s, fitting_s)
            # Strictly better: of equal ones the earlier cut stays.
            better = np.flatnonzero(best_s < self.slowest_s[table][:starts, j, m])
            self.slowest_s[table][better, j, m] = best_s[better]
            self.last_cut[table][better, j, m] = cut[better]
            self.last_replicas[table][better, j, m] = replicas[better]

    def all_components(self) -> Numbers:
        """Return [i, j]: the best time of layers i .. j on all components."""
        return self.slowest_s[-1][:, :, self.components]

    def best(self, i: int, j: int) -> float:
        """Return the best time of layers i .. j on all components."""
        return float(self.slowest_s[-1][i, j, self.components])

    def parts(self, i: int, j: int) -> tuple[Part, ...]:
        """Return the stages of the best time of layers i .. j, traced back from the last."""
        parts: list[Part] = []
        table, m = len(self.slowest_s) - 1, self.components
        while True:
            cut = int(self.last_cut[table][i, j, m])
            replicas = int(self.last_replicas[table][i, j, m])
            is_first_stage = cut < 0
            parts.append(Part(i if is_first_stage else cut + 1, j + 1, replicas))
            if is_first_stage:
                return tuple(reversed(parts))
            j, m = cut, m - replicas
            if self.rules.stages is not None:
                table -= 1


def _best_pair(earlier_s: Numbers, last_s: Numbers) -> tuple[Numbers, Indices, Indices]:
    """Return, for every first layer, the least maximum of the layers before the last stage and the
    last stage; its cut; and its number of replicas.

    Args:
        earlier_s: indexed [first layer, cut, replicas - 1].
        last_s: indexed [cut, replicas - 1].
    """
    slowest_s = np.maximum(earlier_s, last_s).reshape(len(earlier_s), -1)
    best = slowest_s.argmin(axis=1)
    cut, replicas_index = np.divmod(best, last_s.shape[1])
    return slowest_s[np.arange(len(best)), best], cut, replicas_index + 1


def spread(
    parts: Sequence[Part], components: Sequence[object]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the stages of the lowest level with the devices of each: (first layer, one past the
    last, devices).

    Replicas of a stage in several components are numbered in turn, so that a micro-batch that goes
    to the n-th replicas stays in one component all the way.

    >>> spread([Part(0, 4, 2, (Part(0, 3, 1), Part(3, 4, 1))), Part(4, 5, 1, (Part(4, 5, 2),))], [[0, 1], [2, 3], [4, 5]])
    [(0, 3, (0, 2)), (3, 4, (1, 3)), (4, 5, (4, 5))]

    Args:
        parts: parts of the highest level.
        components: components of the highest level: ranks, or lists of the components below.
    """
    stages: list[tuple[int, int, tuple[int, ...]]] = []
    used = 0
    for part in parts:
        part_components = components[used : used + part.replicas]
        used += part.replicas
        if not part.inner:
            ranks = tuple(rank for rank in part_components if isinstance(rank, int))
            stages.append((part.start, part.stop, ranks))
            continue
        inner_stages = [
            spread(part.inner, component)
            for component in part_components
            if isinstance(component, Sequence)
        ]
        # All components of a part are cut alike: their n-th stages are replicas of one another.
        for replicas in zip(*inner_stages, strict=True):
            start, stop, _ = replicas[0]
            turns = zip(*(ranks for *_, ranks in replicas), strict=True)
            stages.append((start, stop, tuple(chain.from_iterable(turns))))
    return stages

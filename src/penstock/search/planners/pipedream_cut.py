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

from penstock.errors import PlanError
from penstock.search.planners.layer_costs import LayerCosts, Numbers, over_ranges


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
    seconds, weights = over_ranges(costs.seconds), over_ranges(costs.parameter_bytes)
    activations = over_ranges(costs.activation_bytes)
    output = np.asarray(costs.output_bytes, float)
    within, tables = 1, []
    for number, level in enumerate(levels):
        table = _Table(seconds, weights, activations, output, level, rules)
        table.fill(within, whole_only=number == len(levels) - 1)
        # To the level above, a range of layers is as slow as its best cut over this whole level.
        seconds = table.all_components()
        within = level.components
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
        limits.append("no stage may stand twice")
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


class _Table:
    """One level: the slowest stage and the last cut, for all ranges and numbers of components.

    `time[s]` is indexed [i, j, m]. If the number of stages is fixed, s counts stages; else it is 0.
    """

    def __init__(
        self,
        seconds: Numbers,
        weights: Numbers,
        activations: Numbers,
        output: Numbers,
        level: Level,
        rules: Rules,
    ) -> None:
        self.seconds, self.weights, self.activations = seconds, weights, activations
        self.level, self.rules = level, rules
        self.layers, self.most = len(output), level.components
        self.replicas = 1 if rules.straight else min(self.most, rules.most_replicas or self.most)
        counts = np.arange(1, self.replicas + 1)
        self.counts = counts.astype(float)
        senders = self.counts if rules.form == "code" else np.ones(self.replicas)
        self.hop = 2 * output[:, None] / (level.bandwidth_bytes_per_s * senders)
        # In the code a stage's output also counts with its own number of components; that of the
        # last layer is not sent.
        self.out = self.hop.copy() if rules.form == "code" else np.zeros_like(self.hop)
        self.out[-1] = 0.0

    def _stage(self, rows: slice, j: int, within: int = 1) -> Numbers:
        """Return the seconds of stages from each of `rows` to layer j, by number of components."""
        compute, weights = self.seconds[rows, j, None], self.weights[rows, j, None]
        sync: Numbers = (
            2 * (self.counts - 1) / self.counts * weights / self.level.bandwidth_bytes_per_s
        )
        total: Numbers = np.maximum(compute, sync)
        if self.rules.form == "code":
            total = compute + 2 * sync / within
        per_component: Numbers = total / self.counts
        return per_component

    def fill(self, within: int, *, whole_only: bool) -> None:
        """Compute all entries; with `whole_only` only those of ranges from the first layer.

        `behind` has the layer before the last cut, -1 for a single stage; `last` the number of
        components of the last stage.
        """
        rows = 1 if whole_only else self.layers
        stages = self.rules.stages or 1
        # By number of components from 0; no range runs on 0, so that column stays infinite.
        shape = (rows, self.layers, self.most + 1)
        self.time = [np.full(shape, np.inf) for _ in range(stages)]
        self.behind = [np.full(shape, -1, np.int32) for _ in range(stages)]
        self.last = [np.zeros(shape, np.int32) for _ in range(stages)]
        for j in range(self.layers):
            upto = min(j + 1, rows)
            # A single stage on m components has the other components of the level behind it.
            exceeds = self._exceeds_memory(slice(0, upto), j, self.most - self.counts)
            single = np.where(exceeds, np.inf, self._stage(slice(0, upto), j, within))
            self.time[0][:upto, j, 1 : self.replicas + 1] = single
            self.last[0][:upto, j, 1 : self.replicas + 1] = np.arange(1, self.replicas + 1)
        # Without a number of stages the one table is updated in place.
        is_free = self.rules.stages is None
        steps = [(0, 0)] if is_free else [(s, s - 1) for s in range(1, stages)]
        for s, before in steps:
            for j in range(1, self.layers):
                self._cut(s, before, j)

    def _exceeds_memory(
        self, rows: slice, j: int, behind: Numbers | int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return whether the stages from each of `rows` to layer j exceed the memory, by number of
        components.
        """
        if self.rules.memory_bytes is None:
            return np.zeros((1, 1), bool)
        waiting: Numbers = np.ceil(behind / self.counts)
        weights, activations = self.weights[rows, j, None], self.activations[rows, j, None]
        if self.rules.form == "code":
            total: Numbers = waiting * (weights + activations)
        else:
            versions = waiting + 1 if self.rules.stash else 1
            total = (waiting + 1) * activations + (
                versions + self.rules.other_state_factor
            ) * weights
        return total > self.rules.memory_bytes

    def _cut(self, s: int, before: int, j: int) -> None:
        """Update the entries of all ranges that end with layer j by one more cut."""
        # By cut: the last stage, the link into it, and in the code the link out of it.
        last_stage = np.maximum(
            np.maximum(self._stage(slice(1, j + 1), j), self.hop[:j]), self.out[j]
        )
        time, earlier = self.time[s], self.time[before]
        rows = min(j, len(time))
        for m in range(2, self.most + 1):
            count = min(m - 1, self.replicas)
            exceeds = self._exceeds_memory(slice(1, j + 1), j, self.most - m)
            last = np.where(exceeds, np.inf, last_stage)[None, :, :count]
            # [range, cut, components of the last stage]; the slice runs backwards, since the more
            # components the last stage has, the fewer are left for the layers before it.
            totals = np.maximum(earlier[:rows, :j, m - 1 : m - 1 - count : -1], last)
            totals = totals.reshape(rows, -1)
            best = totals.argmin(axis=1)
            value = totals[np.arange(rows), best]
            # Strictly better: of equal ones the earlier cut stays.
            better = np.flatnonzero(value < time[:rows, j, m])
            time[better, j, m] = value[better]
            # The flat index of [cut, components] is cut * count + components - 1.
            self.behind[s][better, j, m] = best[better] // count
            self.last[s][better, j, m] = best[better] % count + 1

    def all_components(self) -> Numbers:
        """Return [i, j]: the best time of layers i .. j on all components."""
        return self.time[-1][:, :, self.most]

    def best(self, i: int, j: int) -> float:
        """Return the best time of layers i .. j on all components."""
        return float(self.time[-1][i, j, self.most])

    def parts(self, i: int, j: int) -> tuple[Part, ...]:
        """Return the stages of the best time of layers i .. j, traced back from the last."""
        parts: list[Part] = []
        s, m = len(self.time) - 1, self.most
        while True:
            behind, last = int(self.behind[s][i, j, m]), int(self.last[s][i, j, m])
            parts.append(Part(behind + 1 if behind >= 0 else i, j + 1, last))
            if behind < 0:
                return tuple(reversed(parts))
            j, m, s = behind, m - last, s if self.rules.stages is None else s - 1


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

"""PipeDream's partitioning: where to cut and how often each stage stands, level by level of the
machine.

    level 1   | devices of one node, joined by the link inside it
    level 2   | nodes, joined by the network

At every level a range of layers is cut into stages, each on some of the level's components. What
one component takes for a range is what the level below found best for it, with all components that
it has; at the bottom it is one device's forward and backward.

    A[i, j, m]  | the slowest stage of layers i .. j on m components: the best of
                | one stage, m times:               time(i, j, m)
                | one more cut, behind layer k:     max(A[i, k, m - m'], transfer of k's output, time(k + 1, j, m'))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from penstock.errors import PlanError
from penstock.search.planners.layer_costs import LayerCosts, Numbers, over_ranges


@final
@dataclass(frozen=True)
class Level:
    """So many components, joined by links of this bandwidth: of the lowest level devices, of the
    others the level below.
    """

    components: int
    bandwidth_bytes_per_s: float


@final
@dataclass(frozen=True)
class Rules:
    """What a cut may be and how it counts.

    Attributes:
        form: "paper": a stage takes max(compute, sync) / m; sync is 2 (m - 1)/m of its weights over
        the link, a boundary 2 a of
            activation and gradient. "code", as the authors' optimizer has it with
            `activation_compression_ratio=1`: (compute + 4 (m - 1)/m of its weights) / m, a boundary
            2 a / m', towards the layers before and behind alike; and a level's all-reduce of a
            stage that is a whole range by itself counts for a component of the level below only.
        straight: no stage stands twice, as in `--straight_pipeline`.
        most_replicas: the most components of a stage; None is no limit.
        stages: how many stages; None leaves it free. Only where there is one level.
        memory_bytes: what a component may hold; None is no limit. With w micro-batches waiting
        behind a stage, w = ceil(components behind
            / components of the stage), it holds activations of w + 1, and as many versions of the
            weights, gradients and momenta. In the code: w times activations and weights, and
            nothing else.
        stash: weights have a version for every micro-batch in flight; else one.
        besides: how many times the weights a component holds in gradients and the optimizer's
        numbers: momenta by default.
    """

    form: Literal["paper", "code"] = "paper"
    straight: bool = False
    most_replicas: int | None = None
    stages: int | None = None
    memory_bytes: float | None = None
    stash: bool = True
    besides: float = 2.0


@final
@dataclass(frozen=True)
class Part:
    """Layers `start` up to `stop`, which is not among them, on so many components, each of them cut
    further as `inner` says; empty at the lowest level.
    """

    start: int
    stop: int
    replicas: int
    inner: tuple[Part, ...] = ()


@final
@dataclass(frozen=True)
class Cut:
    """The slowest stage or link, in seconds per minibatch, and the parts of the highest level."""

    slowest_s: float
    parts: tuple[Part, ...]


def hierarchical_cut(costs: LayerCosts, levels: Sequence[Level], rules: Rules | None = None) -> Cut:
    """The best cut that uses every component of every level; of equals the one cut earliest.

    Complexity: n layers, m components at a level: O(n^2 m^2) at the highest, O(n^3 m^2) below.

    Args:
        costs: of one minibatch, which one component takes whole.
        levels: from the lowest.
        rules: the paper's by default.

    Raises:
        PlanError: with `straight`, or with few replicas, so many components cannot be used.

    Source: Narayanan et al. 2019, PipeDream, section 3.1; optimizer_graph_hierarchical.py of
    github.com/msr-fiddle/pipedream.
    """
    rules = rules or Rules()
    seconds, weights = over_ranges(costs.seconds), over_ranges(costs.parameter_bytes)
    kept = over_ranges(costs.activation_bytes)
    output = np.asarray(costs.output_bytes, float)
    within, tables = 1, []
    for number, level in enumerate(levels):
        table = _Table(seconds, weights, kept, output, level, rules)
        table.fill(within, whole_only=number == len(levels) - 1)
        seconds = table.of_all()
        within = level.components
        tables.append(table)
    slowest = tables[-1].best(0, len(costs) - 1)
    if not np.isfinite(slowest):
        raise PlanError(
            f"{len(costs)} layers cannot be spread over {' x '.join(str(level.components) for level in levels)} "
            f"components: {_limits(rules)}"
        )
    return Cut(float(slowest), _parts(tables, 0, len(costs) - 1))


def _limits(rules: Rules) -> str:
    found = []
    if rules.stages is not None:
        found.append(f"{rules.stages} stages are asked for")
    if rules.straight:
        found.append("no stage may stand twice")
    elif rules.most_replicas is not None:
        found.append(f"no stage may have more than {rules.most_replicas} replicas")
    if rules.memory_bytes is not None:
        found.append(f"and a component has {rules.memory_bytes:.3g} bytes")
    return ", ".join(found)


def _parts(tables: Sequence[_Table], start: int, stop: int) -> tuple[Part, ...]:
    found = tables[-1].parts(start, stop)
    if len(tables) == 1:
        return found
    return tuple(
        Part(each.start, each.stop, each.replicas, _parts(tables[:-1], each.start, each.stop - 1))
        for each in found
    )


class _Table:
    """One level: for all ranges and numbers of components, the slowest stage, and where the last
    cut is.

    `time[s]` has [i, j, m]; s counts stages where their number is asked for, and is 0 where it is
    not.
    """

    def __init__(
        self,
        seconds: Numbers,
        weights: Numbers,
        kept: Numbers,
        output: Numbers,
        level: Level,
        rules: Rules,
    ) -> None:
        self.seconds, self.weights, self.kept, self.level, self.rules = (
            seconds,
            weights,
            kept,
            level,
            rules,
        )
        self.layers, self.most = len(output), level.components
        self.replicas = 1 if rules.straight else min(self.most, rules.most_replicas or self.most)
        counts = np.arange(1, self.replicas + 1)
        self.counts = counts.astype(float)
        senders = self.counts if rules.form == "code" else np.ones(self.replicas)
        self.hop = 2 * output[:, None] / (level.bandwidth_bytes_per_s * senders)
        # In the code a stage's output counts with its own number of components too; the last
        # layer's goes nowhere.
        self.out = self.hop.copy() if rules.form == "code" else np.zeros_like(self.hop)
        self.out[-1] = 0.0

    def _stage(self, rows: slice, j: int, within: int = 1) -> Numbers:
        """Seconds of the stages from each of `rows` to layer j, by number of components."""
        own, weights = self.seconds[rows, j, None], self.weights[rows, j, None]
        sync: Numbers = (
            2 * (self.counts - 1) / self.counts * weights / self.level.bandwidth_bytes_per_s
        )
        taken: Numbers = (
            own + 2 * sync / within if self.rules.form == "code" else np.maximum(own, sync)
        )
        each: Numbers = taken / self.counts
        return each

    def fill(self, within: int, *, whole_only: bool) -> None:
        """Work out everything; only ranges from the first layer where `whole_only`."""
        rows = 1 if whole_only else self.layers
        stages = self.rules.stages or 1
        shape = (rows, self.layers, self.most + 1)
        self.time = [np.full(shape, np.inf) for _ in range(stages)]
        self.behind = [
            np.full(shape, -1, np.int32) for _ in range(stages)
        ]  # the layer before the last cut
        self.last = [
            np.zeros(shape, np.int32) for _ in range(stages)
        ]  # components of the last stage
        for j in range(self.layers):
            upto = min(j + 1, rows)
            over = self._over(slice(0, upto), j, self.most - self.counts)
            whole = np.where(over, np.inf, self._stage(slice(0, upto), j, within))
            self.time[0][:upto, j, 1 : self.replicas + 1] = whole
            self.last[0][:upto, j, 1 : self.replicas + 1] = np.arange(1, self.replicas + 1)
        free = self.rules.stages is None
        for s in range(0 if free else 1, stages):
            for j in range(1, self.layers):
                self._cut(s, s if free else s - 1, j)

    def _over(
        self, rows: slice, j: int, behind: Numbers | int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether the stages from each of `rows` to layer j hold more than they may, by number of
        components.
        """
        if self.rules.memory_bytes is None:
            return np.zeros((1, 1), bool)
        waiting: Numbers = np.ceil(behind / self.counts)
        weights, kept = self.weights[rows, j, None], self.kept[rows, j, None]
        if self.rules.form == "code":
            held: Numbers = waiting * (weights + kept)
        else:
            held = (waiting + 1) * kept + (
                (waiting + 1 if self.rules.stash else 1) + self.rules.besides
            ) * weights
        return held > self.rules.memory_bytes

    def _cut(self, s: int, before: int, j: int) -> None:
        """All ranges that end with layer j, cut once more."""
        after = np.maximum(np.maximum(self._stage(slice(1, j + 1), j), self.hop[:j]), self.out[j])
        time, earlier = self.time[s], self.time[before]
        rows = min(j, len(time))
        for m in range(2, self.most + 1):
            count = min(m - 1, self.replicas)
            last = np.where(self._over(slice(1, j + 1), j, self.most - m), np.inf, after)[
                None, :, :count
            ]
            found = np.maximum(earlier[:rows, :j, m - 1 : m - 1 - count : -1], last).reshape(
                rows, -1
            )
            best = found.argmin(axis=1)
            value = found[np.arange(rows), best]
            better = np.flatnonzero(value < time[:rows, j, m])
            time[better, j, m] = value[better]
            self.behind[s][better, j, m] = best[better] // count
            self.last[s][better, j, m] = best[better] % count + 1

    def of_all(self) -> Numbers:
        """[i, j]: the best of layers i .. j on all components."""
        return self.time[-1][:, :, self.most]

    def best(self, i: int, j: int) -> float:
        """The best of layers i .. j on all components."""
        return float(self.time[-1][i, j, self.most])

    def parts(self, i: int, j: int) -> tuple[Part, ...]:
        """The stages that make it so."""
        found: list[Part] = []
        s, m = len(self.time) - 1, self.most
        while True:
            behind, last = int(self.behind[s][i, j, m]), int(self.last[s][i, j, m])
            found.append(Part(behind + 1 if behind >= 0 else i, j + 1, last))
            if behind < 0:
                return tuple(reversed(found))
            j, m, s = behind, m - last, s if self.rules.stages is None else s - 1


def spread(
    parts: Sequence[Part], components: Sequence[object]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """The stages of the lowest level with the devices of each: (first layer, one past the last,
    devices).

    Copies of a stage in several components are numbered round them, so that a micro-batch that goes
    to the n-th copies stays in one component all the way.

    >>> spread([Part(0, 4, 2, (Part(0, 3, 1), Part(3, 4, 1))), Part(4, 5, 1, (Part(4, 5, 2),))], [[0, 1], [2, 3], [4, 5]])
    [(0, 3, (0, 2)), (3, 4, (1, 3)), (4, 5, (4, 5))]

    Args:
        parts: of the highest level.
        components: of the highest level: ranks, or lists of the components below.
    """
    stages: list[tuple[int, int, tuple[int, ...]]] = []
    used = 0
    for part in parts:
        own = components[used : used + part.replicas]
        used += part.replicas
        if not part.inner:
            stages.append(
                (part.start, part.stop, tuple(rank for rank in own if isinstance(rank, int)))
            )
            continue
        each = [
            spread(part.inner, component) for component in own if isinstance(component, Sequence)
        ]
        for copies in zip(*each, strict=True):
            start, stop, _ = copies[0]
            turns = zip(*(ranks for *_, ranks in copies), strict=True)
            stages.append((start, stop, tuple(rank for turn in turns for rank in turn)))
    return stages

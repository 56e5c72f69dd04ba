"""The search space of planner `auto`: every configuration with an estimate and a lower bound.

A configuration is a schedule with its number of stages and micro-batches on a shape of the cluster.
Estimates order the search; lower bounds let it skip configurations without simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from penstock.errors import ScheduleError
from penstock.plan.plan import Option
from penstock.profile.profile import PHASES
from penstock.schedule.catalogue import ScheduleFacts, schedule
from penstock.search.request import PlanRequest
from penstock.search.shapes import Shape
from penstock.simulate.gradient_sync import all_reduce_seconds

#: Numbers of stages per rank that are tried, for schedules that take any number.
STAGES_PER_RANK = (2, 3, 4)


@dataclass(frozen=True)
class Configuration:
    """A schedule with its numbers of stages and micro-batches on a shape.

    Attributes:
        shape: the pipelines and their devices.
        schedule: name of the schedule.
        stages: number of stages.
        micro_batches: number of micro-batches, of all pipelines together.
        options: options of the schedule, without the number of pipelines.
        estimate_s: estimated seconds per step, by which configurations are ordered.
        bound_s: lower bound in seconds per step over all cuts.
    """

    shape: Shape
    schedule: str
    stages: int
    micro_batches: int
    options: tuple[tuple[str, Option], ...]
    estimate_s: float
    bound_s: float

    @property
    def all_options(self) -> tuple[tuple[str, Option], ...]:
        """The options of the schedule, with the number of pipelines if there are several."""
        if self.shape.pipelines == 1:
            return self.options
        return (("replicas", self.shape.pipelines), *self.options)


def layouts(facts: ScheduleFacts, ranks: int) -> list[tuple[int, tuple[tuple[str, Option], ...]]]:
    """Return the numbers of stages that a schedule can have on `ranks` ranks, each with the options
    that select it. On one rank that is one stage at the most: several would do the same.
    """
    if facts.stages_per_rank == "chunks":
        chunk_counts = STAGES_PER_RANK if ranks > 1 else (1,)
        return [(chunks * ranks, (("chunks", chunks),)) for chunks in chunk_counts]
    if ranks == 1 and facts.stages_per_rank in ("2 x waves", "2"):
        return []
    if facts.stages_per_rank == "2 x waves":
        return [(2 * waves * ranks, (("waves", waves),)) for waves in (1, 2)]
    if facts.stages_per_rank == "2":
        # Some of these families need as many stages as ranks, others twice as many. The facts do
        # not tell which; the family refuses the wrong one.
        return [(ranks, ()), (2 * ranks, ())] if ranks % 2 == 0 else [(2 * ranks, ())]
    return [(ranks, ())]


def _distinct_on_one_stage(families: Sequence[ScheduleFacts]) -> list[ScheduleFacts]:
    """Return one schedule for each behaviour that differs when the whole model is one stage:
    whether it splits backwards, whether it flushes, and its weight rule.
    """
    kinds: dict[object, ScheduleFacts] = {}
    for facts in sorted(families, key=lambda facts: facts.name):
        if facts.stages_per_rank == "1":
            kinds.setdefault((facts.splits_backward, facts.synchronous, facts.weights), facts)
    return list(kinds.values()) or list(families[:1])


class SearchSpace:
    """All configurations of a request.

    The values that bounds are computed from are cached per kind of device and micro-batch size.
    """

    def __init__(self, request: PlanRequest, shapes: list[Shape]) -> None:
        self.request, self.shapes = request, shapes
        self._phase_seconds: dict[tuple[int, int], np.ndarray] = {}
        self._fastest_paths: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}
        self._gradient_sync: dict[Shape, float] = {}
        self._shared_work: dict[tuple[tuple[tuple[int, int], ...], int], float] = {}

    @cached_property
    def configurations(self) -> list[Configuration]:
        """All configurations, best estimate first."""
        unsorted = [
            configuration for shape in self.shapes for configuration in self._of_shape(shape)
        ]
        return sorted(unsorted, key=_order)

    @cached_property
    def leading(self) -> frozenset[str]:
        """The schedules that represent all others in the first scan.

        One synchronous and one asynchronous schedule: 1F1B and its asynchronous counterpart
        PipeDream where they are allowed, else the one with the best estimate.
        """
        leading = set()
        for synchronous, preferred in ((True, "1f1b"), (False, "pipedream")):
            allowed = {
                facts.name for facts in self.request.families() if facts.synchronous is synchronous
            }
            names = [
                configuration.schedule
                for configuration in self.configurations
                if configuration.schedule in allowed
            ]
            if names:
                leading.add(preferred if preferred in names else names[0])
        return frozenset(leading)

    @cached_property
    def least_s(self) -> float:
        """Lower bound in seconds per step over all cuts and replications: all work, divided evenly
        among all devices.
        """
        bounds = [
            count * self._load(shape, count).cluster_share_s
            # Any shape: the share of the whole cluster is the same for all.
            for shape in self.shapes[:1]
            for count in self.request.micro_batch_counts(self.request.cluster.ranks)
        ]
        return min(bounds, default=0.0)

    def _of_shape(self, shape: Shape) -> Iterator[Configuration]:
        """Yield all configurations on one shape."""
        request, layers = self.request, len(self.request.profile)
        counts = sorted({*request.micro_batch_counts(shape.pipelines), *self._multiples(shape)})
        families = request.families()
        if shape.ranks == 1:
            families = tuple(_distinct_on_one_stage(families))
        variants = [
            (facts, *layout) for facts in families for layout in layouts(facts, shape.ranks)
        ]
        for micro_batches in counts:
            if micro_batches < shape.pipelines:
                continue
            load = self._load(shape, micro_batches)
            for facts, stages, options in variants:
                if not 1 <= stages <= layers or request.stages not in (None, stages):
                    continue
                estimate, bound = _estimate_and_bound(load, facts, stages)
                yield Configuration(
                    shape, facts.name, stages, micro_batches, options, estimate, bound
                )

    def estimate_and_bound(
        self, shape: Shape, micro_batches: int, facts: ScheduleFacts, stages: int
    ) -> tuple[float, float]:
        """Return an estimate and a lower bound in seconds per step, over all cuts."""
        load = self._load(shape, micro_batches)
        if self.request.sharding.zero >= 2:
            # Messages of these levels run beside the ops.
            load = replace(load, after_s=0.0)
        return _estimate_and_bound(load, facts, stages)

    def _multiples(self, shape: Shape) -> Iterator[int]:
        """Yield the numbers of micro-batches that some schedules need: per pipeline, multiples of
        its ranks.
        """
        if self.request.micro_batches is None:
            for multiple in (1, 2, 4):
                count = multiple * shape.ranks * shape.pipelines
                # With 64 micro-batches per pipeline, filling and draining are a small part of a
                # step already.
                if count <= min(self.request.batch, 64 * shape.pipelines):
                    yield count

    def _seconds(self, rank: int, micro_batches: int) -> np.ndarray:
        """Return the seconds of each phase of each layer for one micro-batch on one device, on
        average over a batch, shape (4, layers).
        """
        key = id(self.request.profile_of(rank)), micro_batches
        if key not in self._phase_seconds:
            self._phase_seconds[key] = np.array(
                [self.request.mean_seconds(rank, phase, micro_batches) for phase in PHASES]
            )
        return self._phase_seconds[key]

    def _fastest_path(self, kinds: Sequence[int], micro_batches: int) -> tuple[float, float]:
        """Return lower bounds in seconds of a micro-batch's forward through all layers, and of its
        forward and backward; of the smallest micro-batch of a batch.

        Every layer counts with the device that is fastest for it, which may differ from layer to
        layer, and with a split backward where that is faster.
        """
        key = tuple(kinds), micro_batches
        if key not in self._fastest_paths:
            samples = self.request.batch // micro_batches
            profiles = [self.request.profile_of(rank) for rank in kinds]
            rows = [
                np.array([profile.seconds(phase, samples) for phase in PHASES])
                for profile in profiles
            ]
            forwards = [f for f, *_ in rows]
            round_trips = [f + np.minimum(b, i) for f, b, i, _ in rows]
            self._fastest_paths[key] = (
                float(sum(np.min(forwards, axis=0))),
                float(sum(np.min(round_trips, axis=0))),
            )
        return self._fastest_paths[key]

    def _shared_s(self, ranks: Sequence[int], micro_batches: int) -> float:
        """Return a lower bound in seconds per device if these ranks share the work of a micro-batch
        in any proportion.

        On all layers together, a device of another kind is faster than the first kind by at most
        its speed-up on the layer that suits it best.
        """
        counts = Counter(id(self.request.profile_of(rank)) for rank in ranks)
        key = tuple(counts.items()), micro_batches
        if key not in self._shared_work:
            kinds = self._kinds(ranks)
            layer_seconds = []
            for rank in kinds:
                f, b, i, w = self._seconds(rank, micro_batches)
                layer_seconds.append(f + np.minimum(b, i + w))
            reference = layer_seconds[0]
            nonzero = reference > 0
            rate = 0.0
            for rank, seconds in zip(kinds, layer_seconds, strict=True):
                # A layer that takes no time on this kind counts as very fast, which a bound may do.
                speed_ups = reference[nonzero] / np.maximum(seconds[nonzero], 1e-300)
                devices = counts[id(self.request.profile_of(rank))]
                rate += devices * float(np.max(speed_ups, initial=0.0))
            self._shared_work[key] = float(reference.sum()) / rate if rate else 0.0
        return self._shared_work[key]

    def _kinds(self, ranks: Sequence[int]) -> list[int]:
        """Return the first of these ranks with each profile."""
        first_of: dict[int, int] = {}
        # From the last rank on, so that the first with a profile is what stays.
        for rank in reversed(ranks):
            first_of[id(self.request.profile_of(rank))] = rank
        return list(first_of.values())[::-1]

    def _load(self, shape: Shape, micro_batches: int) -> Load:
        """Return the load that one of `micro_batches` micro-batches puts on a shape."""
        request = self.request
        kinds = self._kinds(shape.first)
        forward_s, round_trip_s = self._fastest_path(kinds, micro_batches)
        update_s_per_byte = min(request.profile_of(rank).update_s_per_byte for rank in kinds)
        update_s = request.profile.parameter_bytes * update_s_per_byte / shape.ranks
        slowdown = self._slowdown(shape.devices)
        all_ranks = range(request.cluster.ranks)
        return Load(
            ranks=shape.ranks,
            pipelines=shape.pipelines,
            micro_batches=micro_batches,
            even_s=slowdown * self._even_share_s(shape.first, micro_batches),
            least_s=slowdown * self._shared_s(shape.first, micro_batches),
            forward_s=slowdown * forward_s,
            round_trip_s=slowdown * round_trip_s,
            after_s=slowdown * update_s + self._gradient_sync_s(shape),
            cluster_share_s=self._least_slowdown * self._shared_s(all_ranks, micro_batches),
            equal_sizes=request.batch % micro_batches == 0,
        )

    def _even_share_s(self, ranks: Sequence[int], micro_batches: int) -> float:
        """Estimate the seconds per device if these ranks share the work of a micro-batch in
        proportion to their speeds; 0 if the model takes no time on one of them.

        Their speeds add up: 1 / (1 / t_0 + 1 / t_1 + ...), with t_r the seconds of the whole model
        on rank r alone.
        """
        speed_of_kind: dict[int, float] = {}
        for rank in self._kinds(ranks):
            forward_backward = self._seconds(rank, micro_batches)[:2]
            model_s = float(forward_backward.sum())
            if not model_s:
                return 0.0
            speed_of_kind[id(self.request.profile_of(rank))] = 1 / model_s
        return 1 / sum(speed_of_kind[id(self.request.profile_of(rank))] for rank in ranks)

    def _slowdown(self, busy: Sequence[int]) -> float:
        """Return the least slowdown of these ranks while all of them are busy."""
        cluster = self.request.cluster
        if all(device.together == 1 for device in cluster.devices):
            return 1.0
        return min(cluster.slowdown(rank, busy) for rank in busy)

    @cached_property
    def _least_slowdown(self) -> float:
        """Lower bound of the slowdown of an even share of the cluster's work, over all sets of
        ranks that may be busy.

        With all n ranks of a node busy, an even share takes as many times as long as their slowdown
        says. With one of them busy it takes n times as long, since that rank does the work of all.
        Where the ranks of a node are of several kinds, the fastest may be busy alone and do most of
        the work anyway: the bound is 1.
        """
        cluster = self.request.cluster
        least = math.inf
        for node in range(cluster.nodes):
            ranks = cluster.ranks_of_node(node)
            if len(self._kinds(ranks)) > 1:
                return 1.0
            all_busy = cluster.slowdown(ranks[0], ranks)
            one_busy = len(ranks)
            least = min(least, all_busy, one_busy)
        return least

    def _gradient_sync_s(self, shape: Shape) -> float:
        """Estimate the seconds of the gradient all-reduce among the replicas of a stage."""
        if shape.pipelines == 1:
            return 0.0
        if shape not in self._gradient_sync:
            stage_bytes = self.request.profile.parameter_bytes / shape.ranks
            self._gradient_sync[shape] = all_reduce_seconds(
                shape.devices[:: shape.ranks], stage_bytes, self.request.cluster
            )
        return self._gradient_sync[shape]


def _order(configuration: Configuration) -> tuple[float, int, int, str, int]:
    """Return the sort key of a configuration: its estimate, then its numbers, for a fixed order."""
    return (
        configuration.estimate_s,
        configuration.micro_batches,
        configuration.stages,
        configuration.schedule,
        configuration.shape.pipelines,
    )


@dataclass(frozen=True)
class Load:
    """Seconds that one micro-batch costs on a shape, and the numbers of the configuration.

    Attributes:
        ranks: ranks per pipeline.
        pipelines: number of pipelines.
        micro_batches: number of micro-batches, of all pipelines together.
        even_s: seconds on each rank of a pipeline if all share the work evenly.
        least_s: lower bound of the seconds on each rank of a pipeline.
        forward_s: lower bound of its forward through all stages.
        round_trip_s: lower bound of its forward and backward through all stages.
        after_s: seconds after the last backward of a step: gradient sync and update.
        cluster_share_s: lower bound of the seconds per device if the whole cluster shares the work.
        equal_sizes: whether all micro-batches have the same number of samples.
    """

    ranks: int
    pipelines: int
    micro_batches: int
    even_s: float
    least_s: float
    forward_s: float
    round_trip_s: float
    after_s: float
    cluster_share_s: float
    equal_sizes: bool = True


def _estimate_and_bound(load: Load, facts: ScheduleFacts, stages: int) -> tuple[float, float]:
    """Return an estimate and a lower bound in seconds per step, over all cuts."""
    per_pipeline = -(-load.micro_batches // load.pipelines)
    if not facts.synchronous:
        # Batches may take turns on replicas, so that more ranks than those of the shape work.
        bound = load.micro_batches * load.cluster_share_s
        return max(per_pipeline * load.even_s, bound), bound
    ramp = (load.ranks - 1) / max(1, stages // load.ranks)
    estimate = (per_pipeline + ramp) * load.even_s + load.after_s
    bound = load.micro_batches / load.pipelines * load.least_s
    if _slices_micro_batches(facts.name):
        return max(estimate, bound), bound
    bound = max(bound, load.round_trip_s)
    if facts.stages_per_rank == "1":
        # Weight gradients of a split backward can run during the drain: only the fill counts.
        ramp_path = load.forward_s if facts.splits_backward else load.round_trip_s
        # The pipeline with the most micro-batches may have the small ones: of unequal ones it is
        # certain only that some pipeline has the mean work.
        mean_count = load.micro_batches / load.pipelines
        count = per_pipeline if load.equal_sizes else mean_count
        bound = max(bound, _bound_with_ramp(count, load, ramp_path))
    return max(estimate, bound), bound


@cache
def _slices_micro_batches(name: str) -> bool:
    """Return whether a schedule cuts micro-batches into slices, so that the path of a slice is
    shorter than that of a micro-batch. Unknown counts as yes.
    """
    try:
        return schedule(name, 2, 2).slicing is not None
    except ScheduleError:
        return True


def _bound_with_ramp(micro_batches: float, load: Load, path: float) -> float:
    """Return a lower bound over all cuts into one stage per rank, filling and draining included.

    Rank s is idle while its first micro-batch passes the stages before it and, after its last
    micro-batch, while that returns through them. This takes a share q of these stages' work: `path`
    relative to the work of the whole model.

    For stage times t and their prefix sums P, max_s (q P_s + m t_s) is least where all are equal:
    C, with t_s = (C - q P_s) / m. They sum to the work w for C = w q / (1 - (1 - q / m)^p).
    """
    work = load.least_s * load.ranks
    share = min(path / work, 1.0) if work else 0.0
    if not share:
        return 0.0
    return work * share / (1 - (1 - share / micro_batches) ** load.ranks)

"""HetPipe's planner: virtual workers of mixed devices, each cut for its slowest stage under memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np

from penstock.errors import PlanError
from penstock.plan.plan import Option, Plan
from penstock.schedule.families.pipedream import falling
from penstock.search.catalogue import register
from penstock.search.planners.hetpipe_allocation import Allocation, allocations, orders
from penstock.search.planners.layer_costs import LayerCosts, Numbers, over_ranges
from penstock.search.planners.scope import check_scope, quickest
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of


@final
@dataclass(frozen=True)
class Found:
    """Virtual workers, the cut of all of them, and what it takes.

    `slowest_s` is the slowest stage's time for a micro-batch, of any virtual worker, and `step_s`
    what that makes of a batch.
    """

    policy: str
    devices: Allocation
    lengths: tuple[int, ...]
    micro_batches: int
    in_flight: int
    slowest_s: float

    @property
    def step_s(self) -> float:
        """Seconds for a batch once all are full: they take batches, or a batch's micro-batches, in
        turn.
        """
        turns = -(-len(self.lengths) // self.in_flight)
        return self.micro_batches * self.slowest_s * turns / len(self.devices)


@register("hetpipe", source="Park et al. 2020, HetPipe (arXiv 2005.14038), sections 4 and 5")
def hetpipe(request: PlanRequest) -> Plan:
    """Virtual workers by node partition, by equal distribution and by hybrid distribution, their
    devices in every order, cut so that the slowest stage is fastest and all fits; of those the best
    in simulation.

    The paper cuts every virtual worker for itself. Here all have the same cut, since a stage's
    copies have the same weights here: the cut that is best for the slowest of them. Its integer
    program is a dynamic program on the chain, and as exact.

    With `asynchronous` the schedule is the paper's own: virtual workers train on batches in turn,
    each with up to N_m in flight, and tell each other after every wave. Without, they are pipelines
    that share each batch, "1f1b" with a flush.

    Raises:
        PlanError: the devices make no virtual workers of equal size; or nothing fits.
    """
    name = "hetpipe" if request.asynchronous else "1f1b"
    check_scope(request, "hetpipe", name)
    found = sorted(
        _candidates(request), key=lambda each: (each.step_s, len(each.lengths), each.micro_batches)
    )
    if not found:
        stages = "" if request.stages is None else f" of {request.stages} devices"
        raise PlanError(
            f"hetpipe finds no virtual workers{stages} on {request.cluster.name} whose stages fit: they need equally many "
            "devices each, and memory for their stages with one micro-batch in flight; it does not recompute"
        )
    return best_of(
        request, quickest([_proposal(each, asynchronous=request.asynchronous) for each in found])
    )


def _proposal(found: Found, *, asynchronous: bool) -> Proposal:
    virtual_workers = len(found.devices)
    options: tuple[tuple[str, Option], ...] = (
        (("replicas", virtual_workers),) if virtual_workers > 1 else ()
    )
    if asynchronous:
        options = (("virtual_workers", virtual_workers), ("in_flight", found.in_flight))
    return Proposal(
        found.lengths,
        "hetpipe" if asynchronous else "1f1b",
        found.micro_batches,
        options,
        devices=tuple(rank for own in found.devices for rank in own),
        objective=Objective(f"seconds of a batch, {found.policy}", found.step_s, "s"),
    )


def _candidates(request: PlanRequest) -> Iterator[Found]:
    """The best order of every allocation with every number of micro-batches."""
    layers = len(request.profile) if request.stages is None else request.stages
    speeds = _speeds(request)
    for policy, allocation in allocations(request.cluster, speeds, layers):
        stages, virtual_workers = len(allocation[0]), len(allocation)
        if request.stages not in (None, stages) or virtual_workers > request.copies_allowed:
            continue
        arranged = orders(request.cluster, allocation, speeds)
        for count in _counts(request, virtual_workers):
            task = _Task(request, count)
            cuts = [cut for order in arranged if (cut := task.cut(policy, order)) is not None]
            if cuts:
                yield min(cuts, key=lambda each: each.step_s)


def _counts(request: PlanRequest, virtual_workers: int) -> Iterable[int]:
    """Numbers of micro-batches: of a batch that virtual workers share, as many for each of them."""
    if request.asynchronous:
        return request.micro_batch_counts()
    if request.micro_batches is not None:
        return (request.micro_batches,) if request.micro_batches % virtual_workers == 0 else ()
    counts = (virtual_workers * each for each in request.micro_batch_counts())
    return [count for count in counts if count <= request.batch]


def _speeds(request: PlanRequest) -> list[float]:
    """Seconds that every rank's device takes for a sample of the whole model."""
    own = {
        id(profile): sum(profile.step_seconds(1))
        for profile in map(request.profile_of, range(request.cluster.ranks))
    }
    return [own[id(request.profile_of(rank))] for rank in range(request.cluster.ranks)]


class _Task:
    """Costs of all ranges of layers at one size of micro-batch."""

    def __init__(self, request: PlanRequest, micro_batches: int) -> None:
        self.request, self.micro_batches = request, micro_batches
        samples = request.batch / micro_batches
        self.seconds: dict[int, Numbers] = {}
        for profile in {
            id(each): each for each in map(request.profile_of, range(request.cluster.ranks))
        }.values():
            self.seconds[id(profile)] = over_ranges(LayerCosts.of(profile, samples).seconds)
        self.costs = LayerCosts.of(request.profile, samples)
        # Of a batch in nearly equal parts memory has to hold the largest.
        largest = LayerCosts.of(request.profile, -(-request.batch // micro_batches))
        self.kept, self.weights = (
            over_ranges(largest.activation_bytes),
            over_ranges(largest.parameter_bytes),
        )

    def cut(self, policy: str, order: Allocation) -> Found | None:
        """The best cut with as many in flight as fit, up to the number of stages; None if not even
        one fits.
        """
        stages = len(order[0])
        times = self.times(order)
        # A flush needs no limit: 1F1B has stage s run no further ahead anyway.
        for count in range(stages, 0, -1) if self.request.asynchronous else (stages,):
            lengths, slowest = minimax(
                times, [self.fits(order, stage, count) for stage in range(stages)]
            )
            if lengths:
                return Found(policy, order, lengths, self.micro_batches, count, slowest)
        return None

    def times(self, order: Allocation) -> list[Numbers]:
        """Per stage, [first layer, last layer]: computing and receiving, on the slowest virtual
        worker's device.
        """
        output = np.asarray(self.costs.output_bytes)
        cluster, stages = self.request.cluster, len(order[0])
        alike = {
            (
                *(id(self.request.profile_of(rank)) for rank in own),
                *(cluster.link(a, b) for a, b in pairwise(own)),
            ): own
            for own in order
        }
        found = []
        for stage in range(stages):
            rows = []
            for own in alike.values():
                taken = self.seconds[id(self.request.profile_of(own[stage]))].copy()
                if stage:
                    link = cluster.link(own[stage - 1], own[stage])
                    taken[1:] += (link.latency_s + output[:-1] / link.bandwidth_bytes_per_s)[
                        :, None
                    ]
                if stage + 1 < stages:
                    link = cluster.link(own[stage], own[stage + 1])
                    taken += (link.latency_s + output / link.bandwidth_bytes_per_s)[None, :]
                rows.append(taken)
            found.append(np.max(rows, axis=0))
        return found

    def fits(
        self, order: Allocation, stage: int, count: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """[first layer, last layer]: whether the stage fits its devices, so many micro-batches
        being in flight on the first stage.

        What waits for its backward is kept, and a version of the weights for every batch of it;
        gradients and the optimizer's numbers besides.
        """
        stages = len(order[0])
        ahead = count - stage if count >= stages else falling(stages, count)[stage]
        if not self.request.asynchronous:
            ahead = min(ahead, -(-self.micro_batches // len(order)))
        versions = -(-ahead // self.micro_batches) if self.request.asynchronous else 1
        limit = min(self.request.memory_bytes(own[stage]) for own in order)
        besides = self.request.held_per_parameter_byte - 1
        return ahead * self.kept + (versions + besides) * self.weights <= limit


def minimax(
    times: Sequence[Numbers], fits: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]
) -> tuple[tuple[int, ...], float]:
    """Lengths of the stages whose slowest is fastest, and its time; no lengths where none fit.

    Args:
        times: per stage, [first layer, last layer], seconds; infinite where last < first.
        fits: per stage, likewise, whether it may have these layers.
    """
    layers = len(times[0])
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    starts = []
    for own, may in zip(times, fits, strict=True):
        found = np.maximum(best[:-1, None], np.where(may, own, np.inf))
        starts.append(found.argmin(axis=0))
        best = np.concatenate(([np.inf], found.min(axis=0)))
    if not np.isfinite(best[-1]):
        return (), float("inf")
    lengths, stop = [], layers
    for own_starts in reversed(starts):
        start = int(own_starts[stop - 1])
        lengths.append(stop - start)
        stop = start
    return tuple(reversed(lengths)), float(best[-1])

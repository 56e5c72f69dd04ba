"""HetPipe's planner: virtual workers of mixed devices, cut for the slowest stage within memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import final

import numpy as np

from penstock.errors import PlanError
from penstock.plan.plan import Option, Plan
from penstock.schedule.families.pipedream import falling
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.hetpipe_allocation import Allocation, allocations, orders
from penstock.search.planners.layer_costs import LayerCosts, Numbers, over_ranges
from penstock.search.planners.scope import check_scope, quickest
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest


@final
@dataclass(frozen=True)
class Candidate:
    """Virtual workers and the cut that all of them have.

    Attributes:
        policy: name of the allocation policy.
        devices: the devices of every virtual worker.
        lengths: layers of every stage.
        micro_batches: micro-batches of a batch.
        in_flight: micro-batches in flight in one virtual worker.
        slowest_s: seconds of the slowest stage of any virtual worker, per micro-batch.
    """

    policy: str
    devices: Allocation
    lengths: tuple[int, ...]
    micro_batches: int
    in_flight: int
    slowest_s: float

    @property
    def step_s(self) -> float:
        """Seconds per batch once all virtual workers are full: they take batches, or the
        micro-batches of a batch, in turn.
        """
        turns = -(-len(self.lengths) // self.in_flight)
        return self.micro_batches * self.slowest_s * turns / len(self.devices)


@register("hetpipe", source="Park et al. 2020, HetPipe (arXiv 2005.14038), sections 4 and 5")
def hetpipe(request: PlanRequest) -> Plan:
    """Return the plan that simulates fastest among virtual workers by node partition, equal
    distribution and hybrid distribution, with their devices in every order, cut so that the slowest
    stage is fastest and all fits.

    The paper cuts every virtual worker separately. In this library all have the same cut, since the
    replicas of a stage have the same weights: the cut that is best for the slowest of them. The
    paper's integer program is a dynamic program on the chain here, and equally exact.

    With `asynchronous` the schedule is the paper's own: virtual workers train on batches in turn,
    each with up to N_m in flight, and exchange their updates after every wave. Without, they are
    pipelines that share each batch, "1f1b" with a flush.

    Raises:
        PlanError: the devices do not form virtual workers of equal size; or nothing fits.
    """
    name = "hetpipe" if request.asynchronous else "1f1b"
    check_scope(request, "hetpipe", name)
    candidates = sorted(
        _candidates(request),
        key=lambda candidate: (
            candidate.step_s,
            len(candidate.lengths),
            candidate.micro_batches,
        ),
    )
    if not candidates:
        stages = "" if request.stages is None else f" of {request.stages} devices"
        raise PlanError(
            f"hetpipe finds no virtual workers{stages} on {request.cluster.name} whose stages fit: "
            "they need equally many devices each, and memory for their stages with one micro-batch "
            "in flight; it does not recompute"
        )
    proposals = [
        _proposal(candidate, asynchronous=request.asynchronous) for candidate in candidates
    ]
    return best_plan(request, quickest(proposals))


def _proposal(candidate: Candidate, *, asynchronous: bool) -> Proposal:
    """Return a candidate as a proposal."""
    virtual_workers = len(candidate.devices)
    options: tuple[tuple[str, Option], ...] = (
        (("replicas", virtual_workers),) if virtual_workers > 1 else ()
    )
    if asynchronous:
        options = (("virtual_workers", virtual_workers), ("in_flight", candidate.in_flight))
    return Proposal(
        candidate.lengths,
        "hetpipe" if asynchronous else "1f1b",
        candidate.micro_batches,
        options,
        devices=tuple(chain.from_iterable(candidate.devices)),
        objective=Objective(f"seconds of a batch, {candidate.policy}", candidate.step_s, "s"),
    )


def _candidates(request: PlanRequest) -> Iterator[Candidate]:
    """Yield the best order of every allocation with every number of micro-batches."""
    layers = len(request.profile) if request.stages is None else request.stages
    speeds = _speeds(request)
    for policy, allocation in allocations(request.cluster, speeds, layers):
        stages, virtual_workers = len(allocation[0]), len(allocation)
        if request.stages not in (None, stages) or virtual_workers > request.copies_allowed:
            continue
        device_orders = orders(request.cluster, allocation, speeds)
        for count in _counts(request, virtual_workers):
            cutter = _Cutter(request, count)
            cuts = [cutter.cut(policy, order) for order in device_orders]
            possible = [candidate for candidate in cuts if candidate is not None]
            if possible:
                yield min(possible, key=lambda candidate: candidate.step_s)


def _counts(request: PlanRequest, virtual_workers: int) -> Iterable[int]:
    """Return the numbers of micro-batches to try: if virtual workers share a batch, equally many
    for each of them.
    """
    if request.asynchronous:
        return request.micro_batch_counts()
    if request.micro_batches is not None:
        return (request.micro_batches,) if request.micro_batches % virtual_workers == 0 else ()
    counts = (virtual_workers * count for count in request.micro_batch_counts())
    return [count for count in counts if count <= request.batch]


def _speeds(request: PlanRequest) -> list[float]:
    """Return for every rank the seconds that its device takes for a sample of the whole model."""
    profiles = [request.profile_of(rank) for rank in range(request.cluster.ranks)]
    kinds = {id(profile): profile for profile in profiles}
    seconds = {key: sum(profile.step_seconds(1)) for key, profile in kinds.items()}
    return [seconds[id(profile)] for profile in profiles]


class _Cutter:
    """Cuts for one size of micro-batch, with the costs of all ranges of layers."""

    def __init__(self, request: PlanRequest, micro_batches: int) -> None:
        self.request, self.micro_batches = request, micro_batches
        samples = request.batch / micro_batches
        self.seconds: dict[int, Numbers] = {}
        for rank in range(request.cluster.ranks):
            profile = request.profile_of(rank)
            if id(profile) not in self.seconds:
                self.seconds[id(profile)] = over_ranges(LayerCosts.of(profile, samples).seconds)
        self.costs = LayerCosts.of(request.profile, samples)
        # If a batch does not divide evenly, memory has to hold the largest part.
        largest = LayerCosts.of(request.profile, -(-request.batch // micro_batches))
        self.activations = over_ranges(largest.activation_bytes)
        self.weights = over_ranges(largest.parameter_bytes)

    def cut(self, policy: str, order: Allocation) -> Candidate | None:
        """Return the best cut with as many micro-batches in flight as fit, up to the number of
        stages; None if not even one fits.
        """
        stages = len(order[0])
        times = self.times(order)
        # A flush needs no limit: in 1F1B stage s runs no further ahead anyway.
        counts = range(stages, 0, -1) if self.request.asynchronous else (stages,)
        for count in counts:
            fits = [self.fits(order, stage, count) for stage in range(stages)]
            lengths, slowest = minimax(times, fits)
            if lengths:
                return Candidate(policy, order, lengths, self.micro_batches, count, slowest)
        return None

    def times(self, order: Allocation) -> list[Numbers]:
        """Return per stage, [first layer, last layer]: seconds of compute and of its transfers, on
        the virtual worker that is slowest at it.
        """
        output = np.asarray(self.costs.output_bytes)
        cluster, stages = self.request.cluster, len(order[0])
        workers = self._distinct_workers(order)
        times = []
        for stage in range(stages):
            rows = []
            for devices in workers:
                seconds = self.seconds[id(self.request.profile_of(devices[stage]))].copy()
                if stage:
                    link = cluster.link(devices[stage - 1], devices[stage])
                    receive_s = link.latency_s + output[:-1] / link.bandwidth_bytes_per_s
                    seconds[1:] += receive_s[:, None]
                if stage + 1 < stages:
                    link = cluster.link(devices[stage], devices[stage + 1])
                    send_s = link.latency_s + output / link.bandwidth_bytes_per_s
                    seconds += send_s[None, :]
                rows.append(seconds)
            times.append(np.max(rows, axis=0))
        return times

    def _distinct_workers(self, order: Allocation) -> list[tuple[int, ...]]:
        """Return one virtual worker of each kind: those with equal profiles and links are alike."""
        kinds: dict[object, tuple[int, ...]] = {}
        for devices in order:
            profiles = tuple(id(self.request.profile_of(rank)) for rank in devices)
            links = tuple(self.request.cluster.link(a, b) for a, b in pairwise(devices))
            kinds[profiles, links] = devices
        return list(kinds.values())

    def fits(
        self, order: Allocation, stage: int, count: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return [first layer, last layer]: whether the stage fits its devices, with `count`
        micro-batches in flight on the first stage.

        The stage holds the activations of micro-batches that wait for their backward, a version of
        the weights for every batch of these, gradients and optimizer states.
        """
        stages = len(order[0])
        ahead = count - stage if count >= stages else falling(stages, count)[stage]
        if not self.request.asynchronous:
            ahead = min(ahead, -(-self.micro_batches // len(order)))
        versions = -(-ahead // self.micro_batches) if self.request.asynchronous else 1
        limit = min(self.request.memory_bytes(devices[stage]) for devices in order)
        other_state_factor = self.request.state_per_parameter_byte - 1
        return ahead * self.activations + (versions + other_state_factor) * self.weights <= limit


def minimax(
    times: Sequence[Numbers], fits: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]
) -> tuple[tuple[int, ...], float]:
    """Return the lengths of the stages whose slowest is fastest, and its time; no lengths if none
    fit.

    Args:
        times: per stage, [first layer, last layer], seconds; infinite where last < first.
        fits: per stage, [first layer, last layer], whether it may have these layers.
    """
    layers = len(times[0])
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    starts = []
    for stage_times, stage_fits in zip(times, fits, strict=True):
        slowest = np.maximum(best[:-1, None], np.where(stage_fits, stage_times, np.inf))
        starts.append(slowest.argmin(axis=0))
        best = np.concatenate(([np.inf], slowest.min(axis=0)))
    if not np.isfinite(best[-1]):
        return (), float("inf")
    lengths, stop = [], layers
    for stage_starts in reversed(starts):
        start = int(stage_starts[stop - 1])
        lengths.append(stop - start)
        stop = start
    return tuple(reversed(lengths)), float(best[-1])

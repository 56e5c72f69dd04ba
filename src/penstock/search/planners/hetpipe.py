"""HetPipe's planner: virtual workers of mixed devices, cut for the slowest stage within memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.partition.chain_dp import MAXIMUM, at_starts, best_cut, stage_sums
from penstock.plan.plan import Plan
from penstock.schedule.families.pipedream import falling
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.hetpipe_allocation import Allocation, allocations, orders
from penstock.search.planners.layer_costs import LayerCosts, Numbers, before
from penstock.search.planners.scope import check_scope, quickest
from penstock.search.proposal import Objective, Proposal, replica_options
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
        # With fewer micro-batches in flight than stages, the slowest stage works in one of these
        # turns only.
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
    options = replica_options(virtual_workers)
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
    model_s = _model_seconds(request)
    for policy, allocation in allocations(request.cluster, model_s, layers):
        stages, virtual_workers = len(allocation[0]), len(allocation)
        if request.stages not in (None, stages) or virtual_workers > request.copies_allowed:
            continue
        device_orders = orders(request.cluster, allocation, model_s)
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


def _model_seconds(request: PlanRequest) -> list[float]:
    """Return for every rank the seconds that its device takes for a sample of the whole model."""
    profiles = [request.profile_of(rank) for rank in range(request.cluster.ranks)]
    kinds = {id(profile): profile for profile in profiles}
    seconds = {key: sum(profile.step_seconds(1)) for key, profile in kinds.items()}
    return [seconds[id(profile)] for profile in profiles]


class _Cutter:
    """Cuts for one size of micro-batch, with the costs of all stages as tables of `chain_dp`."""

    def __init__(self, request: PlanRequest, micro_batches: int) -> None:
        self.request, self.micro_batches = request, micro_batches
        samples = request.batch / micro_batches
        self.seconds: dict[int, Numbers] = {}
        for rank in range(request.cluster.ranks):
            profile = request.profile_of(rank)
            if id(profile) not in self.seconds:
                costs = LayerCosts.of(profile, samples)
                self.seconds[id(profile)] = stage_sums(before(costs.seconds), len(costs))
        self.costs = LayerCosts.of(request.profile, samples)
        # If a batch does not divide evenly, memory has to hold the largest part.
        largest = LayerCosts.of(request.profile, -(-request.batch // micro_batches))
        self.activations = stage_sums(before(largest.activation_bytes), len(largest))
        self.weights = stage_sums(before(largest.parameter_bytes), len(largest))

    def cut(self, policy: str, order: Allocation) -> Candidate | None:
        """Return the best cut with as many micro-batches in flight as fit, up to the number of
        stages; None if not even one fits.
        """
        stages = len(order[0])
        times = self.times(order)
        # A flush needs no limit: in 1F1B stage s runs no further ahead anyway.
        counts = range(stages, 0, -1) if self.request.asynchronous else (stages,)
        for count in counts:
            tables = []
            for stage in range(stages):
                tables.append(np.where(self.fits(order, stage, count), times[stage], np.inf))
            slowest, lengths = best_cut(tables.__getitem__, stages, len(self.costs), MAXIMUM)
            if lengths:
                return Candidate(policy, order, tuple(lengths), self.micro_batches, count, slowest)
        return None

    def times(self, order: Allocation) -> list[Numbers]:
        """Return per stage the table of its seconds of compute and transfers, on the virtual worker
        that is slowest at it.
        """
        output = np.asarray(self.costs.output_bytes)
        cluster, stages = self.request.cluster, len(order[0])
        workers = self._distinct_workers(order)
        times = []
        for stage in range(stages):
            rows = []
            for devices in workers:
                # A copy, since devices of one kind share the table.
                seconds = self.seconds[id(self.request.profile_of(devices[stage]))].copy()
                if stage:
                    link = cluster.link(devices[stage - 1], devices[stage])
                    receive_s = link.latency_s + output[:-1] / link.bandwidth_bytes_per_s
                    seconds += at_starts(np.array([0.0, *receive_s, 0.0]), len(output))
                if stage + 1 < stages:
                    link = cluster.link(devices[stage], devices[stage + 1])
                    send_s = link.latency_s + output / link.bandwidth_bytes_per_s
                    seconds += send_s[:, None]
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

    def fits(self, order: Allocation, stage: int, count: int) -> NDArray[np.bool_]:
        """Return the table of whether the stage fits its devices, with `count` micro-batches in
        flight on the first stage.

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

"""Piper's planner: stages, their devices, and recompute, with the least time per sample of the
slowest stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.partition.replica_search import seconds_of
from penstock.partition.replicated import replicated_table
from penstock.plan.plan import Plan
from penstock.schedule.recompute import Recompute
from penstock.search.catalogue import register
from penstock.search.planners.layer_costs import LayerCosts, Numbers
from penstock.search.planners.replicated_stages import (
    Ranges,
    check_size,
    least_memory,
    likely_counts,
    pack_devices,
    plan_of_least,
    replicated_proposal,
    slowest_bandwidth,
)
from penstock.search.planners.scope import check_alike, check_scope
from penstock.search.proposal import Objective, Proposal
from penstock.search.recompute.memory_profile import divide_room
from penstock.search.request import PlanRequest

#: Maximum number of table entries, layers^2 x devices: of one search, and of all together.
MOST_ENTRIES, ENTRIES_IN_ALL = 5e6, 1.2e7


@register(
    "piper", source="Tarnawski et al. 2021, Piper, section 4; github.com/msr-fiddle/piper, algo.cpp"
)
def piper(request: PlanRequest) -> Plan:
    """Return the plan with the least TPS (time per sample) of the slowest stage, each stage on any
    number of devices whose memory it fits.

    Piper's sample is a micro-batch here, and there is no tensor parallelism, so that a stage's
    layers a .. b - 1 on d devices take

        TPS = (compute + (2 (bytes in + bytes out) + 4 (d - 1) weights / N) / bandwidth) / d

    for N micro-batches, of which d is a divisor; 2 for activations and their gradients, 4 for
    summing gradients around a ring and back. The bandwidth is that of the slowest link. With s
    stages from this one to the last, ceil(s / d) micro-batches are in flight on each device. With
    recompute the forward counts twice, and only the stage's input is saved; recompute is one choice
    for the whole plan, since this library's runtime has no other. All numbers of micro-batches are
    searched, with and without recompute, and the best few are simulated under "1f1b".

    Raises:
        PlanError: another cut or schedule is requested, devices are of several kinds, the search is
            too large, or nothing fits.
    """
    check_scope(request, "piper", "1f1b")
    check_alike(request, "piper")
    entries = (len(request.profile) + 1) ** 2 * request.cluster.ranks
    check_size("piper", entries, MOST_ENTRIES, "layers^2 x devices")
    return plan_of_least(
        request,
        _proposals(request, entries),
        f"piper finds no way to put {len(request.profile)} layers on the devices of "
        f"{request.cluster.name}: no stages fit memory of {least_memory(request)} bytes with "
        "these numbers of micro-batches",
    )


def _proposals(request: PlanRequest, entries: float) -> Iterator[tuple[float, Proposal]]:
    """Yield one proposal per number of micro-batches and recompute, with an estimate of a step's
    seconds.
    """
    policies: tuple[Recompute, ...] = (Recompute.NEVER, Recompute.ALWAYS)
    if request.recompute != "auto":
        policies = (request.recompute,)
    for count in likely_counts(request, entries * len(policies), ENTRIES_IN_ALL):
        costs = LayerCosts.of(request.profile, request.batch / count)
        for recompute in policies:
            table, most_stages = tables(
                request, costs, count, recompute=recompute is not Recompute.NEVER
            )
            cut = replicated_table(
                table, exactly=False, stages=request.stages, most_stages=most_stages
            )
            if cut is None:
                continue
            slowest = max(seconds_of(table, cut))
            devices = pack_devices(request.cluster, [replicas for _, replicas in cut])
            objective = Objective("slowest stage's time per micro-batch", slowest, "s")
            proposal = replicated_proposal(cut, count, devices, objective)
            yield count * slowest + sum(costs.seconds), replace(proposal, recompute=recompute)


def tables(
    request: PlanRequest, costs: LayerCosts, count: int, *, recompute: bool
) -> tuple[Numbers, NDArray[np.int64]]:
    """Return the TPS of every stage on 1, 2, … devices; and the maximum number of stages from it to
    the last for which its memory suffices.

    Returns:
        Two arrays of shape (layers + 1, layers + 1, devices + 1), as `replicated_table` takes them.
    """
    ranges, bandwidth = Ranges(costs), slowest_bandwidth(request.cluster)
    layers, ranks = len(costs), request.cluster.ranks
    work = ranges.seconds + ranges.forward_s if recompute else ranges.seconds
    crossing = 2 * (ranges.input_bytes[:, None] + ranges.input_bytes[None, :])
    inputs = np.array(
        [request.batch / count * request.profile.input_bytes_per_sample, *costs.output_bytes]
    )
    # Recompute saves a stage's input only, and holds all activations of one micro-batch at a time.
    saved, working = ranges.activation_bytes, np.zeros_like(work)
    if recompute:
        saved, working = np.broadcast_to(inputs[:, None], work.shape), ranges.activation_bytes
    weights = request.state_per_parameter_byte * ranges.parameter_bytes
    room = least_memory(request) - weights - working
    in_flight = np.floor(divide_room(room, saved))
    table: Numbers = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    most_stages: NDArray[np.int64] = np.zeros(table.shape, np.int64)
    for replicas in range(1, min(ranks, request.copies_allowed, count) + 1):
        if count % replicas:
            continue
        synced = 4 * (replicas - 1) * ranges.parameter_bytes / count
        table[:, :, replicas] = (work + (crossing + synced) / bandwidth) / replicas
        most_stages[:, :, replicas] = np.clip(replicas * in_flight, 0, layers)
    table[np.tril_indices(layers + 1)] = np.inf
    return table, most_stages

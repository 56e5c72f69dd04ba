"""Alpa's inter-operator planner: stages on submeshes, for the least latency of a step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.partition.replica_search import seconds_of
from penstock.partition.replicated import replicated_sum
from penstock.plan.plan import Plan
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
    sync_seconds,
)
from penstock.search.planners.scope import check_alike, check_scope
from penstock.search.proposal import Objective, Proposal
from penstock.search.recompute.memory_profile import divide_room
from penstock.search.request import PlanRequest

#: Maximum number of steps of the dynamic program, (layers x devices)^2: of one, and of all that are
#: searched together.
MOST_STEPS, STEPS_IN_ALL = 5e7, 8e7


@register(
    "alpa",
    source="Zheng et al. 2022, Alpa, section 5; alpa/pipeline_parallel/stage_construction.py, training_dp",
)
def alpa(request: PlanRequest) -> Plan:
    """Return the plan with the least sum of t + (B - 1) max t over the stages' latencies t, for B
    micro-batches.

    A submesh is 1, 2, 4, … devices of a node, or all devices of 1, 2, … nodes. The submeshes of a
    plan consist of all devices; if no submeshes do, of those that are fastest. Inside a submesh
    Alpa distributes single operators, chosen by another planner; this one uses data parallelism: a
    stage's t is its forward and backward divided by the number n of its devices, plus a B-th part
    of the sync of the stage's gradients. The stage that is the s-th from the end holds s
    micro-batches, an n-th of each on every device. Transfers between stages are not counted, as in
    the paper. Layers are those of the profile; Alpa clusters operators into layers first.

    All numbers of micro-batches are searched, and the best few are simulated under "1f1b", each
    device of a submesh with whole micro-batches in turn.

    Raises:
        PlanError: another cut or schedule is requested, devices are of several kinds, the search is
            too large, or nothing fits.
    """
    check_scope(request, "alpa", "1f1b")
    check_alike(request, "alpa")
    steps = float(len(request.profile) * request.cluster.ranks) ** 2
    check_size("alpa", steps, MOST_STEPS, "(layers x devices)^2")
    return plan_of_least(
        request,
        _proposals(request, steps),
        f"alpa finds no stages of {len(request.profile)} layers for submeshes of "
        f"{request.cluster.ranks} devices that fit the memory and have a micro-batch for each "
        "device: give more micro-batches, or other devices",
    )


def _proposals(request: PlanRequest, steps: float) -> Iterator[tuple[float, Proposal]]:
    """Yield the best stages for each number of micro-batches, with the latency of a step."""
    for count in likely_counts(request, steps, STEPS_IN_ALL):
        costs = LayerCosts.of(request.profile, request.batch / count)
        table, most_stages = tables(request, costs, count)
        # On all devices if that is possible; memory, or a given number of stages, may not allow it.
        cut = None
        for exactly in (True, False):
            cut = cut or replicated_sum(
                table, count - 1, stages=request.stages, most_stages=most_stages, exactly=exactly
            )
        if cut is None:
            continue
        times = seconds_of(table, cut)
        value = sum(times) + (count - 1) * max(times)
        devices = pack_devices(request.cluster, [size for _, size in cut])
        objective = Objective("sum of t + (B - 1) max t", value, "s")
        yield value, replicated_proposal(cut, count, devices, objective)


def submeshes(cluster: Cluster) -> list[int]:
    """Return the numbers of devices that a stage may have, ascending.

    >>> from penstock.cluster.cluster import cluster
    >>> submeshes(cluster("3x4xV100-NVLink-25GbE"))
    [1, 2, 4, 8, 12]
    """
    sizes = [len(node) for node in cluster.by_node(range(cluster.ranks))]
    inside = {2**power for power in range(min(sizes).bit_length())}
    return sorted(inside | {sum(sizes[: nodes + 1]) for nodes in range(len(sizes))})


def tables(
    request: PlanRequest, costs: LayerCosts, count: int
) -> tuple[Numbers, NDArray[np.int64]]:
    """Return the latency of every stage on every submesh, infinite for other numbers of devices;
    and the maximum number of stages from it to the last for which its memory suffices.

    Returns:
        Two arrays of shape (layers + 1, layers + 1, devices + 1), as `replicated_sum` takes them.
    """
    ranges, layers, ranks = Ranges(costs), len(costs), request.cluster.ranks
    room = least_memory(request) - request.state_per_parameter_byte * ranges.parameter_bytes
    activation_bytes = ranges.activation_bytes
    table: Numbers = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    most_stages: NDArray[np.int64] = np.zeros(table.shape, np.int64)
    order = [*chain.from_iterable(request.cluster.by_node(range(ranks)))]
    for size in submeshes(request.cluster):
        if size > min(request.copies_allowed, count):
            continue
        sync_s = sync_seconds(order[:size], ranges.parameter_bytes, request.cluster)
        table[:, :, size] = ranges.seconds / size + sync_s / count
        in_flight = divide_room(size * room, activation_bytes)
        most_stages[:, :, size] = np.clip(np.floor(in_flight), 0, layers)
    table[np.tril_indices(layers + 1)] = np.inf
    return table, most_stages

"""Alpa's inter-operator planner: stages on submeshes, for the least latency of all micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.partition.replicated import replicated_sum
from penstock.plan.plan import Plan
from penstock.search.catalogue import register
from penstock.search.planners.layer_costs import LayerCosts, Numbers
from penstock.search.planners.scope import check_alike, check_scope, nodes_of, quickest
from penstock.search.planners.shared_stages import (
    Ranges,
    check_size,
    least_memory,
    likely_counts,
    packed,
)
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of
from penstock.simulate.plan_costs import meeting_seconds

#: Steps of the dynamic program, (layers x devices)^2: of one, and of all that are searched
#: together.
MOST_STEPS, STEPS_IN_ALL = 5e7, 8e7


@register(
    "alpa",
    source="Zheng et al. 2022, Alpa, section 5; alpa/pipeline_parallel/stage_construction.py, training_dp",
)
def alpa(request: PlanRequest) -> Plan:
    """The stages and submeshes with the least sum of t + (B - 1) max t over the stages' latencies
    t, for B micro-batches.

    A submesh is 1, 2, 4, … devices of a node, or all devices of 1, 2, … nodes; together they are
    all devices, or where no submeshes make these up, as fast as some can be. Inside a submesh Alpa
    shares out single operators, and finds out how by another planner; here it is data parallelism:
    a stage's t is its forward and backward over the number n of its devices, and a B-th part of
    what it takes them to add up the stage's gradients. The stage that is the s-th from the end
    keeps s micro-batches, an n-th of each on every device. Transfers between stages are not
    counted, as in the paper. Layers are the profile's; Alpa clusters operators into layers before.

    All numbers of micro-batches are searched, and the best few are simulated under "1f1b", each
    device of a submesh with whole micro-batches in turn.

    Raises:
        PlanError: another cut or schedule is asked for, devices are of several kinds, the search is
        too large, or nothing fits.
    """
    check_scope(request, "alpa", "1f1b")
    check_alike(request, "alpa")
    steps = float(len(request.profile) * request.cluster.ranks) ** 2
    check_size("alpa", steps, MOST_STEPS, "(layers x devices)^2")
    found = sorted(_proposals(request, steps), key=lambda each: each[0])
    if not found:
        raise PlanError(
            f"alpa finds no stages of {len(request.profile)} layers for submeshes of {request.cluster.ranks} "
            "devices that fit the memory and have a micro-batch for each device: give more micro-batches, or other devices"
        )
    return best_of(request, quickest([proposal for _, proposal in found]))


def _proposals(request: PlanRequest, steps: float) -> Iterator[tuple[float, Proposal]]:
    for count in likely_counts(request, steps, STEPS_IN_ALL):
        costs = LayerCosts.of(request.profile, request.batch / count)
        table, most_stages = tables(request, costs, count)
        found = None
        for exactly in (True, False):
            found = found or replicated_sum(
                table, count - 1, stages=request.stages, most_stages=most_stages, exactly=exactly
            )
        if found is None:
            continue
        lengths, sizes = (tuple(numbers) for numbers in zip(*found, strict=True))
        ends = np.cumsum(lengths)
        times = [
            float(table[end - n, end, size])
            for end, n, size in zip(ends, lengths, sizes, strict=True)
        ]
        value = sum(times) + (count - 1) * max(times)
        yield (
            value,
            Proposal(
                lengths,
                "1f1b",
                count,
                () if set(sizes) == {1} else (("replicas", sizes),),
                devices=packed(request.cluster, sizes),
                objective=Objective("sum of t + (B - 1) max t", value, "s"),
            ),
        )


def submeshes(cluster: Cluster) -> list[int]:
    """Numbers of devices that a stage may have, ascending.

    >>> from penstock.cluster.cluster import cluster
    >>> submeshes(cluster("3x4xV100-NVLink-25GbE"))
    [1, 2, 4, 8, 12]
    """
    sizes = [len(node) for node in nodes_of(cluster)]
    inside = {2**power for power in range(min(sizes).bit_length())}
    return sorted(inside | {sum(sizes[: nodes + 1]) for nodes in range(len(sizes))})


def tables(
    request: PlanRequest, costs: LayerCosts, count: int
) -> tuple[Numbers, NDArray[np.int64]]:
    """The latency of every stage on every submesh, infinite on other numbers of devices, and how
    many stages it and those after it may be, for its memory to suffice.

    Returns:
        Two arrays of shape (layers + 1, layers + 1, devices + 1), as `replicated_sum` takes them.
    """
    ranges, layers, ranks = Ranges(costs), len(costs), request.cluster.ranks
    room = least_memory(request) - request.held_per_parameter_byte * ranges.parameter_bytes
    kept = ranges.activation_bytes
    table: Numbers = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    most_stages: NDArray[np.int64] = np.zeros(table.shape, np.int64)
    order = [rank for node in nodes_of(request.cluster) for rank in node]
    for size in submeshes(request.cluster):
        if size > min(request.copies_allowed, count):
            continue
        # Linear in the bytes: one latency, and one second per byte.
        fixed = meeting_seconds(order[:size], 0.0, request.cluster)
        per_byte = (meeting_seconds(order[:size], 1e9, request.cluster) - fixed) / 1e9
        met = np.where(ranges.parameter_bytes > 0, fixed + per_byte * ranges.parameter_bytes, 0.0)
        table[:, :, size] = ranges.seconds / size + met / count
        in_flight = np.where(
            kept > 0, size * room / np.where(kept > 0, kept, 1.0), np.where(room >= 0, layers, 0)
        )
        most_stages[:, :, size] = np.clip(np.floor(in_flight), 0, layers)
    table[np.tril_indices(layers + 1)] = np.inf
    return table, most_stages

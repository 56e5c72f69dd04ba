"""Helpers for planners whose stages may each be on several devices: costs of all possible stages,
the choice of their devices, and the way from stages to a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import final

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Link
from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.best_plan import best_plan
from penstock.search.planners.layer_costs import LayerCosts, Numbers, before, ranges_of
from penstock.search.planners.scope import quickest
from penstock.search.proposal import Objective, Proposal, replica_options
from penstock.search.request import PlanRequest
from penstock.search.sync_line import sync_line


@final
@dataclass(frozen=True)
class Ranges:
    """Sums of a micro-batch's costs over all ranges of layers; entry [a, b] is the sum of layers
    a .. b - 1, 0 for b <= a.
    """

    costs: LayerCosts

    def _over(self, numbers: Sequence[float]) -> Numbers:
        """Return the sums of one number per layer over all ranges."""
        sums = before(tuple(numbers))
        return np.triu(sums[None, :] - sums[:, None])

    @cached_property
    def forward_s(self) -> Numbers:
        """Seconds of forward."""
        return self._over(self.costs.forward_s)

    @cached_property
    def seconds(self) -> Numbers:
        """Seconds of forward and backward."""
        return self._over(self.costs.seconds)

    @cached_property
    def activation_bytes(self) -> Numbers:
        """Bytes saved for the backward."""
        return self._over(self.costs.activation_bytes)

    @cached_property
    def parameter_bytes(self) -> Numbers:
        """Bytes of weights."""
        return self._over(self.costs.parameter_bytes)

    @cached_property
    def input_bytes(self) -> Numbers:
        """Bytes that cross before each layer and after the last, shape (layers + 1,); the first and
        the last are 0.
        """
        return np.array([0.0, *self.costs.output_bytes[:-1], 0.0])


def check_size(planner: str, work: float, most: float, unit: str) -> None:
    """Check that a search is not too large.

    Raises:
        PlanError: it is; `unit` says what `work` counts.
    """
    if work > most:
        raise PlanError(
            f"{planner}'s search is for {unit} up to {most:.3g}, and here are {work:.3g}: merge "
            "layers, use fewer devices, or use planner 'auto'"
        )


def likely_counts(request: PlanRequest, work: float, most: float) -> list[int]:
    """Return the numbers of micro-batches to search for, ascending: all of them; or if each search
    takes `work` of at most `most` together, those nearest to four per device or layer.
    """
    counts = request.micro_batch_counts(request.copies_allowed)
    usual = 4 * min(request.cluster.ranks, len(request.profile))
    nearest = sorted(counts, key=lambda count: (abs(math.log2(count / usual)), count))
    return sorted(nearest[: max(1, int(most / work))])


def links_inside(cluster: Cluster) -> list[Link]:
    """Return the different links inside nodes."""
    return [cluster.inside, *(link for _, link in cluster.insides)]


def slowest_bandwidth(cluster: Cluster) -> float:
    """Return the bytes per second of the slowest link that is used."""
    links = links_inside(cluster) if cluster.nodes < cluster.ranks else []
    if cluster.nodes > 1:
        links.append(cluster.between)
    return min(link.bandwidth_bytes_per_s for link in links or [cluster.inside])


def least_memory(request: PlanRequest) -> int:
    """Return the bytes that the device with the least memory may use."""
    return min(map(request.memory_bytes, range(request.cluster.ranks)))


def pack_devices(cluster: Cluster, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return devices for groups of these sizes, in the order of the groups, so that as few groups
    as possible span several nodes.

    The devices are in the order of the nodes, if then no group spans more nodes than it must. Else
    the largest group is placed first, each on whole nodes as far as it fills them, then in the node
    that it leaves the least room in: powers of two in nodes of a power of two always fit without
    gaps (Zheng et al. 2022, Alpa, appendix A).

    >>> from penstock.cluster.cluster import cluster
    >>> pack_devices(cluster("2x4xV100-NVLink-25GbE"), [1, 4, 2, 1])
    (6, 0, 1, 2, 3, 4, 5, 7)
    """
    free = cluster.by_node(range(cluster.ranks))
    in_order = [rank for node in free for rank in node]
    if _spans_fewest_nodes(cluster, in_order, sizes, largest_node=max(map(len, free))):
        return tuple(in_order[: sum(sizes)])
    groups: dict[int, list[int]] = {}
    for group in sorted(range(len(sizes)), key=lambda group: -sizes[group]):
        devices: list[int] = []
        while len(devices) < sizes[group]:
            needed = sizes[group] - len(devices)
            sufficient = [node for node in free if len(node) >= needed]
            node = min(sufficient, key=len) if sufficient else max(free, key=len)
            devices += node[:needed]
            del node[:needed]
            free = [node for node in free if node]
        groups[group] = devices
    return tuple(chain.from_iterable(groups[group] for group in range(len(sizes))))


def _spans_fewest_nodes(
    cluster: Cluster, order: Sequence[int], sizes: Sequence[int], *, largest_node: int
) -> bool:
    """Return whether no group spans more nodes than its size requires if the groups take the
    devices in this order.
    """
    for (start, end), size in zip(ranges_of(sizes), sizes, strict=True):
        nodes = {cluster.node(rank) for rank in order[start:end]}
        if len(nodes) != -(-size // largest_node):
            return False
    return True


def sync_seconds(group: Sequence[int], parameter_bytes: Numbers, cluster: Cluster) -> Numbers:
    """Return the seconds in which a group of devices sums its gradients, for each number of bytes;
    0 for stages without weights.
    """
    latency_s, s_per_byte = sync_line(group, cluster)
    return np.where(parameter_bytes > 0, latency_s + s_per_byte * parameter_bytes, 0.0)


def replicated_proposal(
    stages: Sequence[tuple[int, int]],
    micro_batches: int,
    devices: tuple[int, ...],
    objective: Objective,
) -> Proposal:
    """Return 1F1B on stages of these numbers of layers and of devices."""
    lengths, replicas = (tuple(numbers) for numbers in zip(*stages, strict=True))
    options = replica_options(replicas)
    return Proposal(lengths, "1f1b", micro_batches, options, devices=devices, objective=objective)


def plan_of_least(
    request: PlanRequest, estimated: Iterable[tuple[float, Proposal]], refusal: str
) -> Plan:
    """Return the best plan of the proposals with the least estimates, which are simulated.

    Raises:
        PlanError: there are no proposals; `refusal` is the message. Or nothing fits.
    """
    candidates = sorted(estimated, key=lambda candidate: candidate[0])
    if not candidates:
        raise PlanError(refusal)
    return best_plan(request, quickest([proposal for _, proposal in candidates]))

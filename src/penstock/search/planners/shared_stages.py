"""Planners whose stages may each stand on several devices: tables of what every possible stage
takes, and where its devices are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.search.planners.layer_costs import LayerCosts, Numbers, before
from penstock.search.planners.scope import nodes_of
from penstock.search.request import PlanRequest


@final
@dataclass(frozen=True)
class Ranges:
    """Sums of a micro-batch's costs over all ranges of layers; entry [a, b] is of the layers a .. b
    - 1, 0 where b <= a.
    """

    costs: LayerCosts

    def _over(self, numbers: Sequence[float]) -> Numbers:
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
        """Bytes kept for backward."""
        return self._over(self.costs.activation_bytes)

    @cached_property
    def parameter_bytes(self) -> Numbers:
        """Bytes of weights."""
        return self._over(self.costs.parameter_bytes)

    @cached_property
    def input_bytes(self) -> Numbers:
        """Shape (layers + 1,): bytes that cross before a layer; none does before the first, or
        after the last.
        """
        return np.array([0.0, *self.costs.output_bytes[:-1], 0.0])


def check_size(planner: str, work: float, most: float, what: str) -> None:
    """Pass, if a search is not too large.

    Raises:
        PlanError: it is; `what` says what `work` counts.
    """
    if work > most:
        raise PlanError(
            f"{planner}'s search is for {what} up to {most:.3g}, and here are {work:.3g}: merge layers, ask for fewer "
            "devices, or ask planner 'auto'"
        )


def likely_counts(request: PlanRequest, work: float, most: float) -> list[int]:
    """Numbers of micro-batches to search for, ascending: all of them, or if a search takes `work`
    of `most` that may be taken together, those nearest to four for every device or layer.
    """
    counts = request.micro_batch_counts(request.copies_allowed)
    usual = 4 * min(request.cluster.ranks, len(request.profile))
    nearest = sorted(counts, key=lambda count: (abs(math.log2(count / usual)), count))
    return sorted(nearest[: max(1, int(most / work))])


def slowest_bandwidth(cluster: Cluster) -> float:
    """Bytes per second of the slowest link that is used."""
    links = (
        [cluster.inside, *(link for _, link in cluster.insides)]
        if cluster.nodes < cluster.ranks
        else []
    )
    links += [cluster.between] if cluster.nodes > 1 else []
    return min(link.bandwidth_bytes_per_s for link in links or [cluster.inside])


def least_memory(request: PlanRequest) -> int:
    """What the device with the least memory may hold."""
    return min(map(request.memory_bytes, range(request.cluster.ranks)))


def packed(cluster: Cluster, sizes: Sequence[int]) -> tuple[int, ...]:
    """Devices for groups of these sizes, such that as few as can be stand in two nodes: in the
    order of the groups.

    In the order of the nodes, if no group is in more of them than it must be then. Else the largest
    is placed first, each on whole nodes as far as it fills them, then in the node that it leaves
    the least room in: powers of two in nodes of a power of two always fit without gaps (Zheng et
    al. 2022, Alpa, appendix A).

    >>> from penstock.cluster.cluster import cluster
    >>> packed(cluster("2x4xV100-NVLink-25GbE"), [1, 4, 2, 1])
    (6, 0, 1, 2, 3, 4, 5, 7)
    """
    free = nodes_of(cluster)
    largest = max(map(len, free))
    order = [rank for node in free for rank in node]
    own_nodes = [
        {cluster.node(rank) for rank in order[start:end]} for start, end in ranges_of(sizes)
    ]
    if all(len(nodes) == -(-size // largest) for nodes, size in zip(own_nodes, sizes, strict=True)):
        return tuple(order[: sum(sizes)])
    groups: dict[int, list[int]] = {}
    for group in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        own: list[int] = []
        while len(own) < sizes[group]:
            wanted = sizes[group] - len(own)
            room = [node for node in free if len(node) >= wanted]
            node = min(room, key=len) if room else max(free, key=len)
            own += node[:wanted]
            del node[:wanted]
            free = [each for each in free if each]
        groups[group] = own
    return tuple(rank for group in range(len(sizes)) for rank in groups[group])


def ranges_of(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First layer and end of every stage."""
    start = 0
    for length in lengths:
        yield start, start + length
        start += length

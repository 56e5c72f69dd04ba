"""SPP's PRM: the stages, and how many devices of a given order each has, with the least load of the
busiest stage or channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.search.planners.layer_costs import LayerCosts, Numbers
from penstock.search.planners.replicated_stages import Ranges, sync_seconds

#: Numbers of layers, or of devices, indexed by layers, devices and replicas.
Choices = NDArray[np.int16]

#: Per stage, its number of layers and of devices.
Stages = list[tuple[int, int]]


@final
@dataclass(frozen=True)
class Loads:
    """Loads of stages and channels in seconds per micro-batch, for devices in a given order.

    A stage of layers a .. b - 1 on the r devices before place i takes (forward + backward) / r, and
    its share of the sync of the batch's gradients: sync / micro_batches. The channel between r'
    devices and the next r carries the activations and their gradients, both over the slowest of
    their links, min(r, r') at a time.

    Attributes:
        costs: costs of the layers.
        cluster: the cluster.
        order: the devices in order.
        micro_batches: micro-batches of a batch.
        most_replicas: maximum number of replicas of a stage.
    """

    costs: LayerCosts
    cluster: Cluster
    order: tuple[int, ...]
    micro_batches: int
    most_replicas: int

    @cached_property
    def ranges(self) -> Ranges:
        """Sums over ranges of layers."""
        return Ranges(self.costs)

    def stage(self, place: int, replicas: int) -> Numbers:
        """Return the load of a stage of layers a .. b - 1, shape (layers + 1, layers + 1); infinite
        for b <= a.
        """
        table = self.ranges.seconds / replicas + self.sync(place, replicas) / self.micro_batches
        table[np.tril_indices(len(table))] = np.inf
        return table

    def sync(self, place: int, replicas: int) -> Numbers:
        """Return the seconds of a stage's gradient sync, shape (layers + 1, layers + 1)."""
        group = self.order[place - replicas : place]
        return sync_seconds(group, self.ranges.parameter_bytes, self.cluster)

    def channel(self, place: int, replicas_before: int, replicas: int) -> Numbers:
        """Return the seconds one way over the cut before each layer, from the devices before
        `place` to those from it on, shape (layers + 1,).
        """
        seconds: Numbers = self.channels(place, replicas)[replicas_before - 1]
        return seconds

    def channels(self, place: int, replicas: int) -> Numbers:
        """Return the seconds of `channel` for 1, 2, … devices before `place`, shape (replicas
        before, layers + 1).
        """
        before = np.arange(1, min(place, self.most_replicas) + 1)
        # The slowest link of a group is that of all devices between its first and the place.
        worst = []
        for values in self._links:
            worst_of_device = values[place - before, place : place + replicas].max(axis=1)
            worst.append(np.maximum.accumulate(worst_of_device))
        latency, seconds_per_byte = worst
        parallel = np.minimum(before, replicas)
        return latency[:, None] + (seconds_per_byte / parallel)[:, None] * self.ranges.input_bytes

    @cached_property
    def _links(self) -> tuple[Numbers, Numbers]:
        """Latency, and seconds per byte, between any two devices, by their places in the order."""
        latency: Numbers = np.zeros((len(self.order), len(self.order)))
        seconds_per_byte = np.zeros_like(latency)
        for i, rank in enumerate(self.order):
            for j, other in enumerate(self.order):
                link = self.cluster.link(rank, other)
                latency[i, j] = link.latency_s
                seconds_per_byte[i, j] = 1 / link.bandwidth_bytes_per_s
        return latency, seconds_per_byte


def least_load(loads: Loads, most_stages: int) -> dict[int, tuple[float, Stages]]:
    """Return by number of stages the stages on all devices with the least load of the busiest stage
    or channel, and that load.

        W(l, x, r, i) = min over l' < l, r' of max( W(l', x - 1, r', i - r), 2 channel(l', r', r),
                                                    stage(l' .. l - 1, r, i) )

    is the load of the first l layers on the first i devices in x stages, the last on r of them.

    Source: Luo et al. 2022, SPP, partition, replication and mapping. Time O(stages x devices^2 x
    (layers^2 + layers x devices)).
    """
    layers, devices, most = len(loads.costs), len(loads.order), loads.most_replicas
    stage: dict[tuple[int, int], Numbers] = {}
    for i in range(1, devices + 1):
        for r in range(1, min(i, most) + 1):
            stage[i, r] = loads.stage(i, r)
    # A channel carries the activation and its gradient.
    channels = {(i - r, r): 2 * loads.channels(i - r, r) for i, r in stage if i > r}
    shape = (layers + 1, devices + 1, most + 1)
    least = np.full(shape, np.inf)
    for r in range(1, min(devices, most) + 1):
        least[:, r, r] = stage[r, r][0]
    steps: list[tuple[Choices, Choices]] = []
    best = {}
    for count in range(1, most_stages + 1):
        if count > 1:
            least, begins, replicas_before = _add_stage(stage, channels, least)
            steps.append((begins, replicas_before))
        replicas = int(np.argmin(least[layers, devices]))
        load = float(least[layers, devices, replicas])
        if load < np.inf:
            best[count] = (load, _trace_back(steps, layers, devices, replicas))
    return best


def _add_stage(
    stage: dict[tuple[int, int], Numbers], channels: dict[tuple[int, int], Numbers], before: Numbers
) -> tuple[Numbers, Choices, Choices]:
    """Return W with one more stage, and for every entry the first layer of that stage, and the
    number of devices of the stage before it.
    """
    most = before.shape[2] - 1
    least = np.full_like(before, np.inf)
    begins: Choices = np.zeros(before.shape, np.int16)
    replicas_before: Choices = np.zeros(before.shape, np.int16)
    for (i, r), table in stage.items():
        place = i - r
        if place == 0:
            continue
        # The load before the new stage and of its channel, by the first layer of the new stage.
        upstream = np.maximum(before[:, place, 1 : min(place, most) + 1].T, channels[place, r])
        best_before = upstream.argmin(axis=0)
        total = np.maximum(upstream.min(axis=0)[:, None], table)
        first = total.argmin(axis=0)
        least[:, i, r] = total.min(axis=0)
        begins[:, i, r] = first
        replicas_before[:, i, r] = best_before[first] + 1
    return least, begins, replicas_before


def _trace_back(
    steps: Sequence[tuple[Choices, Choices]], layers: int, devices: int, replicas: int
) -> Stages:
    """Return the stages of an entry of W, traced back from the last."""
    stages: Stages = []
    for begins, replicas_before in reversed(steps):
        first = int(begins[layers, devices, replicas])
        count_before = int(replicas_before[layers, devices, replicas])
        stages.append((layers - first, replicas))
        layers, devices, replicas = first, devices - replicas, count_before
    return [(layers, replicas), *reversed(stages)]

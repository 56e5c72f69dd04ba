"""SPP's PRM: the stages, and how many devices of a given order each has, for the least load of the
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
from penstock.search.planners.shared_stages import Ranges
from penstock.simulate.plan_costs import meeting_seconds

#: Layers, or devices, by layers, devices and copies.
Choices = NDArray[np.int16]

#: Layers and devices of every stage.
Stages = list[tuple[int, int]]


@final
@dataclass(frozen=True)
class Loads:
    """What stages and channels take for a micro-batch, devices standing in `order`.

    A stage of the layers a .. b - 1 on the r devices before place i takes (forward + backward) / r,
    and its part of the batch's sum of gradients: sync / micro_batches. The channel between r'
    devices and the next r carries the activations and their gradients, both over the slowest of
    their links, as many at a time as the fewer of them are.
    """

    costs: LayerCosts
    cluster: Cluster
    order: tuple[int, ...]
    micro_batches: int
    most_copies: int

    @cached_property
    def ranges(self) -> Ranges:
        """Sums over ranges of layers."""
        return Ranges(self.costs)

    def stage(self, place: int, copies: int) -> Numbers:
        """Shape (layers + 1, layers + 1): seconds of the layers a .. b - 1; infinite where b <= a."""
        table = self.ranges.seconds / copies + self.sync(place, copies) / self.micro_batches
        table[np.tril_indices(len(table))] = np.inf
        return table

    def sync(self, place: int, copies: int) -> Numbers:
        """Shape (layers + 1, layers + 1): seconds of adding up a stage's gradients."""
        group = self.order[place - copies : place]
        fixed = meeting_seconds(group, 0.0, self.cluster)
        per_byte = (meeting_seconds(group, 1e9, self.cluster) - fixed) / 1e9
        held = self.ranges.parameter_bytes
        return np.where(held > 0, fixed + per_byte * held, 0.0)

    def channel(self, place: int, copies_before: int, copies: int) -> Numbers:
        """Shape (layers + 1,): seconds one way of the cut before a layer, from the devices before
        `place` to those from it on.
        """
        found: Numbers = self.channels(place, copies)[copies_before - 1]
        return found

    def channels(self, place: int, copies: int) -> Numbers:
        """Shape (copies before, layers + 1): the same for 1, 2, … devices before `place`."""
        before = np.arange(1, min(place, self.most_copies) + 1)
        # Of a group the slowest link: that of all devices between the place and the first of it.
        latency, slowness = (
            np.maximum.accumulate(each[place - before, place : place + copies].max(axis=1))
            for each in self._links
        )
        return (
            latency[:, None]
            + (slowness / np.minimum(before, copies))[:, None] * self.ranges.input_bytes
        )

    @cached_property
    def _links(self) -> tuple[Numbers, Numbers]:
        """Latency, and seconds per byte, between any two devices by their places in the order."""
        links = [[self.cluster.link(a, b) for b in self.order] for a in self.order]
        return (
            np.array([[link.latency_s for link in row] for row in links]),
            np.array([[1 / link.bandwidth_bytes_per_s for link in row] for row in links]),
        )


def least_load(loads: Loads, most_stages: int) -> dict[int, tuple[float, Stages]]:
    """By number of stages, the stages on all devices with the least load of the busiest stage or
    channel, and that load.

        W(l, x, r, i) = min over l' < l, r' of max( W(l', x - 1, r', i - r), 2 channel(l', r', r),
        stage(l' .. l - 1, r, i) )

    is of the first l layers on the first i devices in x stages, the last on r of them.

    Source: Luo et al. 2022, SPP, partition, replication and mapping. Time O(stages x devices^2 x
    (layers^2 + layers x devices)).
    """
    layers, devices, most = len(loads.costs), len(loads.order), loads.most_copies
    stage = {
        (i, r): loads.stage(i, r) for i in range(1, devices + 1) for r in range(1, min(i, most) + 1)
    }
    channels = {(i - r, r): 2 * loads.channels(i - r, r) for i, r in stage if i > r}
    shape = (layers + 1, devices + 1, most + 1)
    least = np.full(shape, np.inf)
    for r in range(1, min(devices, most) + 1):
        least[:, r, r] = stage[r, r][0]
    steps: list[tuple[Choices, Choices]] = []
    found = {}
    for count in range(1, most_stages + 1):
        if count > 1:
            least, begins, copies_before = _one_more(stage, channels, least)
            steps.append((begins, copies_before))
        copies = int(np.argmin(least[layers, devices]))
        load = float(least[layers, devices, copies])
        if load < np.inf:
            found[count] = (load, _walk(steps, layers, devices, copies))
    return found


def _one_more(
    stage: dict[tuple[int, int], Numbers], channels: dict[tuple[int, int], Numbers], before: Numbers
) -> tuple[Numbers, Choices, Choices]:
    """W with one more stage, and for every entry the layer at which that begins, and the devices of
    the one before.
    """
    most = before.shape[2] - 1
    least = np.full_like(before, np.inf)
    begins: Choices = np.zeros(before.shape, np.int16)
    copies_before: Choices = np.zeros(before.shape, np.int16)
    for (i, r), table in stage.items():
        place = i - r
        if place == 0:
            continue
        fed = np.maximum(before[:, place, 1 : min(place, most) + 1].T, channels[place, r])
        other = fed.argmin(axis=0)
        total = np.maximum(fed.min(axis=0)[:, None], table)
        first = total.argmin(axis=0)
        least[:, i, r] = total.min(axis=0)
        begins[:, i, r] = first
        copies_before[:, i, r] = other[first] + 1
    return least, begins, copies_before


def _walk(
    steps: Sequence[tuple[Choices, Choices]], layers: int, devices: int, copies: int
) -> Stages:
    found: Stages = []
    for begins, copies_before in reversed(steps):
        first, other = (
            int(begins[layers, devices, copies]),
            int(copies_before[layers, devices, copies]),
        )
        found.append((layers - first, copies))
        layers, devices, copies = first, devices - copies, other
    return [(layers, copies), *reversed(found)]

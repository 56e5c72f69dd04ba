"""SPP's RDO: an order of the devices in which devices with fast links are neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.search.planners.layer_costs import Numbers


def device_order(cluster: Cluster) -> tuple[int, ...]:
    """Return the devices ordered by recursive bisection: first the part with the first device, then
    the other part, each ordered in the same way.

    The parts are those between which all links together have the least bandwidth (a minimum cut of
    the graph of bandwidths). Sets whose links are all equal stay in the order of their ranks.

    Source: Luo et al. 2022, SPP, recursive device ordering; docs/literature/spp.md.
    """
    ranks = range(cluster.ranks)
    bandwidth = np.zeros((cluster.ranks, cluster.ranks))
    for a, b in permutations(ranks, 2):
        bandwidth[a, b] = cluster.link(a, b).bandwidth_bytes_per_s
    return tuple(_ordered(list(ranks), bandwidth))


def _ordered(devices: list[int], bandwidth: Numbers) -> list[int]:
    """Order a set of devices by recursive bisection."""
    if len(devices) <= 2:  # nothing to cut
        return devices
    among = bandwidth[np.ix_(devices, devices)]
    between_devices = among[~np.eye(len(devices), dtype=bool)]
    if np.all(between_devices == between_devices[0]):
        return devices
    side = minimum_cut(among)
    near = [device for place, device in enumerate(devices) if (place in side) == (0 in side)]
    far = [device for place, device in enumerate(devices) if (place in side) != (0 in side)]
    return _ordered(near, bandwidth) + _ordered(far, bandwidth)


def minimum_cut(weights: Sequence[Sequence[float]] | Numbers) -> set[int]:
    """Return one side of a cut with the least weight across it.

    >>> sorted(minimum_cut([[0, 9, 1, 1], [9, 0, 1, 1], [1, 1, 0, 9], [1, 1, 9, 0]]))
    [2, 3]

    Args:
        weights: shape (n, n), symmetric, not negative; n at least 2.

    Source: Stoer and Wagner 1997, A simple min-cut algorithm. Time O(n^3).
    """
    remaining = np.array(weights, float)
    merged = [{place} for place in range(len(remaining))]
    alive = list(range(len(remaining)))
    best, least = {0}, np.inf
    while len(alive) > 1:
        # Maximum adjacency order: always the place with the most weight to those before it.
        weight_to_earlier = remaining[alive[0]].copy()
        rest = alive[1:]
        before = last = alive[0]
        while rest:
            before = last
            last = max(rest, key=lambda place: (weight_to_earlier[place], -place))
            rest.remove(last)
            if rest:
                weight_to_earlier += remaining[last]
        phase = float(remaining[last][alive].sum())
        if phase < least:
            best, least = set(merged[last]), phase
        merged[before] |= merged[last]
        remaining[before] += remaining[last]
        remaining[:, before] = remaining[before]
        remaining[before, before] = 0.0
        remaining[last] = remaining[:, last] = 0.0
        alive.remove(last)
    return best

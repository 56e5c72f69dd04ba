"""SPP's RDO: an order of the devices in which those with fast links are neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.search.planners.layer_costs import Numbers


def device_order(cluster: Cluster) -> tuple[int, ...]:
    """The devices by recursive bisection: of a set the part with its first device, then the other,
    each ordered likewise.

    The parts are those between which all links together carry least (a minimum cut of the graph of
    bandwidths). Sets whose links are all alike stay in the order of their ranks.

    Source: Luo et al. 2022, SPP, recursive device ordering; LITERATURE 8.3.
    """
    ranks = range(cluster.ranks)
    bandwidth = np.array(
        [
            [0.0 if a == b else cluster.link(a, b).bandwidth_bytes_per_s for b in ranks]
            for a in ranks
        ]
    )
    return tuple(_ordered(list(ranks), bandwidth))


def _ordered(devices: list[int], bandwidth: Numbers) -> list[int]:
    if len(devices) <= 2:  # nothing to cut
        return devices
    among = bandwidth[np.ix_(devices, devices)]
    apart = among[~np.eye(len(devices), dtype=bool)]
    if np.all(apart == apart[0]):
        return devices
    side = minimum_cut(among)
    near = [device for place, device in enumerate(devices) if (place in side) == (0 in side)]
    far = [device for place, device in enumerate(devices) if (place in side) != (0 in side)]
    return _ordered(near, bandwidth) + _ordered(far, bandwidth)


def minimum_cut(weights: Sequence[Sequence[float]] | Numbers) -> set[int]:
    """One side of a cut with the least weight across it.

    >>> sorted(minimum_cut([[0, 9, 1, 1], [9, 0, 1, 1], [1, 1, 0, 9], [1, 1, 9, 0]]))
    [2, 3]

    Args:
        weights: shape (n, n), symmetric, not below 0; n at least 2.

    Source: Stoer and Wagner 1997, A simple min-cut algorithm. Time O(n^3).
    """
    left = np.array(weights, float)
    merged = [{place} for place in range(len(left))]
    alive = list(range(len(left)))
    best, least = {0}, np.inf
    while len(alive) > 1:
        # Maximum adjacency order: always the one that is bound most to those before it.
        bound = left[alive[0]].copy()
        rest = alive[1:]
        before = last = alive[0]
        while rest:
            before, last = last, max(rest, key=lambda place: (bound[place], -place))
            rest.remove(last)
            if rest:
                bound += left[last]
        phase = float(left[last][alive].sum())
        if phase < least:
            best, least = set(merged[last]), phase
        merged[before] |= merged[last]
        left[before] += left[last]
        left[:, before] = left[before]
        left[before, before] = 0.0
        left[last] = left[:, last] = 0.0
        alive.remove(last)
    return best

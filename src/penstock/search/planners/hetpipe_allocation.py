"""HetPipe's virtual workers: which devices form one, and in which orders they may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations, product
from math import gcd, prod

from penstock.cluster.cluster import Cluster

#: The devices of every virtual worker, one per stage.
Allocation = tuple[tuple[int, ...], ...]

#: Maximum number of orders of the devices for which all are tried.
MOST_ORDERS = 120


def allocations(
    cluster: Cluster, model_s: Sequence[float], most_stages: int
) -> list[tuple[str, Allocation]]:
    """Return ways to form virtual workers of equally many devices, with the name of the policy.

    Node partition: a node is a virtual worker. Equal distribution: each has the same number of
    devices of every kind; the paper's, with as few devices as possible, and with twice as many, and
    so on. Hybrid distribution: the fastest kind with the slowest, the second with the second
    slowest, half of each.

    Args:
        cluster: all its devices are used.
        model_s: per rank, seconds that its device takes for all layers.
        most_stages: number of layers: no virtual worker has more devices.

    Source: Park et al. 2020, HetPipe, section 5 (NP, ED, HD).
    """
    named: list[tuple[str, Allocation]] = []
    nodes = cluster.by_node(range(cluster.ranks))
    if len({len(node) for node in nodes}) == 1:
        named.append(("node partition", tuple(map(tuple, nodes))))
    kinds: dict[str, list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        kinds.setdefault(device.name, []).append(rank)
    by_speed = sorted(kinds.values(), key=lambda ranks: model_s[ranks[0]])
    # Workers with equally many devices of each kind: their number divides all counts.
    most_workers = gcd(*map(len, by_speed))
    for count in range(most_workers, 0, -1):
        if most_workers % count == 0:
            named.append(("equal distribution", _equal_distribution(by_speed, count)))
    hybrid = _hybrid_distribution(by_speed)
    if hybrid:
        named.append(("hybrid distribution", hybrid))
    # Equal allocations have the name of the first and the place of the last.
    unique: dict[Allocation, str] = {}
    for name, allocation in named:
        if len(allocation[0]) <= most_stages:
            unique[allocation] = unique.pop(allocation, name)
    return [(name, allocation) for allocation, name in unique.items()]


def _equal_distribution(kinds: Sequence[Sequence[int]], count: int) -> Allocation:
    """Return `count` virtual workers with the same number of devices of every kind."""
    workers = []
    for worker in range(count):
        devices: list[int] = []
        for ranks in kinds:
            size = len(ranks) // count
            devices += ranks[worker * size : (worker + 1) * size]
        workers.append(tuple(devices))
    return tuple(workers)


def _hybrid_distribution(kinds: Sequence[Sequence[int]]) -> Allocation:
    """Return virtual workers that pair the fastest kind with the slowest, the second with the
    second slowest, and so on; empty unless there are four or more kinds, evenly many, of equally
    many devices which divide among the pairs.
    """
    pairs, size = len(kinds) // 2, len(kinds[0])
    if len(kinds) <= 2 or len(kinds) % 2 or {len(ranks) for ranks in kinds} != {size}:
        return ()
    if size % pairs:
        return ()
    workers = []
    for fast, slow in zip(kinds[:pairs], reversed(kinds[pairs:]), strict=True):
        for start in range(0, size, pairs):
            workers.append((*fast[start : start + pairs], *slow[start : start + pairs]))
    return tuple(workers)


def orders(cluster: Cluster, allocation: Allocation, model_s: Sequence[float]) -> list[Allocation]:
    """Return the allocation with the devices of every virtual worker in all orders that differ;
    virtual workers with equal devices have the same order.

    If these are more than `MOST_ORDERS`, the devices are sorted by memory or by speed instead,
    ascending or descending: what an early stage needs is memory.
    """
    signatures = [tuple(sorted(_kind(cluster, rank) for rank in devices)) for devices in allocation]
    choices = {
        signature: _orders_of(cluster, devices)
        for signature, devices in zip(signatures, allocation, strict=True)
    }
    if prod(len(kind_orders) for kind_orders in choices.values()) > MOST_ORDERS:
        return _sorted_orders(cluster, allocation, model_s)
    arranged = []
    for chosen in product(*choices.values()):
        order = dict(zip(choices, chosen, strict=True))
        workers = [
            _arranged(cluster, devices, order[signature])
            for devices, signature in zip(allocation, signatures, strict=True)
        ]
        arranged.append(tuple(workers))
    return arranged


def _sorted_orders(
    cluster: Cluster, allocation: Allocation, model_s: Sequence[float]
) -> list[Allocation]:
    """Return the allocation with all devices sorted by memory or by speed, descending or
    ascending, without duplicates.
    """
    memory = [device.memory_bytes for device in cluster.devices]
    unique: dict[Allocation, None] = {}
    for values in (memory, model_s):
        for reverse in (True, False):
            workers = [
                tuple(sorted(devices, key=values.__getitem__, reverse=reverse))
                for devices in allocation
            ]
            unique[tuple(workers)] = None
    return list(unique)


def _kind(cluster: Cluster, rank: int) -> str:
    """Return the kind of a rank's device."""
    return cluster.devices[rank].name


def _orders_of(cluster: Cluster, devices: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the distinct orders of the kinds of these devices; if there are more than
    `MOST_ORDERS`, at least one more than that.
    """
    kinds = [_kind(cluster, rank) for rank in devices]
    counts = Counter(kinds)
    if len(counts) == 1:
        return [tuple(kinds)]
    distinct: dict[tuple[str, ...], None] = {}
    for order in permutations(kinds) if len(kinds) <= 8 else ():  # 40,320 orders at most
        distinct[order] = None
        if len(distinct) > MOST_ORDERS:
            break
    return list(distinct) or [tuple(kinds)] * (MOST_ORDERS + 1)


def _arranged(cluster: Cluster, devices: Sequence[int], kinds: Sequence[str]) -> tuple[int, ...]:
    """Return these devices in this order of kinds; devices of one kind stay in their order."""
    unused: dict[str, list[int]] = {}
    for rank in devices:
        unused.setdefault(_kind(cluster, rank), []).append(rank)
    return tuple(unused[kind].pop(0) for kind in kinds)

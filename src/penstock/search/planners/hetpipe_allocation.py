"""HetPipe's virtual workers: which devices make one, and in which order they may stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations, product
from math import gcd, prod

from penstock.cluster.cluster import Cluster
from penstock.search.planners.scope import nodes_of

#: The devices of every virtual worker, one of each stage.
Allocation = tuple[tuple[int, ...], ...]

#: Orders of the devices that are tried: all, if they are no more.
MOST_ORDERS = 120


def allocations(
    cluster: Cluster, speeds: Sequence[float], most_stages: int
) -> list[tuple[str, Allocation]]:
    """Ways to make virtual workers, all of equally many devices, with the policy's name.

    Node partition: a node is a virtual worker. Equal distribution: each has as many of every kind
    as the others; the paper's, with as few as can be, and with twice as many, and so on. Hybrid
    distribution: the fastest kind with the slowest, the second with the second but one, half of
    each.

    Args:
        cluster: all its devices are used.
        speeds: seconds that the device of every rank takes for the model.
        most_stages: layers that there are: no virtual worker has more devices.

    Source: Park et al. 2020, HetPipe, section 5 (NP, ED, HD).
    """
    found: list[tuple[str, Allocation]] = []
    nodes = nodes_of(cluster)
    if len({len(node) for node in nodes}) == 1:
        found.append(("node partition", tuple(map(tuple, nodes))))
    kinds: dict[str, list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        kinds.setdefault(device.name, []).append(rank)
    ordered = sorted(kinds.values(), key=lambda ranks: speeds[ranks[0]])
    most = gcd(*map(len, ordered))
    found += [
        (
            "equal distribution",
            tuple(
                tuple(rank for ranks in ordered for rank in _share(ranks, turn, count))
                for turn in range(count)
            ),
        )
        for count in range(most, 0, -1)
        if most % count == 0
    ]
    each = len(ordered[0])
    pairs = len(ordered) // 2
    if (
        len(ordered) > 2
        and len(ordered) % 2 == 0
        and {len(ranks) for ranks in ordered} == {each}
        and each % pairs == 0
    ):
        found.append(
            (
                "hybrid distribution",
                tuple(
                    (
                        *fast[turn * pairs : (turn + 1) * pairs],
                        *slow[turn * pairs : (turn + 1) * pairs],
                    )
                    for fast, slow in zip(ordered[:pairs], reversed(ordered[pairs:]), strict=True)
                    for turn in range(each // pairs)
                ),
            )
        )
    return list(
        {
            each: (name, each) for name, each in reversed(found) if len(each[0]) <= most_stages
        }.values()
    )[::-1]


def _share(ranks: Sequence[int], turn: int, count: int) -> Sequence[int]:
    """The devices of one kind that the `turn`-th of `count` virtual workers gets."""
    size = len(ranks) // count
    return ranks[turn * size : (turn + 1) * size]


def orders(cluster: Cluster, allocation: Allocation, speeds: Sequence[float]) -> list[Allocation]:
    """The allocation with the devices of every virtual worker in all orders that differ, those with
    equal devices in the same one.

    Where these are too many, all by memory or all by speed, up or down: what an early stage needs
    is memory.
    """
    signatures = [tuple(sorted(_kind(cluster, rank) for rank in own)) for own in allocation]
    choices = {
        signature: _orders_of(cluster, own)
        for signature, own in zip(signatures, allocation, strict=True)
    }
    if prod(len(each) for each in choices.values()) > MOST_ORDERS:
        keys = (lambda rank: cluster.devices[rank].memory_bytes, lambda rank: speeds[rank])
        return list(
            dict.fromkeys(
                tuple(tuple(sorted(own, key=key, reverse=down)) for own in allocation)
                for key in keys
                for down in (True, False)
            )
        )
    found = []
    for chosen in product(*choices.values()):
        order = dict(zip(choices, chosen, strict=True))
        found.append(
            tuple(
                _arranged(cluster, own, order[signature])
                for own, signature in zip(allocation, signatures, strict=True)
            )
        )
    return found


def _kind(cluster: Cluster, rank: int) -> str:
    return cluster.devices[rank].name


def _orders_of(cluster: Cluster, own: Sequence[int]) -> list[tuple[str, ...]]:
    """Different orders of the kinds of these devices; one more than are tried, if there are so
    many.
    """
    kinds = [_kind(cluster, rank) for rank in own]
    counts = Counter(kinds)
    if len(counts) == 1:
        return [tuple(kinds)]
    found: dict[tuple[str, ...], None] = {}
    for order in permutations(kinds) if len(kinds) <= 8 else ():  # 40,320 orders at most
        found[order] = None
        if len(found) > MOST_ORDERS:
            break
    return list(found) or [tuple(kinds)] * (MOST_ORDERS + 1)


def _arranged(cluster: Cluster, own: Sequence[int], kinds: Sequence[str]) -> tuple[int, ...]:
    """These devices in this order of kinds, those of one kind as they were."""
    left: dict[str, list[int]] = {}
    for rank in own:
        left.setdefault(_kind(cluster, rank), []).append(rank)
    return tuple(left[kind].pop(0) for kind in kinds)

"""Where DAPPLE places the devices of a stage, and the transfers between such places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

#: Number of devices of a stage on every node.
Place = tuple[int, ...]


@final
@dataclass(frozen=True)
class Network:
    """Latency and seconds per byte of links inside a node, of links between nodes, and of
    all-reduce between nodes, if that differs.
    """

    inside: tuple[float, float]
    between: tuple[float, float]
    collective: tuple[float, float] | None = None

    def transfer(self, one: Place, other: Place) -> tuple[float, float]:
        """Return latency and seconds per byte of a micro-batch's transfer from one stage's devices
        to those of the next.

        Every device sends or receives its share of the samples through its own port (split and
        concat): the side with fewer devices has larger shares and determines the time.
        """
        latency, per_byte = self.inside if len(_nodes(one) | _nodes(other)) == 1 else self.between
        return latency, per_byte / min(sum(one), sum(other))

    def all_reduce(self, place: Place) -> tuple[float, float]:
        """Return latency and seconds per byte of a stage's all-reduce on a ring: each of k devices
        sends 2 (k - 1) times a k-th of the bytes.
        """
        devices = sum(place)
        latency, per_byte = (
            self.inside if len(_nodes(place)) == 1 else self.collective or self.between
        )
        return 2 * (devices - 1) * latency, 2 * (devices - 1) / devices * per_byte


def _nodes(place: Place) -> set[int]:
    """Return the nodes that a place uses."""
    return {node for node, count in enumerate(place) if count}


def placements(sizes: Sequence[int], used: Place, devices: int) -> list[Place]:
    """Return places for a stage of `devices` devices, without duplicates: fresh first, append
    first, scatter first.

    >>> placements((4, 4, 4), (2, 0, 0), 3)
    [(0, 3, 0), (2, 1, 0)]
    >>> placements((4, 4), (2, 2), 3)
    [(2, 1)]

    Args:
        sizes: number of devices of every node.
        used: number of those that are in use.
        devices: number of devices of the stage, at most the number that are free.

    Source: Fan et al. 2021, DAPPLE, section 4: fresh first allocates on a machine that is not in
    use yet, which keeps a stage within it; append first on those that are in use, which leaves no
    fragments; scatter first takes equally many of all that are in use, or of all if none is.
    """
    fresh = [node for node, count in enumerate(used) if not count]
    in_use = [node for node, count in enumerate(used) if count]
    free = [size - count for size, count in zip(sizes, used, strict=True)]
    places = [
        _fill(free, [*fresh, *in_use], devices),
        _fill(free, [*in_use, *fresh], devices),
        _scatter(free, in_use or fresh, fresh if in_use else [], devices),
    ]
    return list(dict.fromkeys(places))


def _fill(free: Sequence[int], nodes: Sequence[int], devices: int) -> Place:
    """Take devices from one node after the other."""
    counts = [0] * len(free)
    for node in nodes:
        counts[node] = min(free[node], devices)
        devices -= counts[node]
    return tuple(counts)


def _scatter(
    free: Sequence[int], nodes: Sequence[int], then_nodes: Sequence[int], devices: int
) -> Place:
    """Take one device from each of `nodes` in turn, and the rest from `then_nodes`, one node after
    the other.
    """
    counts = [0] * len(free)
    while devices and any(counts[node] < free[node] for node in nodes):
        for node in nodes:
            if devices and counts[node] < free[node]:
                counts[node] += 1
                devices -= 1
    for node in then_nodes:
        counts[node] = min(free[node], devices)
        devices -= counts[node]
    return tuple(counts)

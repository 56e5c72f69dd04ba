"""Where DAPPLE puts the devices of a stage, and what crosses between such places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

#: Devices of a stage on every node.
Place = tuple[int, ...]


@final
@dataclass(frozen=True)
class Network:
    """Latency and seconds per byte inside a node, between nodes, and between nodes for all-reduce,
    where that is another.
    """

    inside: tuple[float, float]
    between: tuple[float, float]
    collective: tuple[float, float] | None = None

    def transfer(self, one: Place, other: Place) -> tuple[float, float]:
        """Latency and seconds per byte of a micro-batch from one stage's devices to those of the
        next.

        Every device sends, or takes, its share of the samples through its own port (split and
        concat): where there are fewer of them the shares are larger, and that is what it takes.
        """
        latency, per_byte = self.inside if len(_nodes(one) | _nodes(other)) == 1 else self.between
        return latency, per_byte / min(sum(one), sum(other))

    def all_reduce(self, place: Place) -> tuple[float, float]:
        """The same of the gradients of a stage, on a ring: of k devices each sends 2 (k - 1) times
        a k-th of the bytes.
        """
        devices = sum(place)
        latency, per_byte = (
            self.inside if len(_nodes(place)) == 1 else self.collective or self.between
        )
        return 2 * (devices - 1) * latency, 2 * (devices - 1) / devices * per_byte


def _nodes(place: Place) -> set[int]:
    return {node for node, count in enumerate(place) if count}


def placements(sizes: Sequence[int], used: Place, devices: int) -> list[Place]:
    """Places for a stage of so many devices: fresh first, append first, scatter first; without
    those that are equal.

    >>> placements((4, 4, 4), (2, 0, 0), 3)
    [(0, 3, 0), (2, 1, 0)]
    >>> placements((4, 4), (2, 2), 3)
    [(2, 1)]

    Args:
        sizes: devices of every node.
        used: those of them that are taken.
        devices: at most as many as are free.

    Source: Fan et al. 2021, DAPPLE, section 4: fresh first allocates on a machine that nothing is
    on yet, which keeps a stage within it; append first on those that are in use, which leaves no
    fragments; scatter first takes equally many of all that are in use, or of all if none is.
    """
    fresh = [node for node, count in enumerate(used) if not count]
    begun = [node for node, count in enumerate(used) if count]
    free = [size - count for size, count in zip(sizes, used, strict=True)]
    found = [
        _fill(free, [*fresh, *begun], devices),
        _fill(free, [*begun, *fresh], devices),
        _scatter(free, begun or fresh, fresh if begun else [], devices),
    ]
    return list(dict.fromkeys(found))


def _fill(free: Sequence[int], nodes: Sequence[int], devices: int) -> Place:
    """One node after the other."""
    taken = [0] * len(free)
    for node in nodes:
        taken[node] = min(free[node], devices)
        devices -= taken[node]
    return tuple(taken)


def _scatter(free: Sequence[int], nodes: Sequence[int], then: Sequence[int], devices: int) -> Place:
    """One from each node in turn, and what these do not have one node after the other."""
    taken = [0] * len(free)
    while devices and any(taken[node] < free[node] for node in nodes):
        for node in nodes:
            if devices and taken[node] < free[node]:
                taken[node] += 1
                devices -= 1
    for node in then:
        taken[node] = min(free[node], devices)
        devices -= taken[node]
    return tuple(taken)

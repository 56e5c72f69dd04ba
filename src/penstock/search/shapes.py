"""Shapes: how the cluster's devices are shared out among pipelines, before anything is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from penstock.cluster.cluster import Cluster
from penstock.partition.ordered import best_order
from penstock.search.request import PlanRequest

#: Up to so many devices every number of pipelines and of ranks in each is tried; of more, those
#: that use nearly all of them.
FEW = 16

#: Longer pipelines of several kinds have them kind after kind only.
MOST_ORDERED = 64

#: Micro-batches of a pipeline that the order of kinds is worked out for.
USUAL_MICRO_BATCHES = 16

#: Orders of the kinds of devices along a pipeline that are tried.
MOST_ORDERS = 6


@dataclass(frozen=True)
class Shape:
    """`pipelines` pipelines of `ranks` ranks each.

    `devices` are the cluster's ranks that they are, pipeline after pipeline; all pipelines have the
    same kinds in the same order.
    """

    pipelines: int
    ranks: int
    devices: tuple[int, ...]

    @property
    def first(self) -> tuple[int, ...]:
        """The devices of the first pipeline."""
        return self.devices[: self.ranks]


def shapes(request: PlanRequest) -> list[Shape]:
    """All shapes to weigh, each once: on all kinds of devices and on the faster ones alone, and
    where there are several nodes both along them (a pipeline fills a node before it goes to the
    next) and across them (its stages stand on different nodes).
    """
    found: dict[Shape, None] = {}
    for kinds in _kinds(request):
        for order in _orders(request.cluster, kinds):
            for pipelines, counts in _counts(request, order):
                for kinds_along in _along(request, order, counts, pipelines):
                    for across in (False, True) if request.cluster.nodes > 1 else (False,):
                        found[_shape(request.cluster, kinds_along, pipelines, across)] = None
    return list(found)


def _along(
    request: PlanRequest, order: tuple[str, ...], counts: tuple[int, ...], pipelines: int
) -> Iterator[tuple[str, ...]]:
    """The kinds of a pipeline's devices along it: kind after kind; and where there are several, in
    the order in which the slowest stage is fastest.
    """
    yield tuple(name for name, count in zip(order, counts, strict=True) for _ in range(count))
    if len(order) == 1 or sum(counts) > MOST_ORDERED:
        return
    rank_of = {device.name: rank for rank, device in enumerate(request.cluster.devices)}
    samples = request.batch / (pipelines * min(USUAL_MICRO_BATCHES, -(-request.batch // pipelines)))
    seconds = [request.profile_of(rank_of[name]).step_seconds(samples) for name in order]
    sizes = [samples * layer.output_bytes_per_sample for layer in request.profile.layers[:-1]]
    best = best_order(
        seconds,
        counts,
        sum(counts),
        transfer=list(map(request.cluster.between.transfer_seconds, sizes)),
    )
    if best is not None:
        yield tuple(order[kind] for kind in best.kinds)


def _kinds(request: PlanRequest) -> list[tuple[str, ...]]:
    """The kinds of devices, fastest first: the first, the first two, … and all."""
    cluster = request.cluster
    work: dict[str, float] = {}
    for rank, device in enumerate(cluster.devices):
        work.setdefault(device.name, sum(request.profile_of(rank).step_seconds(request.batch)))
    ranked = sorted(work, key=lambda name: work[name])
    return [tuple(ranked[:count]) for count in range(len(ranked), 0, -1)]


def _orders(cluster: Cluster, kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Orders of the kinds along a pipeline: as the cluster has them, and others."""
    given = tuple(dict.fromkeys(device.name for device in cluster.devices if device.name in kinds))
    return list(dict.fromkeys([given, given[::-1], *permutations(kinds)]))[:MOST_ORDERS]


def _counts(request: PlanRequest, order: tuple[str, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Numbers of pipelines, and how many devices of each kind one of them has."""
    have = [sum(device.name == name for device in request.cluster.devices) for name in order]
    layers, total = len(request.profile), sum(have)
    most = min(request.copies_allowed, request.batch, total)
    numbers = range(1, most + 1) if total <= FEW else _spread(most)
    for pipelines in numbers:
        share = tuple(count // pipelines for count in have)
        if len(order) > 1:
            if all(share):
                yield pipelines, _at_most(share, layers)
            continue
        longest = min(share[0], layers)
        lengths = range(1, longest + 1) if total <= FEW else _few(longest, pipelines == 1)
        for ranks in lengths:
            yield pipelines, (ranks,)


def _at_most(share: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The share with the same proportions and no more ranks than there are layers, every kind at
    least once.
    """
    if sum(share) <= layers:
        return share
    return tuple(max(1, count * layers // sum(share)) for count in share)


def _spread(most: int) -> list[int]:
    """Powers of two, and three times them, up to `most`, and `most`."""
    found = {most}
    for power in range(most.bit_length()):
        found |= {each for each in (2**power, 3 * 2**power) if each <= most}
    return sorted(found)


def _few(longest: int, alone: bool) -> list[int]:
    """Of so many devices for each pipeline: all, and where one pipeline stands alone fewer as well."""
    return _spread(longest) if alone else [longest]


def _shape(cluster: Cluster, kinds_along: tuple[str, ...], pipelines: int, across: bool) -> Shape:
    left = {}
    for name in dict.fromkeys(kinds_along):
        ranks = [rank for rank, device in enumerate(cluster.devices) if device.name == name]
        left[name] = iter(_across(cluster, ranks) if across else ranks)
    return Shape(
        pipelines,
        len(kinds_along),
        tuple(next(left[name]) for _ in range(pipelines) for name in kinds_along),
    )


def _across(cluster: Cluster, ranks: list[int]) -> list[int]:
    """The first device of every node, then the second of every node, and so on."""
    place: dict[int, int] = {}
    keys = {}
    for rank in ranks:
        node = cluster.node(rank)
        place[node] = place.get(node, -1) + 1
        keys[rank] = place[node], node
    return sorted(ranks, key=lambda rank: keys[rank])

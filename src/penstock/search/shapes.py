"""Shapes: how the cluster's devices are divided among pipelines, before the model is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from penstock.cluster.cluster import Cluster
from penstock.partition.ordered import best_order
from penstock.search.request import PlanRequest

#: Up to this many devices every number of pipelines and of ranks per pipeline is tried. On larger
#: clusters only the divisions that use nearly all devices are.
FEW = 16

#: In pipelines of more ranks devices of several kinds are only grouped kind by kind.
MOST_ORDERED = 64

#: Micro-batches per pipeline for which the order of the kinds is computed.
USUAL_MICRO_BATCHES = 16

#: Up to this many devices, every choice and order of devices that is not equal to another one is a
#: placement.
FEW_PLACED = 4

#: Maximum number of orders of the kinds of devices along a pipeline that are tried.
MOST_ORDERS = 6


@dataclass(frozen=True)
class Shape:
    """`pipelines` pipelines of `ranks` ranks each.

    `devices` are the cluster's ranks, pipeline after pipeline. All pipelines have the same kinds of
    devices in the same order.
    """

    pipelines: int
    ranks: int
    devices: tuple[int, ...]

    @property
    def first(self) -> tuple[int, ...]:
        """The devices of the first pipeline."""
        return self.devices[: self.ranks]


def shapes(request: PlanRequest) -> list[Shape]:
    """Return all shapes to consider, without duplicates.

    They use all kinds of devices, or only the faster ones. In a cluster of several nodes pipelines
    are laid both along the nodes (a pipeline fills a node before it uses the next) and across them
    (consecutive stages are on different nodes).
    """
    across_choices = (False, True) if request.cluster.nodes > 1 else (False,)
    unique: dict[Shape, None] = {}
    for kinds in _kinds(request):
        for order in _orders(request.cluster, kinds):
            for pipelines, counts in _counts(request, order):
                for kinds_along in _along(request, order, counts, pipelines):
                    for across in across_choices:
                        unique[_shape(request.cluster, kinds_along, pipelines, across)] = None
    return list(unique)


def placements(request: PlanRequest) -> list[Shape]:
    """Return, for few devices, the shapes with every choice and order of devices, of which those
    that differ only by equal devices or equal nodes are one; none for more devices, or if all are
    equal and in one node.
    """
    cluster = request.cluster
    if cluster.ranks > FEW_PLACED or (cluster.nodes == 1 and len(cluster.kinds) == 1):
        return []
    most = min(request.copies_allowed, request.batch)
    unique: dict[object, Shape] = {}
    for used in range(1, cluster.ranks + 1):
        for devices in permutations(range(cluster.ranks), used):
            for pipelines in range(1, min(most, used) + 1):
                ranks = used // pipelines
                # Pipelines are interchangeable: only in the order of their first devices.
                is_sorted = all(a < b for a, b in pairwise(devices[::ranks]))
                if used % pipelines or ranks > len(request.profile) or not is_sorted:
                    continue
                key = pipelines, placement_key(cluster, devices)
                unique.setdefault(key, Shape(pipelines, ranks, devices))
    return list(unique.values())


def placement_key(cluster: Cluster, devices: Sequence[int]) -> tuple[object, ...]:
    """Return a key that is equal for placements that differ only by equal devices or equal
    nodes.
    """
    place_of_node: dict[int, int] = {}
    key = []
    for rank in devices:
        node = cluster.node(rank)
        place = place_of_node.setdefault(node, len(place_of_node))
        members = cluster.ranks_of_node(node)
        kinds = tuple(sorted(cluster.devices[member].name for member in members))
        inside = cluster.link(*members[:2]) if len(members) > 1 else None
        key.append((cluster.devices[rank].name, place, kinds, inside))
    return tuple(key)


def _along(
    request: PlanRequest, order: tuple[str, ...], counts: tuple[int, ...], pipelines: int
) -> Iterator[tuple[str, ...]]:
    """Yield the kind of every device along one pipeline: grouped kind by kind; and with several
    kinds also the order that makes the slowest stage fastest.
    """
    yield tuple(name for name, count in zip(order, counts, strict=True) for _ in range(count))
    if len(order) == 1 or sum(counts) > MOST_ORDERED:
        return
    rank_of = {device.name: rank for rank, device in enumerate(request.cluster.devices)}
    samples = request.batch / (pipelines * min(USUAL_MICRO_BATCHES, -(-request.batch // pipelines)))
    seconds = [request.profile_of(rank_of[name]).step_seconds(samples) for name in order]
    sizes = [samples * layer.output_bytes_per_sample for layer in request.profile.layers[:-1]]
    transfers = [request.cluster.between.transfer_seconds(size) for size in sizes]
    best = best_order(seconds, counts, sum(counts), transfer=transfers)
    if best is not None:
        yield tuple(order[kind] for kind in best.kinds)


def _kinds(request: PlanRequest) -> list[tuple[str, ...]]:
    """Return the sets of kinds of devices to use: all, all but the slowest, … and the fastest
    alone; each ordered fastest first.
    """
    cluster = request.cluster
    step_s: dict[str, float] = {}
    for rank, device in enumerate(cluster.devices):
        step_s.setdefault(device.name, sum(request.profile_of(rank).step_seconds(request.batch)))
    ranked = sorted(step_s, key=lambda name: step_s[name])
    return [tuple(ranked[:count]) for count in range(len(ranked), 0, -1)]


def _orders(cluster: Cluster, kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return orders of the kinds along a pipeline, that of the cluster first."""
    names = (device.name for device in cluster.devices if device.name in kinds)
    cluster_order = tuple(dict.fromkeys(names))
    orders = [cluster_order, cluster_order[::-1], *permutations(kinds)]
    return list(dict.fromkeys(orders))[:MOST_ORDERS]


def _counts(request: PlanRequest, order: tuple[str, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield numbers of pipelines, and how many devices of each kind one of them has."""
    names = [device.name for device in request.cluster.devices]
    available = [names.count(name) for name in order]
    layers, total = len(request.profile), sum(available)
    most = min(request.copies_allowed, request.batch, total)
    numbers = range(1, most + 1) if total <= FEW else _sizes_up_to(most)
    for pipelines in numbers:
        share = tuple(count // pipelines for count in available)
        if len(order) > 1:
            if all(share):
                yield pipelines, _at_most(share, layers)
            continue
        longest = min(share[0], layers)
        if total <= FEW:
            lengths = list(range(1, longest + 1))
        elif pipelines == 1:
            # One pipeline alone may also do better on fewer devices than there are.
            lengths = _sizes_up_to(longest)
        else:
            lengths = [longest]
        for ranks in lengths:
            yield pipelines, (ranks,)


def _at_most(share: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Scale the counts of devices of each kind down to at most one rank per layer, keeping their
    proportions and at least one device of each kind.
    """
    if sum(share) <= layers:
        return share
    return tuple(max(1, count * layers // sum(share)) for count in share)


def _sizes_up_to(most: int) -> list[int]:
    """Return the powers of two and three times the powers of two up to `most`, and `most`."""
    sizes = {most}
    for power in range(most.bit_length()):
        sizes |= {size for size in (2**power, 3 * 2**power) if size <= most}
    return sorted(sizes)


def _shape(cluster: Cluster, kinds_along: tuple[str, ...], pipelines: int, across: bool) -> Shape:
    """Assign devices of the cluster to pipelines with these kinds along them."""
    unused = {}
    for name in dict.fromkeys(kinds_along):
        ranks = [rank for rank, device in enumerate(cluster.devices) if device.name == name]
        unused[name] = iter(_across(cluster, ranks) if across else ranks)
    devices = tuple(next(unused[name]) for _ in range(pipelines) for name in kinds_along)
    return Shape(pipelines, len(kinds_along), devices)


def _across(cluster: Cluster, ranks: list[int]) -> list[int]:
    """Order ranks by their position in their node: the first of every node, then the second."""
    used: dict[int, int] = {}
    keys = {}
    for rank in ranks:
        node = cluster.node(rank)
        used[node] = used.get(node, -1) + 1
        keys[rank] = used[node], node
    return sorted(ranks, key=lambda rank: keys[rank])

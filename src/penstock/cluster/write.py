"""Write a Cluster as YAML that reads back as an equal one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from penstock.cluster.device import Device, Link
from penstock.cluster.fields import (
    UNLIMITED,
    parse_bandwidth,
    parse_flops,
    parse_latency,
    parse_memory,
)
from penstock.cluster.machines import Cluster
from penstock.files.yaml_values import yaml_text

_BYTES = (("GB", 1e9), ("GiB", 2**30), ("MB", 1e6), ("MiB", 2**20))
_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("B/s", 1.0))
_FLOPS = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("FLOP/s", 1.0))
_TIMES = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))

_SHORT_TIMES = (("ns", 1e-9), ("s", 1.0))


def yaml_of(cluster: Cluster) -> str:
    """Return the description of a cluster as YAML; every number reads back to the last bit."""
    description: dict[str, Any] = {"name": cluster.name}
    if cluster.source:
        description["source"] = cluster.source
    if cluster.node_of or cluster.insides:
        node_of = [cluster.node(rank) for rank in range(cluster.ranks)]
        description["nodes"] = _nodes(cluster)
        if node_of != sorted(node_of):
            description["node_of"] = node_of
    else:
        description["devices_per_node"] = cluster.devices_per_node
        description["devices"] = _devices(cluster.devices)
    if cluster.hosts:
        description["hosts"] = list(cluster.hosts)
    description["inside"] = _link(cluster.inside)
    description["between"] = _link(cluster.between)
    return yaml_text(description)


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the entries of the nodes, in order; consecutive equal nodes share an entry."""

    def node_contents(node: int) -> tuple[tuple[Device, ...], Link]:
        """Return a node's devices and its inside link."""
        ranks = cluster.ranks_of_node(node)
        # The link of a rank to itself is the inside link of its node.
        return tuple(cluster.devices[rank] for rank in ranks), cluster.link(ranks[0], ranks[0])

    rows = []
    for (devices, link), equal_nodes in groupby(map(node_contents, range(cluster.nodes))):
        count = len(list(equal_nodes))
        row: dict[str, Any] = {"count": count} if count > 1 else {}
        row["devices"] = _devices(devices)
        if link != cluster.inside:
            row["inside"] = _link(link)
        rows.append(row)
    return rows


def _devices(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Return the entries of devices, in order; consecutive equal devices share an entry."""
    rows = []
    for device, equal_devices in groupby(devices):
        count = len(list(equal_devices))
        row = _device(device)
        if count > 1:
            row["count"] = count
        rows.append(row)
    return rows


def _device(device: Device) -> dict[str, Any]:
    """Return the entry of a device; figures that are unknown or default are left out."""
    row: dict[str, Any] = {
        "name": device.name,
        "kind": device.kind,
        "memory": _memory(device.memory_bytes),
    }
    if device.flops:
        row["flops"] = {dtype: _exact(peak, _FLOPS, parse_flops) for dtype, peak in device.flops}
    if device.memory_bytes_per_s is not None:
        row["memory_bandwidth"] = _rate(device.memory_bytes_per_s)
    if device.launch_s:
        row["launch"] = _exact(device.launch_s, _TIMES, parse_latency)
    if device.on_chip_bytes:
        row["on_chip"] = _memory(device.on_chip_bytes)
    if device.together != 1:
        row["together"] = device.together
    if device.source:
        row["source"] = device.source
    return row


def _link(link: Link) -> dict[str, Any]:
    """Return the entry of a link; figures that are unknown or default are left out."""
    row: dict[str, Any] = {
        "latency": _exact(link.latency_s, _TIMES, parse_latency),
        "bandwidth": _rate(link.bandwidth_bytes_per_s),
    }
    if link.shared:
        row["shared"] = True
    if link.cpu_s_per_byte is not None:
        row["cpu_per_byte"] = _exact(link.cpu_s_per_byte, _SHORT_TIMES, parse_latency)
    if link.cpu_s_per_message is not None:
        row["cpu_per_message"] = _exact(link.cpu_s_per_message, _TIMES, parse_latency)
    if link.busy_s_per_byte is not None:
        row["busy_per_byte"] = _exact(link.busy_s_per_byte, _SHORT_TIMES, parse_latency)
    if link.source:
        row["source"] = link.source
    return row


def _memory(count: int) -> str | int:
    """Return bytes in the largest unit that divides them; as a bare number if no text is exact."""
    for unit, factor in _BYTES:
        if count % int(factor) == 0:
            return f"{count // int(factor)} {unit}"
    text = _exact(count, (("GB", 1e9),), parse_memory)
    return text if parse_memory(text) == count else count


def _rate(value: float) -> str:
    """Return bytes per second as text."""
    return UNLIMITED if math.isinf(value) else _exact(value, _RATES, parse_bandwidth)


def _exact(
    value: float, units: Iterable[tuple[str, float]], parse: Callable[[object], float]
) -> str:
    """Return the shortest text that `parse` reads as exactly `value`.

    In the last unit, whose factor is 1, there always is one.
    """
    texts = []
    for unit, factor in units:
        rounded = f"{value / factor:.6g}"
        exact = f"{value / factor!r}".removesuffix(".0")
        texts += [f"{rounded} {unit}", f"{exact} {unit}"]
    # Division by the factor rounds, so that not every text reads back as the same number.
    exact_texts = [text for text in texts if parse(text) == value]
    return min(exact_texts, key=len, default=texts[-1])

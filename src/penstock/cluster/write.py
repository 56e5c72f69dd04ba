"""From a Cluster to the YAML that reads back as an equal one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import yaml

from penstock.cluster.device import Device, Link
from penstock.cluster.fields import (
    UNLIMITED,
    parse_bandwidth,
    parse_flops,
    parse_latency,
    parse_memory,
)
from penstock.cluster.machines import Cluster

_BYTES = (("GB", 1e9), ("GiB", 2**30), ("MB", 1e6), ("MiB", 2**20))
_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("B/s", 1.0))
_FLOPS = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("FLOP/s", 1.0))
_TIMES = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))


def yaml_of(cluster: Cluster) -> str:
    """The description of a cluster; every number reads back as it is, to the last bit."""
    found: dict[str, Any] = {"name": cluster.name}
    if cluster.source:
        found["source"] = cluster.source
    if cluster.node_of or cluster.insides:
        filled = [node for node in range(cluster.nodes) for _ in cluster.ranks_of_node(node)]
        found["nodes"] = _nodes(cluster)
        if filled != [cluster.node(rank) for rank in range(cluster.ranks)]:
            found["node_of"] = [cluster.node(rank) for rank in range(cluster.ranks)]
    else:
        found["devices_per_node"] = cluster.devices_per_node
        found["devices"] = _devices(cluster.devices)
    found["inside"], found["between"] = _link(cluster.inside), _link(cluster.between)
    return yaml.dump(found, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)


class _Plain(yaml.SafeDumper):
    """A dumper without anchors: equal devices are told in full wherever they stand."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    """Nodes in order; those in a row that are alike in one entry."""

    def parts(node: int) -> tuple[tuple[Device, ...], Link]:
        ranks = cluster.ranks_of_node(node)
        return tuple(cluster.devices[rank] for rank in ranks), cluster.link(ranks[0], ranks[0])

    rows = []
    for (devices, link), alike in groupby(map(parts, range(cluster.nodes))):
        count = len(list(alike))
        row: dict[str, Any] = {"count": count} if count > 1 else {}
        row["devices"] = _devices(devices)
        rows.append(row | ({"inside": _link(link)} if link != cluster.inside else {}))
    return rows


def _devices(devices: Sequence[Device]) -> list[dict[str, Any]]:
    rows = []
    for device, alike in groupby(devices):
        count = len(list(alike))
        rows.append(_device(device) | ({"count": count} if count > 1 else {}))
    return rows


def _device(device: Device) -> dict[str, Any]:
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
    return row | ({"source": device.source} if device.source else {})


def _link(link: Link) -> dict[str, Any]:
    row: dict[str, Any] = {
        "latency": _exact(link.latency_s, _TIMES, parse_latency),
        "bandwidth": _rate(link.bandwidth_bytes_per_s),
    }
    return (
        row
        | ({"shared": True} if link.shared else {})
        | ({"source": link.source} if link.source else {})
    )


def _memory(count: int) -> str | int:
    for unit, factor in _BYTES:
        if count % int(factor) == 0:
            return f"{count // int(factor)} {unit}"
    text = _exact(count, (("GB", 1e9),), parse_memory)
    return text if parse_memory(text) == count else count


def _rate(value: float) -> str:
    return UNLIMITED if math.isinf(value) else _exact(value, _RATES, parse_bandwidth)


def _exact(
    value: float, units: Iterable[tuple[str, float]], parse: Callable[[object], float]
) -> str:
    """The shortest of the texts that `parse` reads as exactly `value`; in the last unit there
    always is one.
    """
    texts = [
        f"{number} {unit}"
        for unit, factor in units
        for number in (f"{value / factor:.6g}", f"{value / factor!r}".removesuffix(".0"))
    ]
    same = [text for text in texts if parse(text) == value]
    return min(same, key=len, default=texts[-1])

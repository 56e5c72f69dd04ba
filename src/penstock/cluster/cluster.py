"""Cluster: the devices a plan is for and the links between them, described in a word, or in a YAML file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, final

import yaml

from penstock.cluster.device import Device, Kind, Link
from penstock.cluster.fields import MOST, Fields, parse_bandwidth, parse_count, parse_latency, parse_memory, parse_text
from penstock.cluster.presets import Presets
from penstock.errors import ClusterError, UnknownName

__all__ = ["Cluster", "Device", "Link", "cluster"]

#: Between processes of one host: gloo over the loopback device, about what a laptop gives.
LOOPBACK: Final = Link(50e-6, 1e9, "assumed: measure by `penstock doctor`")

_CLUSTER = ("name", "devices_per_node", "devices", "inside", "between", "source")


@final
@dataclass(frozen=True)
class Cluster:
    """Devices by rank; ranks fill node after node, `devices_per_node` on each.

    `inside` joins two ranks of one node, `between` two ranks of different nodes.

    Raises:
        ClusterError: there is no device, or less than one per node.
    """

    name: str
    devices: tuple[Device, ...]
    devices_per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError(f"cluster {self.name} has no devices; it needs at least one")
        if self.devices_per_node < 1:
            raise ClusterError(f"cluster {self.name} has {self.devices_per_node} devices per node; it needs at least one")

    def __str__(self) -> str:
        kinds = dict.fromkeys(device.name for device in self.devices)
        lines = [f"{self.name}: {self.ranks} ranks on {self.nodes} node{'s'[: self.nodes > 1]} ({', '.join(kinds)})"]
        lines += [f"  inside a node   {self.inside}"] if self.devices_per_node > 1 else []
        lines += [f"  between nodes   {self.between}"] if self.nodes > 1 else []
        return "\n".join(lines)

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def nodes(self) -> int:
        """Number of nodes; the last may hold fewer devices than the others."""
        return -(-self.ranks // self.devices_per_node)

    def link(self, a: int, b: int) -> Link:
        """The link from rank `a` to rank `b`.

        Raises:
            ClusterError: one of them is not a rank of this cluster.
        """
        for rank in (a, b):
            if not 0 <= rank < self.ranks:
                raise ClusterError(f"cluster {self.name} has ranks 0 to {self.ranks - 1}, and no rank {rank}")
        return self.inside if a // self.devices_per_node == b // self.devices_per_node else self.between

    def transfer_seconds(self, count: float, a: int, b: int) -> float:
        """Seconds for a message of `count` bytes from rank `a` to rank `b`; 0 if they are the same.

        Raises:
            ClusterError: one of them is not a rank of this cluster.
        """
        link = self.link(a, b)
        return 0.0 if a == b else link.transfer_seconds(count)

    def with_links(self, inside: Link | None = None, between: Link | None = None) -> Cluster:
        """The same devices with other links, for instance measured ones."""
        return replace(self, inside=inside or self.inside, between=between or self.between)


def cluster(spec: str | Path | int) -> Cluster:
    """A cluster from a description.

    Args:
        spec: one of

            - `"local:2"` or `2`: this host's memory, split over 2 CPU ranks
            - `"8xA100-NVLink"`, `"4xV100-10GbE"`: devices and the link between them: a bus joins those of one node, a network
              nodes of one device each
            - `"2x8xV100-NVLink-25GbE"`: nodes, devices in each, the link inside a node, the link between nodes
            - `"PipeDream-A"`: a paper's cluster (all names are in presets.yaml)
            - the path of a YAML file. Presets and own values mix; no key but these is known; `inside` may be left out where
              nodes have one device, `between` where there is one node:

              ```yaml
              name: lab
              devices_per_node: 2
              devices:
                - {name: V100, count: 2}
                - {name: old, memory: 12 GB, kind: gpu, count: 2}
              inside: PCIe3
              between: {latency: 30 us, bandwidth: 10 Gb/s, source: measured}
              ```

    >>> print(cluster("2x8xV100-NVLink-25GbE"))
    2x8xV100-NVLink-25GbE: 16 ranks on 2 nodes (V100)
      inside a node   5.0 us + 25 GB/s (datasheet: NVLink 2, one of the links between two V100; latency assumed)
      between nodes   50.0 us + 3.125 GB/s (datasheet: line rate; latency assumed)

    Raises:
        ClusterError: nothing of this name is known, the file cannot be read, or says something else.
    """
    if isinstance(spec, Path):
        return _from_file(spec)
    if isinstance(spec, int) and not isinstance(spec, bool):
        return _local(spec, f"local:{spec}")
    if not isinstance(spec, str):
        raise ClusterError(f"a cluster is described by a text, a path or a number of ranks, not by {spec!r}")
    if match := re.fullmatch(r"local(?::(\d+))?", spec):
        return _local(int(match[1] or 1), spec)
    presets = Presets.load()
    found = _from_words(spec, presets)
    if found is not None:
        return found
    for name, row in presets.clusters.items():
        if name.lower() == spec.lower():
            return _describe({"name": name, **row}, f"presets: {name}", presets)
    if spec.endswith((".yaml", ".yml")) or Path(spec).is_file():
        return _from_file(Path(spec))
    raise ClusterError(
        f"no cluster called {spec!r}. Write 'local:2', '4xV100-10GbE' (devices, link), '2x8xV100-NVLink-25GbE' (nodes, devices "
        f"in each, link inside, link between), the path of a YAML file, or a paper's: {', '.join(presets.clusters)}. "
        f"Devices: {', '.join(presets.devices)}. Links: NVLink, {', '.join(presets.links)}"
    )


def _local(ranks: int, name: str) -> Cluster:
    if not 1 <= ranks <= MOST:
        raise ClusterError(f"{name}: a cluster has 1 to {MOST} ranks")
    device = Device("cpu", _host_memory_bytes() // ranks, "cpu")
    return Cluster(name, (device,) * ranks, ranks, LOOPBACK, LOOPBACK)


def _host_memory_bytes() -> int:
    """What this host, or the container we are in, may use."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise ClusterError("this host does not tell its memory; describe it in a YAML file") from error
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = ""
    return min(whole, int(limit)) if limit.isdecimal() else whole


def _from_words(spec: str, presets: Presets) -> Cluster | None:
    """`[nodes x] devices x device - link [- link]`, or None if it is not of that form."""

    def any_of(*names: str) -> str:
        return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))

    device, link = any_of(*presets.devices), any_of("NVLink", *presets.links)
    match = re.fullmatch(rf"(?:(\d+)x)?(\d+)x({device})-({link})(?:-({link}))?", spec, re.IGNORECASE)
    if match is None:
        return None
    nodes, count = match[1], int(match[2])
    if (nodes is None) != (match[5] is None):
        raise ClusterError(f"{spec!r}: nodes of several devices need both links, inside and between, as in "
                           "'2x8xV100-NVLink-25GbE'; one link goes with one number, as in '8xV100-NVLink'")  # fmt: skip
    if not 1 <= int(nodes or 1) * count <= MOST:
        raise ClusterError(f"{spec!r}: a cluster has 1 to {MOST} devices")
    made = presets.device(match[3])
    try:
        first, last = (presets.link_name(match[i] or match[4], made.name) for i in (4, 5))
    except UnknownName as error:
        raise ClusterError(f"{spec!r}: {error}") from error
    inside, between = presets.links[first], presets.links[last]
    if nodes is not None:
        return Cluster(spec, (made,) * (int(nodes) * count), count, inside, between)
    return Cluster(spec, (made,) * count, 1 if first in presets.network else count, inside, between)


def _from_file(path: Path) -> Cluster:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read the cluster {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not YAML: {error}") from error
    return _describe(found, str(path), Presets.load())


def _describe(found: Any, where: str, presets: Presets) -> Cluster:
    fields = Fields.of(found, where, _CLUSTER)
    name = fields.read("name", parse_text)
    per_node = fields.read("devices_per_node", parse_count)
    rows = fields.read("devices", lambda value: value)
    if not isinstance(rows, list) or not rows:
        raise ClusterError(f"{where}: devices: {rows!r} is no list of devices")
    devices: list[Device] = []
    for i, row in enumerate(rows):
        devices += _devices(row, f"{where}: devices[{i}]", presets)
    links: dict[str, Link] = {}
    for key, needed in (("inside", per_node > 1), ("between", len(devices) > per_node)):
        if key in fields:
            links[key] = fields.read(key, partial(_link, where=f"{where}: {key}", device=devices[0].name, presets=presets))
        elif needed:
            raise ClusterError(f"{where}: the key {key!r} is missing: {len(devices)} devices, {per_node} on a node, need it")
    if not links:  # one device alone: nothing is ever sent
        return Cluster(name, tuple(devices), per_node, LOOPBACK, LOOPBACK)
    only = next(iter(links.values()))
    return Cluster(name, tuple(devices), per_node, links.get("inside", only), links.get("between", only))


def _devices(row: object, where: str, presets: Presets) -> list[Device]:
    """The devices of one entry: a preset's name, `{name, count}` of a preset, or `{name, memory, kind, count}`."""
    if isinstance(row, str):
        row = {"name": row}
    fields = Fields.of(row, where, ("name", "memory", "kind", "count"))
    name, count = fields.read("name", parse_text), fields.read("count", parse_count, 1)
    if "memory" in fields:
        kind = cast("Kind", fields.read("kind", parse_text, "gpu"))  # Device checks it
        try:
            return [Device(name, fields.read("memory", parse_memory), kind)] * count
        except ClusterError as error:
            raise ClusterError(f"{where}: {error}" if where not in str(error) else str(error)) from error
    if "kind" in fields:
        raise ClusterError(f"{where}: the key 'memory' is missing: {name!r} with a kind is a device of your own")
    try:
        return [presets.device(name)] * count
    except UnknownName as error:
        raise ClusterError(f"{where}: {error}. A device of your own needs 'memory'") from error


def _link(value: object, where: str, device: str, presets: Presets) -> Link:
    """A preset's name, or `{latency, bandwidth, source}`."""
    if isinstance(value, str):
        try:
            return presets.links[presets.link_name(value, device)]
        except UnknownName as error:
            raise ClusterError(f"{where}: {error}") from error
    fields = Fields.of(value, where, ("latency", "bandwidth", "source"))
    latency, bandwidth = fields.read("latency", parse_latency), fields.read("bandwidth", parse_bandwidth)
    try:
        return Link(latency, bandwidth, fields.read("source", parse_text, "assumed"))
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error

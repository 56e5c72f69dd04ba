"""Read a cluster from a description, which is a YAML file or an entry of presets.yaml.

Besides the form that `cluster` documents, different nodes may be listed. A device or link may be
`like` a preset, with some figures changed; unknown figures of a device are left out. `node_of: [0,
1, 0, ...]` gives the node of every rank, if ranks do not fill node after node. `hosts: [a, b]`
names the host of every node, as `penstock profile --cluster` does: plans then run on these hosts.

```yaml
name: mixed
nodes:
  - {count: 2, devices: [{name: A100, count: 4}], inside: NVLink}
  - devices:
      - {name: slow A100, like: A100, memory: 30 GB, launch: 20 us, together: 1.1}
      - {name: old, memory: 8 GB, flops: {float32: 8 TFLOP/s}, memory_bandwidth: 320 GB/s}
    inside: {like: PCIe3, shared: true}
  - devices: [{name: board, kind: fpga, memory: 4 GB, dsp: 6840, clock: 200 MHz, on_chip: 43 MB}]
between: 25GbE
```

A device's keys: name, like, count, memory, kind (cpu, gpu, fpga), flops by dtype or dsp and clock,
memory_bandwidth, launch (overhead of an op before it computes), on_chip, together (seconds while
all are busy over seconds alone), source. A link's: like, latency, bandwidth, shared, source;
cpu_per_byte (CPU time that a message between hosts takes of each of its ranks), cpu_per_message
(time for which a message of no bytes occupies its sender), busy_per_byte (time that a rank loses to
a message if it computes meanwhile).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cluster.device import Device, Link
from penstock.cluster.entries import build_device, build_link, has_figures
from penstock.cluster.fields import MAX_DEVICES
from penstock.cluster.local import LOOPBACK
from penstock.cluster.machines import Cluster
from penstock.cluster.presets import Presets
from penstock.errors import ClusterError, FileError, UnknownName
from penstock.files.read import read_yaml, validate
from penstock.files.text import quote

if TYPE_CHECKING:
    from penstock.cluster.description import (
        DeviceEntry,
        LinkEntry,
        MixedDescription,
        NodeEntry,
        UniformDescription,
    )

#: The devices of a node, and its inside link if it has one.
_Node = tuple[list[Device], Link | None]


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a YAML file describes.

    Raises:
        ClusterError: the file cannot be read, or is no valid description; the message names file
            and key.
    """
    try:
        content = read_yaml(path, object, kind="cluster")
    except FileError as error:
        raise ClusterError(str(error)) from error
    return build_cluster(content, str(path), Presets.load())


def build_cluster(content: Any, where: str, presets: Presets) -> Cluster:
    """Return the cluster of a description.

    Args:
        content: plain values as read from YAML.
        where: place of the description, with which every message begins.
        presets: the tables of presets.yaml.

    Raises:
        ClusterError: the description is invalid.
    """
    from penstock.cluster.description import (  # imported late: loads pydantic
        MixedDescription,
        UniformDescription,
    )

    builder = _Builder(where, presets)
    keys = content if isinstance(content, dict) else {}
    if "node_of" in keys and "nodes" not in keys:
        raise ClusterError(
            f"{where}: node_of gives the node of each rank, but there is no list 'nodes'"
        )
    try:
        if "nodes" in keys:
            mixed = validate(json.dumps(content), MixedDescription, where, kind="cluster")
            return builder.mixed_nodes(mixed)
        uniform = validate(json.dumps(content), UniformDescription, where, kind="cluster")
    except FileError as error:
        raise ClusterError(str(error)) from error
    return builder.uniform_nodes(uniform)


@dataclass(frozen=True)
class _Builder:
    """Builds the cluster of a description at a place `where`."""

    where: str
    presets: Presets

    def uniform_nodes(self, description: UniformDescription) -> Cluster:
        """Return a cluster whose nodes are all of one size."""
        per_node = description.devices_per_node
        devices = self.devices(description.devices, "devices")
        links: dict[str, Link] = {}
        for key, required in (("inside", per_node > 1), ("between", len(devices) > per_node)):
            entry: LinkEntry | None = getattr(description, key)
            if entry is not None:
                links[key] = self.link(entry, key, devices[0])
            elif required:
                raise ClusterError(
                    f"{self.where}: the key {key!r} is missing: {len(devices)} devices, {per_node} "
                    "on a node, need it"
                )
        # A link that is not described joins no ranks, so any value will do.
        unused = next(iter(links.values()), LOOPBACK)
        return Cluster(
            description.name,
            tuple(devices),
            per_node,
            links.get("inside", unused),
            links.get("between", unused),
            source=description.source,
            hosts=tuple(description.hosts),
        )

    def mixed_nodes(self, description: MixedDescription) -> Cluster:
        """Return a cluster whose nodes are listed, each with its devices and inside link."""
        nodes = self.nodes(description)
        insides = tuple(
            (number, link) for number, (_, link) in enumerate(nodes) if link is not None
        )
        node_links = [link for _, link in insides]
        first_device = nodes[0][0][0]
        if description.between is not None:
            between = self.link(description.between, "between", first_device)
        elif len(nodes) > 1:
            raise ClusterError(
                f"{self.where}: the key 'between' is missing: {len(nodes)} nodes need it"
            )
        else:
            between = next(iter(node_links), LOOPBACK)
        if description.inside is not None:
            inside = self.link(description.inside, "inside", first_device)
        else:
            inside = next(iter(node_links), between)
        node_of = self.node_of(description.node_of, [len(devices) for devices, _ in nodes])
        remaining_devices = [iter(devices) for devices, _ in nodes]
        return Cluster(
            description.name,
            tuple(next(remaining_devices[node]) for node in node_of),
            1,
            inside,
            between,
            node_of,
            insides,
            description.source,
            tuple(description.hosts),
        )

    def nodes(self, description: MixedDescription) -> list[_Node]:
        """Return the nodes of a description."""
        nodes: list[_Node] = []
        device_count = 0
        for i, entry in enumerate(description.nodes):
            equal_nodes = self.node_entry(entry, f"nodes.{i}", description.inside)
            device_count += sum(len(devices) for devices, _ in equal_nodes)
            self.check_count(device_count)
            nodes += equal_nodes
        return nodes

    def node_entry(self, entry: NodeEntry, key: str, inside: LinkEntry | None) -> list[_Node]:
        """Return the nodes of one entry: `count` equal ones.

        Args:
            entry: the entry.
            key: its place.
            inside: the cluster's link inside a node.
        """
        devices = self.devices(entry.devices, f"{key}.devices")
        self.check_count(entry.count * len(devices))
        link = None
        if entry.inside is not None:
            link = self.link(entry.inside, f"{key}.inside", devices[0])
        elif inside is not None:
            # Built for every node: the generation of "NVLink" depends on the node's devices.
            link = self.link(inside, "inside", devices[0])
        elif len(devices) > 1:
            raise ClusterError(
                f"{self.where}: {key}: the key 'inside' is missing: {len(devices)} devices on a "
                "node need it, in this entry or for all nodes"
            )
        return [(devices, link)] * entry.count

    def node_of(self, numbers: list[int] | None, sizes: list[int]) -> tuple[int, ...]:
        """Return the node of every rank: `numbers`, or by default node after node."""
        in_order: list[int] = []
        for node, size in enumerate(sizes):
            in_order += [node] * size
        if numbers is None:
            return tuple(in_order)
        if sorted(numbers) != in_order:
            raise ClusterError(
                f"{self.where}: node_of: {quote(numbers)} is not the node of every rank; the "
                f"nodes, from 0, hold {quote(sizes)} devices"
            )
        return tuple(numbers)

    def check_count(self, count: int) -> None:
        """Refuse more than `MAX_DEVICES` devices."""
        if count > MAX_DEVICES:
            raise ClusterError(
                f"{self.where}: {count} devices are too many; a cluster has 1 to {MAX_DEVICES}"
            )

    def devices(self, entries: list[DeviceEntry], key: str) -> list[Device]:
        """Return the devices of a list."""
        devices: list[Device] = []
        for i, entry in enumerate(entries):
            device = self.device(entry, f"{self.where}: {key}.{i}")
            self.check_count(len(devices) + entry.count)
            devices += [device] * entry.count
        return devices

    def device(self, entry: DeviceEntry, where: str) -> Device:
        """Return the device of an entry.

        An entry is a preset's name, `{name, count}` of a preset, or a device of the user's own,
        possibly `like` a preset.
        """
        if entry.like is not None:
            base = self.preset(entry.like, f"{where}.like")
            return build_device(entry, entry.name or base.name, base, where)
        name = entry.name or ""
        if not has_figures(entry):
            return self.preset(name, where, "; a device of your own needs 'memory'")
        return build_device(entry, name, None, where)

    def preset(self, name: str, where: str, hint: str = "") -> Device:
        """Return the preset device called `name`; `hint` is added to the error message."""
        try:
            return self.presets.device(name)
        except UnknownName as error:
            raise ClusterError(f"{where}: {error}{hint}") from error

    def link(self, entry: LinkEntry, key: str, device: Device) -> Link:
        """Return the link of an entry between two devices of this kind."""
        where, base = f"{self.where}: {key}", None
        if entry.like is not None:
            try:
                base = self.presets.links[self.presets.link_name(entry.like, device.name)]
            except UnknownName as error:
                raise ClusterError(f"{where}: {error}") from error
        return build_link(entry, base, where)

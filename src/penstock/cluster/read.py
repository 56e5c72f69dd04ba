"""Read a cluster from a description, which is a YAML file or an entry of presets.yaml.

Besides the form that `cluster` documents, different nodes may be listed. A device or link may be
`like` a preset, with some figures changed; unknown figures of a device are left out. `node_of: [0,
1, 0, ...]` gives the node of every rank, if ranks do not fill node after node.

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
all are busy over seconds alone), source. A link's: like, latency, bandwidth, shared, source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cluster.device import Device, Link
from penstock.cluster.entries import DEVICE_KEYS, LINK_KEYS, read_device, read_link
from penstock.cluster.fields import MAX_DEVICES, Fields, parse_count, parse_text
from penstock.cluster.local import LOOPBACK
from penstock.cluster.machines import Cluster
from penstock.cluster.presets import Presets
from penstock.errors import ClusterError, FileError, SettingError, UnknownName
from penstock.files.text import quote, read_text
from penstock.files.yaml_values import yaml_value

#: Keys of a description with equal nodes, and of one that lists its nodes.
_UNIFORM_KEYS = ("name", "devices_per_node", "devices", "inside", "between", "source")
_MIXED_KEYS = ("name", "nodes", "node_of", "inside", "between", "source")

#: The devices of a node, and its inside link if it has one.
_Node = tuple[list[Device], Link | None]


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a YAML file describes.

    Raises:
        ClusterError: the file cannot be read, or is no valid description; the message names file
            and key.
    """
    try:
        description = yaml_value(read_text(path, "cluster"), str(path))
    except FileError as error:
        raise ClusterError(str(error)) from error
    return build_cluster(description, str(path), Presets.load())


def build_cluster(description: Any, where: str, presets: Presets) -> Cluster:
    """Return the cluster of a description.

    Args:
        description: a mapping as read from YAML.
        where: place of the description, with which every message begins.
        presets: the tables of presets.yaml.

    Raises:
        ClusterError: the description is invalid.
    """
    reader = _Reader(where, presets)
    if isinstance(description, dict) and "nodes" in description:
        return reader.mixed_nodes(Fields.of(description, where, _MIXED_KEYS))
    if isinstance(description, dict) and "node_of" in description:
        raise ClusterError(
            f"{where}: node_of gives the node of each rank, but there is no list 'nodes'"
        )
    return reader.uniform_nodes(Fields.of(description, where, _UNIFORM_KEYS))


@dataclass(frozen=True)
class _Reader:
    """Reads a description at a place `where`."""

    where: str
    presets: Presets

    def uniform_nodes(self, fields: Fields) -> Cluster:
        """Return a cluster whose nodes are all of one size."""
        name = fields.read("name", parse_text)
        per_node = fields.read("devices_per_node", parse_count)
        devices = self.devices(fields)
        links: dict[str, Link] = {}
        for key, required in (("inside", per_node > 1), ("between", len(devices) > per_node)):
            if key in fields:
                links[key] = self.link(fields, key, devices[0])
            elif required:
                raise ClusterError(
                    f"{self.where}: the key {key!r} is missing: {len(devices)} devices, {per_node} "
                    "on a node, need it"
                )
        # A link that is not described joins no ranks, so any value will do.
        unused = next(iter(links.values()), LOOPBACK)
        return Cluster(
            name,
            tuple(devices),
            per_node,
            links.get("inside", unused),
            links.get("between", unused),
            source=fields.read("source", parse_text, ""),
        )

    def mixed_nodes(self, fields: Fields) -> Cluster:
        """Return a cluster whose nodes are listed, each with its devices and inside link."""
        name = fields.read("name", parse_text)
        nodes = self.nodes(fields)
        insides = tuple(
            (number, link) for number, (_, link) in enumerate(nodes) if link is not None
        )
        node_links = [link for _, link in insides]
        first_device = nodes[0][0][0]
        if "between" in fields:
            between = self.link(fields, "between", first_device)
        elif len(nodes) > 1:
            raise ClusterError(
                f"{self.where}: the key 'between' is missing: {len(nodes)} nodes need it"
            )
        else:
            between = next(iter(node_links), LOOPBACK)
        if "inside" in fields:
            inside = self.link(fields, "inside", first_device)
        else:
            inside = next(iter(node_links), between)
        node_of = self.node_of(fields, [len(devices) for devices, _ in nodes])
        remaining_devices = [iter(devices) for devices, _ in nodes]
        return Cluster(
            name,
            tuple(next(remaining_devices[node]) for node in node_of),
            1,
            inside,
            between,
            node_of,
            insides,
            fields.read("source", parse_text, ""),
        )

    def nodes(self, fields: Fields) -> list[_Node]:
        """Return the nodes of a list."""
        rows = fields.values["nodes"]
        if not isinstance(rows, list) or not rows:
            raise ClusterError(f"{self.where}: nodes: {quote(rows)} is no list of nodes")
        nodes: list[_Node] = []
        for i, row in enumerate(rows):
            nodes += self.node_entry(row, f"{self.where}: nodes[{i}]", fields)
            self.check_count(sum(len(devices) for devices, _ in nodes))
        return nodes

    def node_entry(self, row: object, where: str, cluster: Fields) -> list[_Node]:
        """Return the nodes of one entry: `count` equal ones."""
        entry = _Reader(where, self.presets)
        fields = Fields.of(row, where, ("count", "devices", "inside"))
        devices, count = entry.devices(fields), fields.read("count", parse_count, 1)
        self.check_count(count * len(devices))
        link = None
        if "inside" in fields:
            link = entry.link(fields, "inside", devices[0])
        elif "inside" in cluster:
            # Read for every node: the generation of "NVLink" depends on the node's devices.
            link = self.link(cluster, "inside", devices[0])
        elif len(devices) > 1:
            raise ClusterError(
                f"{where}: the key 'inside' is missing: {len(devices)} devices on a node need it, "
                "in this entry or for all nodes"
            )
        return [(devices, link)] * count

    def node_of(self, fields: Fields, sizes: list[int]) -> tuple[int, ...]:
        """Return the node of every rank: the key `node_of`, or by default node after node."""
        in_order: list[int] = []
        for node, size in enumerate(sizes):
            in_order += [node] * size
        node_of = fields.values.get("node_of", in_order)
        has_integers = isinstance(node_of, list) and all(
            isinstance(node, int) and not isinstance(node, bool) for node in node_of
        )
        if not has_integers or sorted(node_of) != in_order:
            raise ClusterError(
                f"{self.where}: node_of: {quote(node_of)} is not the node of every rank; the nodes, "
                f"from 0, hold {sizes} devices"
            )
        return tuple(node_of)

    def check_count(self, count: int) -> None:
        """Refuse more than `MAX_DEVICES` devices."""
        if count > MAX_DEVICES:
            raise ClusterError(
                f"{self.where}: {count} devices are too many; a cluster has 1 to {MAX_DEVICES}"
            )

    def devices(self, fields: Fields) -> list[Device]:
        """Return the devices of a list."""
        rows = fields.read("devices", lambda value: value)
        if not isinstance(rows, list) or not rows:
            raise ClusterError(f"{self.where}: devices: {quote(rows)} is no list of devices")
        devices: list[Device] = []
        for i, row in enumerate(rows):
            devices += self.device_entry(row, f"{self.where}: devices[{i}]")
            self.check_count(len(devices))
        return devices

    def device_entry(self, row: object, where: str) -> list[Device]:
        """Return the devices of one entry.

        An entry is a preset's name, `{name, count}` of a preset, or a device of the user's own,
        possibly `like` a preset.
        """
        if isinstance(row, str):
            row = {"name": row}
        fields = Fields.of(row, where, ("name", "like", "count", *DEVICE_KEYS))
        count = fields.read("count", parse_count, 1)
        base = None
        if "like" in fields:
            base = self.preset(fields.read("like", parse_text), f"{where}: like")
            name = fields.read("name", parse_text, base.name)
        else:
            name = fields.read("name", parse_text)
            if not any(key in fields for key in DEVICE_KEYS):
                hint = "; a device of your own needs 'memory'"
                return [self.preset(name, where, hint)] * count
        return [read_device(fields, name, base)] * count

    def preset(self, name: str, where: str, hint: str = "") -> Device:
        """Return the preset device called `name`; `hint` is added to the error message."""
        try:
            return self.presets.device(name)
        except UnknownName as error:
            raise ClusterError(f"{where}: {error}{hint}") from error

    def link(self, fields: Fields, key: str, device: Device) -> Link:
        """Return the link of a key: a preset's name, or `{like, latency, bandwidth, …}`."""
        where, value = f"{fields.where}: {key}", fields.values[key]
        by_name = partial(self.preset_link, device=device)
        if isinstance(value, str):
            return fields.read(key, lambda name: by_name(str(name)))
        entry = Fields.of(value, where, ("like", *LINK_KEYS))
        base = None
        if "like" in entry:
            base = entry.read("like", lambda name: by_name(parse_text(name)))
        return read_link(entry, base)

    def preset_link(self, name: str, device: Device) -> Link:
        """Return the preset link called `name` between two devices of this kind."""
        try:
            return self.presets.links[self.presets.link_name(name, device.name)]
        except UnknownName as error:
            raise SettingError(str(error)) from error

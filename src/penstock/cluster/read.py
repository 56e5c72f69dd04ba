"""From a description, as a YAML file or presets.yaml has it, to a Cluster.

Besides the form that `cluster` shows, nodes that differ may be listed. A device or link may be
`like` a preset but for what it says; what is not known of a device is left out. `node_of: [0, 1, 0,
...]` gives the node of every rank, where ranks do not fill node after node.

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
memory_bandwidth, launch (what an op costs before it computes), on_chip, together (seconds while all
are busy over seconds alone), source. A link's: like, latency, bandwidth, shared, source.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from penstock.cluster.device import Device, Link
from penstock.cluster.entries import DEVICE_KEYS, LINK_KEYS, device_of, link_of
from penstock.cluster.fields import MOST, Fields, parse_count, parse_text
from penstock.cluster.local import LOOPBACK
from penstock.cluster.machines import Cluster
from penstock.cluster.presets import Presets
from penstock.errors import ClusterError, SettingError, UnknownName

_ALIKE = ("name", "devices_per_node", "devices", "inside", "between", "source")
_MIXED = ("name", "nodes", "node_of", "inside", "between", "source")


class _Strict(yaml.SafeLoader):
    """A loader that refuses a key that stands twice: YAML itself would take the last one and say
    nothing.
    """


def _mapping(loader: _Strict, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise yaml.constructor.ConstructorError(
            None, None, f"the key {twice[0]!r} stands there twice", node.start_mark
        )
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_cluster(path: Path) -> Cluster:
    """The cluster that a YAML file describes.

    Raises:
        ClusterError: the file cannot be read, or says something else; the message names file and
        key.
    """
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Strict)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"cannot read the cluster {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ClusterError(f"{path} is not YAML: {error}") from error
    return describe(found, str(path), Presets.load())


def describe(found: Any, where: str, presets: Presets) -> Cluster:
    """The cluster of a description; `where` begins every message.

    Raises:
        ClusterError: it says something that is not understood.
    """
    reader = _Reader(where, presets)
    if isinstance(found, dict) and "nodes" in found:
        return reader.mixed(Fields.of(found, where, _MIXED))
    if isinstance(found, dict) and "node_of" in found:
        raise ClusterError(
            f"{where}: node_of says on which of the 'nodes' each rank is, and there are none"
        )
    return reader.alike(Fields.of(found, where, _ALIKE))


@dataclass(frozen=True)
class _Reader:
    where: str
    presets: Presets

    def alike(self, fields: Fields) -> Cluster:
        """Nodes that are all of one size: devices by rank, and how many stand on a node."""
        name = fields.read("name", parse_text)
        per_node = fields.read("devices_per_node", parse_count)
        devices = self.devices(fields)
        links: dict[str, Link] = {}
        for key, needed in (("inside", per_node > 1), ("between", len(devices) > per_node)):
            if key in fields:
                links[key] = self.link(fields, key, devices[0])
            elif needed:
                raise ClusterError(
                    f"{self.where}: the key {key!r} is missing: {len(devices)} devices, {per_node} on a node, need it"
                )
        only = next(iter(links.values()), LOOPBACK)  # one device alone: nothing is ever sent
        return Cluster(
            name,
            tuple(devices),
            per_node,
            links.get("inside", only),
            links.get("between", only),
            source=fields.read("source", parse_text, ""),
        )

    def mixed(self, fields: Fields) -> Cluster:
        """Nodes of their own: each has its devices and its inside link."""
        name, rows = fields.read("name", parse_text), fields.values["nodes"]
        if not isinstance(rows, list) or not rows:
            raise ClusterError(f"{self.where}: nodes: {rows!r} is no list of nodes")
        nodes: list[tuple[list[Device], Link | None]] = []
        for i, row in enumerate(rows):
            nodes += self.nodes(row, f"{self.where}: nodes[{i}]", fields)
            self.bounded(sum(len(devices) for devices, _ in nodes))
        if "between" not in fields and len(nodes) > 1:
            raise ClusterError(
                f"{self.where}: the key 'between' is missing: {len(nodes)} nodes need it"
            )
        own = [link for _, link in nodes if link is not None]
        first = nodes[0][0][0]
        between = (
            self.link(fields, "between", first)
            if "between" in fields
            else next(iter(own), LOOPBACK)
        )
        inside = (
            self.link(fields, "inside", first) if "inside" in fields else next(iter(own), between)
        )
        node_of = self.node_of(fields, [len(devices) for devices, _ in nodes])
        left = [iter(devices) for devices, _ in nodes]
        insides = tuple(
            (number, link) for number, (_, link) in enumerate(nodes) if link is not None
        )
        return Cluster(
            name,
            tuple(next(left[node]) for node in node_of),
            1,
            inside,
            between,
            node_of,
            insides,
            fields.read("source", parse_text, ""),
        )

    def nodes(
        self, row: object, where: str, cluster: Fields
    ) -> list[tuple[list[Device], Link | None]]:
        """The nodes of one entry: `count` times the same."""
        here = _Reader(where, self.presets)
        fields = Fields.of(row, where, ("count", "devices", "inside"))
        devices, count = here.devices(fields), fields.read("count", parse_count, 1)
        self.bounded(count * len(devices))
        link = None
        if "inside" in fields:
            link = here.link(fields, "inside", devices[0])
        elif "inside" in cluster:
            link = self.link(
                cluster, "inside", devices[0]
            )  # NVLink is what this node's devices have
        elif len(devices) > 1:
            raise ClusterError(
                f"{where}: the key 'inside' is missing: {len(devices)} devices on a node need it, there or for all nodes"
            )
        return [(devices, link)] * count

    def node_of(self, fields: Fields, sizes: list[int]) -> tuple[int, ...]:
        """The node of every rank: node after node, or as the file says."""
        filled = [node for node, size in enumerate(sizes) for _ in range(size)]
        said = fields.values.get("node_of", filled)
        whole = isinstance(said, list) and all(
            isinstance(node, int) and not isinstance(node, bool) for node in said
        )
        if not whole or sorted(said) != filled:
            raise ClusterError(
                f"{self.where}: node_of: {said!r} is not the node of every rank; the nodes, from 0, hold {sizes} devices"
            )
        return tuple(said)

    def bounded(self, count: int) -> None:
        """A slip of the finger shall not fill the memory."""
        if count > MOST:
            raise ClusterError(
                f"{self.where}: {count} devices are too many; a cluster has 1 to {MOST}"
            )

    def devices(self, fields: Fields) -> list[Device]:
        """The devices that a list names."""
        rows = fields.read("devices", lambda value: value)
        if not isinstance(rows, list) or not rows:
            raise ClusterError(f"{self.where}: devices: {rows!r} is no list of devices")
        devices: list[Device] = []
        for i, row in enumerate(rows):
            devices += self.device(row, f"{self.where}: devices[{i}]")
            self.bounded(len(devices))
        return devices

    def device(self, row: object, where: str) -> list[Device]:
        """The devices of one entry: a preset's name, `{name, count}` of a preset, or one of the
        user's own, perhaps like a preset.
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
                return [self.preset(name, where, "; a device of your own needs 'memory'")] * count
        return [device_of(fields, name, base)] * count

    def preset(self, name: str, where: str, more: str = "") -> Device:
        """The device called `name`."""
        try:
            return self.presets.device(name)
        except UnknownName as error:
            raise ClusterError(f"{where}: {error}{more}") from error

    def link(self, fields: Fields, key: str, device: Device) -> Link:
        """The link of a key: a preset's name, or `{like, latency, bandwidth, shared, source}`."""
        where, value = f"{fields.where}: {key}", fields.values[key]
        by_name = partial(self.named, device=device)
        if isinstance(value, str):
            return fields.read(key, lambda name: by_name(str(name)))
        own = Fields.of(value, where, ("like", *LINK_KEYS))
        base = own.read("like", lambda name: by_name(parse_text(name))) if "like" in own else None
        return link_of(own, base)

    def named(self, name: str, device: Device) -> Link:
        """The link called `name` between two such devices."""
        try:
            return self.presets.links[self.presets.link_name(name, device.name)]
        except UnknownName as error:
            raise SettingError(str(error)) from error

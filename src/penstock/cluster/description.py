"""What a cluster file holds, as types that `penstock.files` validates; `read` shows the form.

Quantities are converted from their texts, so a description holds bytes, seconds and rates. A key
that is missing is None, or the default that is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, PlainValidator

from penstock.cluster.fields import (
    parse_bandwidth,
    parse_clock,
    parse_count,
    parse_flag,
    parse_latency,
    parse_memory,
    parse_number,
    parse_peaks,
    parse_text,
)
from penstock.errors import SettingError
from penstock.files.text import quote

Text: TypeAlias = Annotated[str, PlainValidator(parse_text)]
OptionalText: TypeAlias = Annotated[str | None, PlainValidator(parse_text)]
Count: TypeAlias = Annotated[int, PlainValidator(parse_count)]
OptionalCount: TypeAlias = Annotated[int | None, PlainValidator(parse_count)]
Memory: TypeAlias = Annotated[int | None, PlainValidator(parse_memory)]
Peaks: TypeAlias = Annotated[tuple[tuple[str, float], ...] | None, PlainValidator(parse_peaks)]
Bandwidth: TypeAlias = Annotated[float | None, PlainValidator(parse_bandwidth)]
Latency: TypeAlias = Annotated[float | None, PlainValidator(parse_latency)]
Clock: TypeAlias = Annotated[float | None, PlainValidator(parse_clock)]
Number: TypeAlias = Annotated[float | None, PlainValidator(parse_number)]
Flag: TypeAlias = Annotated[bool | None, PlainValidator(parse_flag)]


def _named_device(value: object) -> object:
    """Return the entry that a preset's name stands for; any other value as it is."""
    return {"name": value} if isinstance(value, str) else value


def _preset_link(value: object) -> object:
    """Return the entry that a preset's name stands for; any other value as it is.

    Raises:
        SettingError: there is no value. Leave the key out instead.
    """
    if value is None:
        raise SettingError("None is neither the name of a link nor a mapping")
    return {"like": value} if isinstance(value, str) else value


def _non_empty_list(value: object) -> object:
    """Return a list that is not empty.

    Raises:
        SettingError: the value is none.
    """
    if not isinstance(value, list) or not value:
        raise SettingError(f"{quote(value)} is not a list with at least one entry")
    return value


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """The figures of a device, of which all may be missing.

    Attributes:
        memory, on_chip: bytes.
        kind: "cpu", "gpu" or "fpga".
        flops: peak FLOP/s by dtype.
        memory_bandwidth: bytes per second.
        launch: seconds of overhead per op.
        dsp, clock: an FPGA's slices, and their cycles per second.
        together: seconds while all devices are busy, over seconds alone.
        source: where the figures are from.

    Raises:
        SettingError: both peaks and slices are set, or slices without a clock.
    """

    memory: Memory = None
    kind: OptionalText = None
    flops: Peaks = None
    memory_bandwidth: Bandwidth = None
    launch: Latency = None
    on_chip: Memory = None
    together: Number = None
    source: OptionalText = None
    dsp: OptionalCount = None
    clock: Clock = None

    def __post_init__(self) -> None:
        if self.dsp is None and self.clock is None:
            return
        if self.flops is not None:
            raise SettingError(
                "both 'flops' and 'dsp' are set: give the peaks, or the slices and their clock"
            )
        for key in ("dsp", "clock"):
            if getattr(self, key) is None:
                raise SettingError(f"the key {key!r} is missing: peaks need slices and their clock")


@dataclass(frozen=True, kw_only=True)
class DeviceEntry(DeviceFigures):
    """One entry of a list of devices: `count` equal ones.

    Attributes:
        name: a preset's, or the user's own.
        like: the preset from which missing figures are taken.
        count: number of devices.

    Raises:
        SettingError: neither a name nor a preset is set; see also `DeviceFigures`.
    """

    name: OptionalText = None
    like: OptionalText = None
    count: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is None and self.like is None:
            raise SettingError("the key 'name' is missing")


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """The figures of a link, of which all may be missing.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second.
        shared: whether all ranks that it joins share one medium.
        cpu_per_byte: CPU seconds that a message takes of each of its two ranks.
        cpu_per_message: seconds for which a message of no bytes occupies its sender.
        busy_per_byte: seconds that a rank loses to a message if it computes meanwhile.
        source: where the figures are from.
    """

    latency: Latency = None
    bandwidth: Bandwidth = None
    shared: Flag = None
    cpu_per_byte: Latency = None
    cpu_per_message: Latency = None
    busy_per_byte: Latency = None
    source: OptionalText = None


@dataclass(frozen=True, kw_only=True)
class LinkEntry(LinkFigures):
    """A link, possibly like a preset with some figures changed.

    Attributes:
        like: the preset from which missing figures are taken.

    Raises:
        SettingError: there is no preset, and latency or bandwidth is missing.
    """

    like: OptionalText = None

    def __post_init__(self) -> None:
        if self.like is not None:
            return
        for key in ("latency", "bandwidth"):
            if getattr(self, key) is None:
                raise SettingError(f"the key {key!r} is missing; or take a preset's, with 'like'")


Devices: TypeAlias = Annotated[
    list[Annotated[DeviceEntry, BeforeValidator(_named_device)]], BeforeValidator(_non_empty_list)
]
Link: TypeAlias = Annotated[LinkEntry | None, BeforeValidator(_preset_link)]


@dataclass(frozen=True, kw_only=True)
class NodeEntry:
    """One entry of a list of nodes: `count` equal ones.

    Attributes:
        devices: of each of these nodes.
        count: number of nodes.
        inside: link between these devices; None if it is that of the whole cluster.
    """

    devices: Devices
    count: Count = 1
    inside: Link = None


@dataclass(frozen=True, kw_only=True)
class UniformDescription:
    """A cluster whose nodes have equally many devices.

    Attributes:
        name: of the cluster.
        devices_per_node: number of devices of every node.
        devices: of all nodes, in order.
        inside: link inside a node.
        between: link between nodes.
        source: where the figures are from.
        hosts: host of every node; empty if plans run on any hosts.
    """

    name: Text
    devices_per_node: Count
    devices: Devices
    inside: Link = None
    between: Link = None
    source: Text = ""
    hosts: list[Text] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class MixedDescription:
    """A cluster whose nodes are listed.

    Attributes:
        name: of the cluster.
        nodes: the nodes, in order.
        node_of: the node of every rank; None if ranks fill node after node.
        inside: link inside the nodes that do not name one of their own.
        between: link between nodes.
        source: where the figures are from.
        hosts: host of every node; empty if plans run on any hosts.
    """

    name: Text
    nodes: Annotated[list[NodeEntry], BeforeValidator(_non_empty_list)]
    node_of: Annotated[list[int] | None, BeforeValidator(_non_empty_list)] = None
    inside: Link = None
    between: Link = None
    source: Text = ""
    hosts: list[Text] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class DevicePreset(DeviceFigures):
    """A device of presets.yaml.

    Attributes:
        nvlink: the link that "NVLink" means between two of these; empty if they have none.
    """

    nvlink: Text = ""


@dataclass(frozen=True, kw_only=True)
class LinkPreset(LinkFigures):
    """A link of presets.yaml.

    Attributes:
        reach: "network" if it joins nodes, otherwise it joins the devices of one.
    """

    reach: Text


@dataclass(frozen=True, kw_only=True)
class PresetTables:
    """The content of presets.yaml, by name. Clusters are validated when they are used."""

    devices: dict[str, DevicePreset]
    links: dict[str, LinkPreset]
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)

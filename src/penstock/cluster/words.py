"""Clusters in a word: `8xA100-NVLink`, `2x8xV100-NVLink-25GbE`, `4xV100+4xP100-PCIe3-25GbE`."""

from __future__ import annotations

import re

from penstock.cluster.device import Device, Link
from penstock.cluster.fields import MOST
from penstock.cluster.machines import Cluster
from penstock.cluster.presets import Presets
from penstock.errors import ClusterError, UnknownName


def from_words(spec: str, presets: Presets) -> Cluster | None:
    """`[nodes x] devices x device [+ …] - link [- link]`, or None if it is not of that form.

    Raises:
        ClusterError: it is, but the numbers and links do not go together.
    """

    def any_of(*names: str) -> str:
        return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))

    link = any_of("NVLink", *presets.links)
    group = rf"(?:\d+x)?\d+x(?:{any_of(*presets.devices)})"
    match = re.fullmatch(rf"({group}(?:\+{group})*)-({link})(?:-({link}))?", spec, re.IGNORECASE)
    if match is None:
        return None
    groups = [_Group.of(text, presets) for text in match[1].split("+")]
    if sum(one.ranks for one in groups) > MOST or min(one.ranks for one in groups) < 1:
        raise ClusterError(f"{spec!r}: a cluster has 1 to {MOST} devices")
    numbered = any(one.nodes is not None for one in groups)
    if match[3] is None and numbered:
        raise ClusterError(
            f"{spec!r}: nodes of several devices need both links, inside and between, as in "
            "'2x8xV100-NVLink-25GbE'; one link goes with one number, as in '8xV100-NVLink'"
        )
    if match[3] is not None and not numbered and len(groups) == 1:
        raise ClusterError(
            f"{spec!r}: two links go with two numbers, nodes and devices in each, as in "
            "'2x8xV100-NVLink-25GbE'; one link goes with one number, as in '8xV100-NVLink'"
        )
    try:
        return _joined(spec, groups, match[2], match[3], presets)
    except UnknownName as error:
        raise ClusterError(f"{spec!r}: {error}") from error


class _Group:
    """Nodes of one kind: `nodes` is None where the word has one number."""

    def __init__(self, nodes: int | None, count: int, device: Device) -> None:
        self.nodes, self.count, self.device = nodes, count, device

    @classmethod
    def of(cls, text: str, presets: Presets) -> _Group:
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text, re.IGNORECASE)
        assert match is not None
        return cls(
            None if match[1] is None else int(match[1]), int(match[2]), presets.device(match[3])
        )

    @property
    def ranks(self) -> int:
        return (1 if self.nodes is None else self.nodes) * self.count


def _joined(
    spec: str, groups: list[_Group], first: str, last: str | None, presets: Presets
) -> Cluster:
    """With one link, a network joins nodes of one device, a bus all devices in one node; with two,
    each group has nodes of its own.
    """

    def found(name: str, device: Device) -> Link:
        return presets.links[presets.link_name(name, device.name)]

    devices = tuple(device for one in groups for device in [one.device] * one.ranks)
    head = groups[0].device
    inside = found(first, head)
    if last is None:
        alone = presets.link_name(first, head.name) in presets.network
        return Cluster(spec, devices, 1 if alone else len(devices), inside, inside)
    sizes = [(one.count, one.device) for one in groups for _ in range(one.nodes or 1)]
    node_of = tuple(node for node, (count, _) in enumerate(sizes) for _ in range(count))
    insides = tuple((node, found(first, device)) for node, (_, device) in enumerate(sizes))
    return Cluster(spec, devices, 1, inside, found(last, head), node_of, insides)

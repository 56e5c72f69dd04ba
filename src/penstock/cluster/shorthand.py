"""Clusters in one word: `8xA100-NVLink`, `2x8xV100-NVLink-25GbE`, `4xV100+4xP100-PCIe3-25GbE`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.cluster.device import Device, Link
from penstock.cluster.fields import MAX_DEVICES
from penstock.cluster.machines import Cluster
from penstock.cluster.presets import Presets
from penstock.errors import ClusterError, UnknownName


def parse_shorthand(spec: str, presets: Presets) -> Cluster | None:
    """Parse `[nodes x] devices x device [+ …] - link [- link]`; None if it is not of that form.

    Raises:
        ClusterError: it is of that form, but the numbers and links do not go together.
    """
    link_names = _alternatives("NVLink", *presets.links)
    device_names = _alternatives(*presets.devices)
    group = rf"(?:\d+x)?\d+x(?:{device_names})"
    pattern = rf"({group}(?:\+{group})*)-({link_names})(?:-({link_names}))?"
    match = re.fullmatch(pattern, spec, re.IGNORECASE)
    if match is None:
        return None
    groups = [_Group.parse(text, presets) for text in match[1].split("+")]
    _check_groups(spec, groups, two_links=match[3] is not None)
    try:
        return _build_cluster(spec, groups, match[2], match[3], presets)
    except UnknownName as error:
        raise ClusterError(f"{spec!r}: {error}") from error


def _alternatives(*names: str) -> str:
    """Return a regular expression for one of some names; longer names are tried first."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


@dataclass(frozen=True)
class _Group:
    """Nodes with `count` devices of one kind each; `nodes` is None where the text has one
    number.
    """

    nodes: int | None
    count: int
    device: Device

    @classmethod
    def parse(cls, text: str, presets: Presets) -> _Group:
        """Parse a group such as `2x8xV100`."""
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text, re.IGNORECASE)
        assert match is not None
        nodes = None if match[1] is None else int(match[1])
        return cls(nodes, int(match[2]), presets.device(match[3]))

    @property
    def ranks(self) -> int:
        """Number of devices in the group."""
        return (1 if self.nodes is None else self.nodes) * self.count


def _check_groups(spec: str, groups: list[_Group], *, two_links: bool) -> None:
    """Refuse numbers of devices that are out of range or do not go with the number of links.

    Raises:
        ClusterError: they do not.
    """
    ranks = [group.ranks for group in groups]
    if sum(ranks) > MAX_DEVICES or min(ranks) < 1:
        raise ClusterError(f"{spec!r}: a cluster has 1 to {MAX_DEVICES} devices")
    counts_nodes = any(group.nodes is not None for group in groups)
    if counts_nodes and not two_links:
        raise ClusterError(
            f"{spec!r}: nodes of several devices need both links, inside and between, as in "
            "'2x8xV100-NVLink-25GbE'; one link goes with one number, as in '8xV100-NVLink'"
        )
    if two_links and not counts_nodes and len(groups) == 1:
        raise ClusterError(
            f"{spec!r}: two links go with two numbers, nodes and devices in each, as in "
            "'2x8xV100-NVLink-25GbE'; one link goes with one number, as in '8xV100-NVLink'"
        )


def _build_cluster(
    spec: str, groups: list[_Group], first_link: str, second_link: str | None, presets: Presets
) -> Cluster:
    """Build the cluster of some groups.

    With one link, a network joins nodes of one device each, a bus all devices in one node. With two
    links, each group has nodes of its own.
    """

    def link_between(name: str, device: Device) -> Link:
        """Return a link by name, as devices of this kind have it."""
        return presets.links[presets.link_name(name, device.name)]

    devices: list[Device] = []
    for group in groups:
        devices += [group.device] * group.ranks
    first_device = groups[0].device
    inside = link_between(first_link, first_device)
    if second_link is None:
        is_network = presets.link_name(first_link, first_device.name) in presets.network
        devices_per_node = 1 if is_network else len(devices)
        return Cluster(spec, tuple(devices), devices_per_node, inside, inside)
    node_of: list[int] = []
    insides: list[tuple[int, Link]] = []
    for group in groups:
        for _ in range(group.nodes or 1):
            node = len(insides)
            node_of += [node] * group.count
            insides.append((node, link_between(first_link, group.device)))
    between = link_between(second_link, first_device)
    # The 1 gives way to the most devices of a node, which the cluster counts in `node_of`.
    return Cluster(spec, tuple(devices), 1, inside, between, tuple(node_of), tuple(insides))

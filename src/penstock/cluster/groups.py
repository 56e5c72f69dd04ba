"""Groups of devices that share layers, as the devices of a smaller cluster."""

from __future__ import annotations

from dataclasses import replace

from penstock.cluster.machines import Cluster
from penstock.errors import ClusterError


def group_devices(cluster: Cluster, width: int) -> Cluster:
    """Return the cluster of groups: group g has the devices width x g to width x g + width - 1.

    A group stands for one of its devices, with that device's memory and its links to the devices at
    the same place in other groups.

    Args:
        cluster: of single devices.
        width: devices of a group.

    Raises:
        ClusterError: a group would have devices of several nodes, or of several kinds.
    """
    if width == 1:
        return cluster
    firsts = range(0, cluster.ranks, width)
    for first in firsts:
        last = first + width - 1
        if last >= cluster.ranks or cluster.node(first) != cluster.node(last):
            raise ClusterError(
                f"cluster {cluster.name} has no groups of {width} devices inside its nodes of "
                f"{cluster.devices_per_node}: take a width that divides a node"
            )
        if len({device.name for device in cluster.devices[first : last + 1]}) > 1:
            raise ClusterError(
                f"cluster {cluster.name} has devices of several kinds in the group of ranks "
                f"{first} to {last}; those that share a layer must be equal"
            )
    return replace(cluster.on(list(firsts)), name=cluster.name)

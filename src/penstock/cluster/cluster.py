"""`cluster`: the devices that a plan is for and the links between them, from a short text or a YAML
file.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.cluster.device import Device, Link
from penstock.cluster.local import LOOPBACK, local
from penstock.cluster.machines import Cluster
from penstock.cluster.presets import Presets
from penstock.cluster.read import build_cluster, read_cluster
from penstock.cluster.shorthand import parse_shorthand
from penstock.errors import ClusterError

__all__ = ["LOOPBACK", "Cluster", "Device", "Link", "cluster"]


def cluster(spec: str | Path | int) -> Cluster:
    """Return the cluster of a description.

    Args:
        spec: one of

            - `"local:2"` or `2`: this host's memory, split over 2 CPU ranks
            - `"8xA100-NVLink"`, `"4xV100-10GbE"`: devices and the link between them: a bus joins
              the devices of one node, a network joins nodes of one device each
            - `"2x8xV100-NVLink-25GbE"`: nodes, devices in each, the link inside a node, the link
              between nodes
            - `"4xV100+4xP100-PCIe3-25GbE"`: the same for mixed devices: one node of each kind, or
              several with their number in front
            - `"PipeDream-A"`: a paper's cluster (all names are in presets.yaml)
            - the path of a YAML file with these keys. Values may be presets or written out;
              `inside` may be left out if nodes have one device, `between` if there is one node:

              ```yaml
              name: lab
              devices_per_node: 2
              devices:
                - {name: V100, count: 2}
                - {name: old, memory: 12 GB, kind: gpu, count: 2}
              inside: PCIe3
              between: {latency: 30 us, bandwidth: 10 Gb/s, source: measured}
              ```

              Different nodes are listed one by one: see `penstock.cluster.read`.

    >>> print(cluster("2x8xV100-NVLink-25GbE"))
    2x8xV100-NVLink-25GbE: 16 ranks on 2 nodes (V100)
      inside a node   5.0 us + 25 GB/s (datasheet: NVLink 2, one of the links between two V100; latency assumed)
      between nodes   50.0 us + 3.125 GB/s (datasheet: line rate; latency assumed)

    Raises:
        ClusterError: the name is unknown, or the file cannot be read or is no valid description.
    """
    if isinstance(spec, Path):
        return read_cluster(spec)
    if isinstance(spec, int) and not isinstance(spec, bool):
        return local(spec, f"local:{spec}")
    if not isinstance(spec, str):
        raise ClusterError(
            f"a cluster is described by a text, a path or a number of ranks, not by {spec!r}"
        )
    if match := re.fullmatch(r"local(?::(\d+))?", spec):
        return local(int(match.groups(default="1")[0]), spec)
    presets = Presets.load()
    from_shorthand = parse_shorthand(spec, presets)
    if from_shorthand is not None:
        return from_shorthand
    from_paper = _preset_cluster(spec, presets)
    if from_paper is not None:
        return from_paper
    if spec.endswith((".yaml", ".yml")) or Path(spec).is_file():
        return read_cluster(Path(spec))
    raise ClusterError(
        f"no cluster called {spec!r}. Write 'local:2', '4xV100-10GbE' (devices, link), "
        "'2x8xV100-NVLink-25GbE' (nodes, devices in each, link inside, link between), the path of "
        f"a YAML file, or a paper's: {', '.join(presets.clusters)}. "
        f"Devices: {', '.join(presets.devices)}. Links: NVLink, {', '.join(presets.links)}"
    )


def _preset_cluster(name: str, presets: Presets) -> Cluster | None:
    """Return a cluster of presets.yaml by its name, regardless of case; None if there is none."""
    for preset_name, row in presets.clusters.items():
        if preset_name.lower() == name.lower():
            return build_cluster({"name": preset_name, **row}, f"presets: {preset_name}", presets)
    return None

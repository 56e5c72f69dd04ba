"""This host as a cluster: what is known of it without measuring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from penstock.cluster.device import Device, Link
from penstock.cluster.fields import MOST
from penstock.cluster.machines import Cluster
from penstock.errors import ClusterError

#: Between processes of one host: gloo over the loopback device, about what a laptop gives.
LOOPBACK: Final = Link(50e-6, 1e9, "assumed: measure by `penstock doctor`")


def local(ranks: int, name: str) -> Cluster:
    """This host's memory, split over so many CPU ranks.

    Raises:
        ClusterError: the number is out of its range, or the host does not tell its memory.
    """
    if not 1 <= ranks <= MOST:
        raise ClusterError(f"{name}: a cluster has 1 to {MOST} ranks")
    device = Device("cpu", host_memory_bytes() // ranks, "cpu")
    return Cluster(name, (device,) * ranks, ranks, LOOPBACK, LOOPBACK)


def host_memory_bytes() -> int:
    """What this host, or the container we are in, may use.

    Raises:
        ClusterError: it does not tell.
    """
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise ClusterError(
            "this host does not tell its memory; describe it in a YAML file"
        ) from error
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = ""
    return min(whole, int(limit)) if limit.isdecimal() else whole


def available_memory_bytes() -> int:
    """What of it is free now, or could be made free; all of it where the host does not tell.

    Raises:
        ClusterError: the host does not tell how much memory it has at all.
    """
    whole = host_memory_bytes()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return whole
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([whole, *free])

"""This host as a cluster: the figures that need no measurement."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from penstock.cluster.device import Device, Link
from penstock.cluster.fields import MAX_DEVICES
from penstock.cluster.machines import Cluster
from penstock.errors import ClusterError

#: Link between processes of one host: gloo over the loopback device, typical of a laptop.
LOOPBACK: Final = Link(50e-6, 1e9, "assumed: measure by `penstock doctor`")


def local(ranks: int, name: str) -> Cluster:
    """Return this host's memory, divided equally among CPU ranks. More ranks than cores slow each
    other down.

    Raises:
        ClusterError: the number of ranks is out of range, or the host does not report its memory.
    """
    if not 1 <= ranks <= MAX_DEVICES:
        raise ClusterError(f"{name}: a cluster has 1 to {MAX_DEVICES} ranks")
    together = max(1.0, ranks / available_cores())
    device = Device("cpu", host_memory_bytes() // ranks, "cpu", together=together)
    return Cluster(name, (device,) * ranks, ranks, LOOPBACK, LOOPBACK)


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def host_memory_bytes() -> int:
    """Return the memory that this host, or the container that this process runs in, may use.

    Raises:
        ClusterError: the host does not report it.
    """
    try:
        physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise ClusterError(
            "this host does not report its memory; describe it in a YAML file"
        ) from error
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = ""
    return min(physical_bytes, int(limit)) if limit.isdecimal() else physical_bytes


def available_memory_bytes() -> int:
    """Return the memory that is free now or can be freed; all memory if the host does not report
    it.

    Raises:
        ClusterError: the host does not report how much memory it has at all.
    """
    total = host_memory_bytes()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([total, *available])

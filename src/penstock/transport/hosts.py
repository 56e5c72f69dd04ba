"""Which ranks are on one host: hosts of one name are told apart, containers of one machine too."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.transport.devices.device_discovery import host_identity


@dataclass(frozen=True)
class Host:
    """The host of a process.

    Attributes:
        name: for people.
        key: equal for the processes of one host alone.
    """

    name: str
    key: str


def this_host() -> Host:
    """Return the host of this process.

    The key is made of the running kernel, since hosts may share a name, and of the network
    namespace, since containers of one kernel reach each other by network only.
    """
    name = socket.gethostname()
    try:
        network = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - no path, such as net:[4026531840]
    except OSError:
        network = ""
    return Host(name, f"{name} {host_identity()} {network}")


def host_names(hosts: Sequence[Host]) -> list[str]:
    """Return a different name for every host, by rank; hosts of one name are numbered from 2.

    >>> host_names([Host("a", "1"), Host("a", "2"), Host("a", "1")])
    ['a', 'a (2)', 'a']
    """
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for host in hosts:
        if host.key not in names:
            counts[host.name] = number = counts.get(host.name, 0) + 1
            names[host.key] = host.name if number == 1 else f"{host.name} ({number})"
    return [names[host.key] for host in hosts]

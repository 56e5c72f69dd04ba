"""Addresses on which this process listens, and connections that it closes."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

#: Environment variable with the address on which the sockets of Penstock listen.
BIND = "PENSTOCK_BIND"

_LOOPBACK = "127.0.0.1"

#: Request of ioctl(2) for an interface's address, from Linux's sockios.h.
_SIOCGIFADDR = 0x8915


def store_address() -> str:
    """Return the address of the store's host, as the launcher of the ranks has set it."""
    return os.environ.get("MASTER_ADDR", _LOOPBACK)


def bind_address() -> str:
    """Return the address on which sockets of this process listen.

    That is `PENSTOCK_BIND` if it is set, else the loopback address if all ranks are on this host,
    else the address from which this host reaches the store. It is never all interfaces.
    """
    if address := os.environ.get(BIND):
        return address
    size = os.environ.get("WORLD_SIZE")
    if size is not None and size == os.environ.get("LOCAL_WORLD_SIZE"):
        return _LOOPBACK  # all ranks are on this host
    port = int(os.environ.get("MASTER_PORT", "1"))
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            store_address(), port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it makes the kernel choose a route
            return str(probe.getsockname()[0])
    except OSError:
        return _LOOPBACK


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if this system does not tell."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    return next((name for name in ("lo", "lo0") if name in names), None)


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address; None if that cannot be found."""
    if sys.platform != "linux":
        return loopback_interface() if address == _LOOPBACK else None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def close_connections(port: int) -> int:
    """Shut down this process's TCP connections to a port, in all of its threads, and return how many.

    A thread that waits for an answer in native code, where nothing can interrupt it, then gets an
    error. Linux alone tells which descriptors there are.
    """
    if sys.platform != "linux":
        return 0
    count = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        with connection:
            try:
                if connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
            except (OSError, IndexError):
                continue
    return count

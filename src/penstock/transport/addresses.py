"""Addresses on which this process listens, and connections that it closes."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

from penstock.errors import SettingError

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


def use_address(address: str) -> None:
    """Have the sockets of this process, and of the ranks that it starts, listen on an address.

    Args:
        address: an IPv4 or IPv6 address of this host.

    Raises:
        SettingError: it is none, or gloo cannot be told to use it.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise SettingError(
            f"the sockets of a run listen on one address of this host, such as 10.0.0.5, and not on "
            f"{address!r}"
        ) from None
    if parsed.is_unspecified:
        raise SettingError(
            f"{address} stands for all interfaces: name the one address of this host at which the "
            "other ranks reach it"
        )
    family = socket.AF_INET6 if parsed.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise SettingError(
            f"this host ({socket.gethostname()}) cannot listen on {address}: {error.strerror}"
        ) from error
    # gloo takes the name of an interface, not an address, and listens on the interface's first one.
    if "GLOO_SOCKET_IFNAME" not in os.environ and interface_of(address) is None:
        raise SettingError(
            f"no interface of this host has {address} as its first address: set GLOO_SOCKET_IFNAME "
            "to the name of its interface, which gloo needs"
        )
    os.environ[BIND] = address


def launch_interface() -> str | None:
    """Return the interface for gloo in ranks of one host: that of `PENSTOCK_BIND`, else loopback.

    None if this system does not tell.

    Raises:
        SettingError: no interface has the address of `PENSTOCK_BIND`.
    """
    address = os.environ.get(BIND)
    if address and "GLOO_SOCKET_IFNAME" not in os.environ:
        use_address(address)
        return interface_of(address)
    return loopback_interface()


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if this system does not tell."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    return next((name for name in ("lo", "lo0") if name in names), None)


def interface_of(address: str) -> str | None:
    """Return the name of the interface whose first address this is; None if there is none."""
    if sys.platform != "linux":
        return loopback_interface() if address == _LOOPBACK else None
    if ":" in address:
        return _interface_of_ipv6(address)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # The kernel's request has 16 bytes for the name and its NUL.
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            # struct ifreq: 16 bytes of name, then a sockaddr_in with 2 bytes of family and 2 of
            # port.
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    """Return the name of the interface that has an IPv6 address; None if there is none."""
    digits = ipaddress.IPv6Address(address).exploded.replace(":", "")
    try:
        rows = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return None
    names = [row.split()[-1] for row in rows if row.startswith(digits)]
    return names[0] if names else None


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
            descriptor = os.dup(int(entry.name))
        except OSError:
            # Closed since the folder was listed.
            continue
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            # No socket, but a file or a pipe.
            os.close(descriptor)
            continue
        with connection:
            try:
                if connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
            except (OSError, IndexError):
                # Not connected, or of a family without ports.
                continue
    return count

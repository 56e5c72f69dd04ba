"""Addresses of sockets and the interfaces that have them, by tables that the test writes."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from penstock.errors import SettingError
from penstock.transport import addresses
from penstock.transport.addresses import (
    bind_address,
    close_connections,
    interface_of,
    launch_interface,
    loopback_interface,
    store_address,
    use_address,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="the tables are Linux's")


@pytest.fixture
def environment(monkeypatch):
    """No variable of a launcher or of the user is set."""
    for name in (
        "PENSTOCK_BIND",
        "GLOO_SOCKET_IFNAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
    ):
        # Set first: what the code under test sets is then removed at the end as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_store_is_on_this_host_unless_the_launcher_says_otherwise(environment):
    """Ranks of one host need no address."""
    assert store_address() == "127.0.0.1"
    environment.setenv("MASTER_ADDR", "10.0.0.9")
    assert store_address() == "10.0.0.9"


def test_the_address_is_that_from_which_the_store_is_reached(environment):
    """The kernel chooses it, by the store's address and port, and nothing is sent."""
    looks, opened = [], []

    class Probe:
        """A datagram socket."""

        def __init__(self, *form) -> None:
            opened.append(form)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            opened.append("closed")

        def connect(self, target):
            """Note the target."""
            opened.append(target)

        def getsockname(self):
            """The address of this host."""
            return ("10.0.0.4", 40000)

    def look_up(address, port, **options):
        looks.append((address, port, options))
        return [("family", "kind", "protocol", "", "first"), ("family", "kind", "", "", "second")]

    environment.setattr(addresses.socket, "getaddrinfo", look_up)
    environment.setattr(addresses.socket, "socket", Probe)
    environment.setenv("MASTER_ADDR", "10.0.0.9")
    environment.setenv("WORLD_SIZE", "4")
    assert bind_address() == "10.0.0.4"
    environment.setenv("MASTER_PORT", "6000")
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    assert bind_address() == "10.0.0.4"
    options = {"type": socket.SOCK_DGRAM}
    assert looks == [("10.0.0.9", 1, options), ("10.0.0.9", 6000, options)]
    assert opened == [("family", "kind", "protocol"), "first", "closed"] * 2
    environment.setenv("LOCAL_WORLD_SIZE", "4")
    assert bind_address() == "127.0.0.1"
    environment.delenv("WORLD_SIZE")
    environment.delenv("LOCAL_WORLD_SIZE")
    assert bind_address() == "10.0.0.4"
    assert len(looks) == 3

    def fail(*_, **__):
        raise socket.gaierror

    environment.setattr(addresses.socket, "getaddrinfo", fail)
    assert bind_address() == "127.0.0.1"


def test_the_loopback_interface_is_lo_or_lo0(environment):
    """Linux and the BSDs; None where the system does not tell."""
    for names, expected in (
        (["eth0", "lo"], "lo"),
        (["en0", "lo0"], "lo0"),
        (["lo0", "lo"], "lo"),
        (["loop"], None),
        ([], None),
    ):
        table = list(enumerate(names))
        environment.setattr(addresses.socket, "if_nameindex", lambda table=table: table)
        assert loopback_interface() == expected

    def fail():
        raise OSError

    environment.setattr(addresses.socket, "if_nameindex", fail)
    assert loopback_interface() is None


@linux
def test_an_interface_is_found_by_its_first_address(environment):
    """Those before it have others, or none; long names are cut as the kernel expects."""
    import fcntl

    table = {
        "down": None,
        "longer": "10.0.0.40",
        "eth0": "10.0.0.3",
        "a-name-of-sixteen": "10.0.0.4",
        "eth1": "10.0.0.4",
    }
    asked = []

    def answer(_, request, packed):
        name = packed.rstrip(b"\0").decode()
        asked.append((request, name, len(packed)))
        address = next(value for key, value in table.items() if key[:15] == name)
        if address is None:
            raise OSError(errno.EADDRNOTAVAIL, "none")
        return bytes(20) + socket.inet_aton(address) + bytes(232)

    names = list(enumerate(table))
    environment.setattr(addresses.socket, "if_nameindex", lambda: names)
    environment.setattr(fcntl, "ioctl", answer)
    assert interface_of("10.0.0.4") == "a-name-of-sixteen"
    assert asked[-1] == (0x8915, "a-name-of-sixte", 256)
    assert interface_of("10.0.0.3") == "eth0"
    assert interface_of("10.0.0.5") is None


@linux
def test_an_interface_is_found_by_any_of_its_ipv6_addresses(environment, tmp_path):
    """The kernel's table has whole addresses without colons."""
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe800000000000000000000000000002 02 40 20 80     eth0\n"
        "fe800000000000000000000000000002 03 40 20 80     eth1\n"
    )
    environment.setattr(addresses, "Path", lambda _: table)
    assert interface_of("::1") == "lo"
    assert interface_of("fe80::2") == "eth0"
    assert interface_of("fe80::20") is None
    environment.setattr(addresses, "Path", lambda _: tmp_path / "none")
    assert interface_of("::1") is None


def test_other_systems_have_the_loopback_interface_alone(environment):
    """Their tables are not read."""
    environment.setattr(addresses.sys, "platform", "darwin")
    environment.setattr(addresses, "loopback_interface", lambda: "lo0")
    assert interface_of("127.0.0.1") == "lo0"
    assert interface_of("10.0.0.1") is None
    assert close_connections(1) == 0


def test_an_address_of_another_host_is_refused_with_the_name_of_this_one(environment):
    """And with the reason of the system."""
    environment.setattr(addresses.socket, "gethostname", lambda: "h1")
    with pytest.raises(
        SettingError, match=r"^this host \(h1\) cannot listen on 203\.0\.113\.9: Cann"
    ):
        use_address("203.0.113.9")


@linux
def test_a_refused_address_leaves_the_one_before_in_use(environment):
    """What gloo cannot use is refused only where gloo is to find it by the address."""
    environment.setenv("PENSTOCK_BIND", "127.0.0.1")
    for address in ("0.0.0.0", "127.0.0.300", "127.0.0.9"):
        with pytest.raises(SettingError):
            use_address(address)
        assert bind_address() == "127.0.0.1"
    environment.setenv("GLOO_SOCKET_IFNAME", "lo")
    use_address("127.0.0.9")
    assert bind_address() == "127.0.0.9"
    for address in ("0.0.0.0", "::", "0:0::0"):
        with pytest.raises(SettingError, match=f"^{address} stands for all interfaces"):
            use_address(address)


def test_the_family_of_the_probe_is_that_of_the_address(environment):
    """An IPv6 address cannot be bound by an IPv4 socket, nor the other way round."""
    opened = []

    class Probe:
        """A datagram socket."""

        def __init__(self, *form) -> None:
            opened.append(form)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            opened.append("closed")

        def bind(self, address):
            """Note the address."""
            opened.append(address)

    environment.setattr(addresses.socket, "socket", Probe)
    environment.setattr(addresses, "interface_of", lambda _: "eth0")
    environment.setenv("PENSTOCK_BIND", "")
    for address, family in (("fe80::2", socket.AF_INET6), ("10.0.0.2", socket.AF_INET)):
        use_address(address)
        assert opened == [(family, socket.SOCK_DGRAM), (address, 0), "closed"]
        assert bind_address() == address
        opened.clear()


def test_a_launch_uses_the_users_interface_before_the_loopback_one(environment):
    """`GLOO_SOCKET_IFNAME` decides for gloo by itself."""
    environment.setattr(addresses, "loopback_interface", lambda: "lo")
    environment.setattr(addresses, "interface_of", lambda address: f"of {address}")
    used = []
    environment.setattr(addresses, "use_address", used.append)
    assert launch_interface() == "lo"
    environment.setenv("PENSTOCK_BIND", "10.0.0.2")
    assert launch_interface() == "of 10.0.0.2"
    environment.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert launch_interface() == "lo"
    assert used == ["10.0.0.2"]


@linux
def test_connections_to_a_port_are_shut_down_and_others_are_not():
    """Files, sockets that are not connected, and other connections stay as they are, and no descriptor
    stays open.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other_server,
        socket.socket() as idle,
        Path(os.devnull).open() as _,
    ):
        port = server.getsockname()[1]
        first, second = (socket.create_connection(server.getsockname()) for _ in range(2))
        other = socket.create_connection(other_server.getsockname())
        pair = socket.socketpair()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for connection in (first, second):
            connection.setblocking(False)
        assert close_connections(port) == 2
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert (first.recv(1), second.recv(1)) == (b"", b"")
        assert other.send(b"x") == pair[0].send(b"x") == 1
        assert close_connections(0) == 0
        assert idle.fileno() >= 0
        for connection in (first, second, other, *pair):
            connection.close()

"""What docs/security.md says about sockets, of a real run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runtime.jobs import tiny, tiny_batch

from penstock.errors import SettingError
from penstock.ranks.processes.launch import launch
from penstock.transport.addresses import (
    bind_address,
    interface_of,
    launch_interface,
    loopback_interface,
    use_address,
)

#: States in /proc/net/tcp and /proc/net/udp of sockets that take what anybody sends.
LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}

#: Loopback addresses as the kernel writes them: 127.0.0.1 and ::1.
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def listening_addresses() -> list[str]:
    """Return the addresses on which this process listens, in the kernel's notation."""
    descriptors = [
        str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    ]
    inodes = {name[8:-1] for name in descriptors if name.startswith("socket:[")}
    addresses = []
    for table, state in LISTENING.items():
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == state and fields[9] in inodes:
                addresses.append(fields[1].partition(":")[0])
    return addresses


def run_and_list() -> list[str]:
    """Train a step, and list the addresses of this rank."""
    pipe = tiny()
    pipe.train_batch(*tiny_batch(0))
    return listening_addresses()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net lists the sockets")
def test_ranks_of_one_host_listen_on_the_loopback_address_alone():
    """The launcher itself listens on no address at all, also while its ranks run."""
    before = listening_addresses()
    during: list[str] = []
    ranks = launch(run_and_list, 2, on_start=lambda _: during.extend(listening_addresses()))
    assert during == before
    assert set(ranks[0] + ranks[1]) <= LOOPBACK


def test_sockets_listen_where_the_ranks_reach_each_other(monkeypatch):
    """Loopback if all ranks are on this host; never all interfaces; `PENSTOCK_BIND` decides."""
    monkeypatch.delenv("PENSTOCK_BIND", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert bind_address() == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert bind_address() in ("127.0.0.1", "::1")
    monkeypatch.setenv("PENSTOCK_BIND", "192.0.2.7")
    assert bind_address() == "192.0.2.7"


def test_the_loopback_address_is_that_of_the_loopback_interface():
    """gloo takes the name of an interface, and no address."""
    assert interface_of("127.0.0.1") == loopback_interface()
    assert interface_of("192.0.2.7") is None


def test_an_address_of_the_user_decides_for_all_sockets(monkeypatch):
    """`--bind`; ranks of one host otherwise use the loopback address."""
    monkeypatch.setenv("PENSTOCK_BIND", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert launch_interface() == loopback_interface()
    use_address("127.0.0.1")
    assert bind_address() == "127.0.0.1"
    assert launch_interface() == interface_of("127.0.0.1")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("localhost", "one address of this host, such as 10.0.0.5, and not on 'localhost'"),
        ("0.0.0.0", "0.0.0.0 stands for all interfaces"),
        ("::", ":: stands for all interfaces"),
        ("203.0.113.9", "cannot listen on 203.0.113.9: "),
    ],
)
def test_an_address_that_no_socket_can_have_is_refused(monkeypatch, address, message):
    """Before any rank starts; a launch refuses it as well."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("PENSTOCK_BIND", address)
    with pytest.raises(SettingError, match=message):
        use_address(address)
    with pytest.raises(SettingError, match=message):
        launch(run_and_list, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up in Linux's tables")
def test_gloo_cannot_listen_on_an_address_that_is_not_the_first_of_an_interface(monkeypatch):
    """It takes the name of an interface; all of 127.0.0.0/8 is that of the loopback interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(SettingError, match="as its first address: set GLOO_SOCKET_IFNAME"):
        use_address("127.0.0.9")

"""What docs/security.md says about sockets, of a real run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runtime.jobs import tiny, tiny_batch

from penstock.ranks.processes.launch import launch
from penstock.transport.addresses import bind_address, interface_of, loopback_interface

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

"""Hosts are told apart by more than their names."""

from __future__ import annotations

from penstock.transport import hosts as module
from penstock.transport.hosts import Host, host_names, this_host


def test_processes_of_this_host_have_one_key():
    """The key does not depend on the process."""
    import penstock as ps

    assert set(ps.launch(this_host, 2, threads=1)) == {this_host()}


def test_two_hosts_of_one_name_are_two_hosts():
    """Images are cloned with their names, and containers often have none of their own."""
    hosts = [Host("node", "1"), Host("node", "2"), Host("other", "3"), Host("node", "1")]
    assert host_names(hosts) == ["node", "node (2)", "other", "node"]


def test_names_are_those_of_the_first_appearance_whatever_the_names_of_others():
    """Three hosts of one name, in any order of the ranks."""
    hosts = [Host("a", key) for key in "zxyxz"]
    assert host_names(hosts) == ["a", "a (2)", "a (3)", "a (2)", "a"]
    assert host_names([]) == []
    assert host_names([Host("a", "1"), Host("b", "2"), Host("a", "1")]) == ["a", "b", "a"]


def test_a_host_is_its_name_its_kernel_and_its_network(monkeypatch):
    """Each of the three tells hosts apart; without /proc the others do."""
    parts = {"name": "h", "kernel": "k", "network": "net:[1]"}

    def read(path):
        assert path == "/proc/self/ns/net"
        if not parts["network"]:
            raise OSError
        return parts["network"]

    monkeypatch.setattr(module.socket, "gethostname", lambda: parts["name"])
    monkeypatch.setattr(module, "host_identity", lambda: parts["kernel"])
    monkeypatch.setattr(module.os, "readlink", read)
    keys = [this_host().key]
    assert this_host() == Host("h", keys[0])
    for part, value in list(parts.items()):
        parts[part] = "" if part == "network" else "other"
        assert this_host().name == parts["name"]
        keys.append(this_host().key)
        parts[part] = value
    assert len(set(keys)) == 4

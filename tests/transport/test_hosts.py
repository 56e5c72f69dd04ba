"""Hosts are told apart by more than their names."""

from __future__ import annotations

from penstock.transport.hosts import Host, host_names, this_host


def test_processes_of_this_host_have_one_key():
    """The key does not depend on the process."""
    import penstock as ps

    assert set(ps.launch(this_host, 2, threads=1)) == {this_host()}


def test_two_hosts_of_one_name_are_two_hosts():
    """Images are cloned with their names, and containers often have none of their own."""
    hosts = [Host("node", "1"), Host("node", "2"), Host("other", "3"), Host("node", "1")]
    assert host_names(hosts) == ["node", "node (2)", "other", "node"]

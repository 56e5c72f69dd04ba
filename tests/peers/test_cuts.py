"""Measurements that cuts and plans of a study need, by real processes."""

from __future__ import annotations

import pytest

from penstock.peers.cuts import Cuts
from penstock.peers.host import Host


@pytest.fixture
def host(tmp_path):
    """A host in which Penstock is loaded."""
    host = Host((), None, tmp_path / "log.txt")
    yield host
    host.end()


def test_the_link_is_measured_by_ranks_that_meet_at_the_store_of_the_study(tmp_path, host):
    """The store listens already: rank 0 is a client of it, as under torchrun."""
    cuts = Cuts(tmp_path / "profiles", host)
    link = cuts.link()
    assert link.latency_s > 0
    assert link.bandwidth_bytes_per_s > 0
    assert cuts.link() == link, "measured once"

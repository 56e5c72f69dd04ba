"""Clusters of mixed devices in a word; those of one kind are in test_cluster.py."""

import pytest

from penstock.cluster.cluster import cluster
from penstock.errors import ClusterError


def test_kinds_joined_by_a_plus_are_nodes_of_their_own():
    """A new machine beside the old one."""
    topology = cluster("4xV100+4xP100-PCIe3-25GbE")
    assert (topology.ranks, topology.nodes, topology.kinds) == (8, 2, ("V100", "P100"))
    assert topology.link(3, 4).bandwidth_bytes_per_s == 3.125e9


def test_nvlink_is_each_kind_s_own():
    """One word, two generations."""
    topology = cluster("2x4xV100+1x2xA100-NVLink-IB")
    assert (topology.ranks, topology.nodes) == (10, 3)
    assert [topology.link(rank, rank + 1).bandwidth_bytes_per_s for rank in (0, 4, 8)] == [
        25e9,
        25e9,
        300e9,
    ]


def test_with_one_link_it_says_where_the_devices_stand():
    """As for one kind: a bus joins the devices of one node, a network nodes of one device."""
    assert cluster("2xV100+2xP100-PCIe3").nodes == 1
    assert cluster("2xVCU129+2xVCU118-QSFP28").nodes == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4xV100+4xP100-NVLink-25GbE", "no link for P100 called 'NVLink'"),
        ("2x4xV100+4xP100-PCIe3", "nodes of several devices need both links"),
        ("4xV100+0xP100-PCIe3-25GbE", "has 1 to 65536 devices"),
        ("4xV100+4xP1000-PCIe3-25GbE", r"no cluster called '4xV100\+4xP1000-PCIe3-25GbE'"),
    ],
)
def test_words_that_do_not_go_together_are_refused(spec, message):
    """What would have to be guessed is asked for."""
    with pytest.raises(ClusterError, match=message):
        cluster(spec)

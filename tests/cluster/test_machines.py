"""Ranks, nodes and links of clusters that are not all alike."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import ClusterError, FileError

SLOW, FAST, NET = Link(1e-5, 1e9), Link(1e-6, 1e11), Link(1e-4, 1e8)
A, B = Device("a", 10**9), Device("b", 2 * 10**9)


@st.composite
def clusters(draw):
    """Any nodes of any sizes, ranks anywhere on them."""
    devices = draw(st.lists(st.sampled_from([A, B, Device("c", 1, "cpu")]), min_size=1, max_size=9))
    nodes_so_far: list[int] = []
    for _ in devices:
        nodes_so_far.append(draw(st.integers(0, max(nodes_so_far, default=-1) + 1)))
    insides = tuple(
        (node, draw(st.sampled_from([SLOW, FAST])))
        for node in sorted(set(nodes_so_far))
        if draw(st.booleans())
    )
    return Cluster(
        "any", tuple(devices), draw(st.integers(1, 4)), SLOW, NET, tuple(nodes_so_far), insides
    )


def test_a_node_may_have_its_own_inside_link():
    """An old machine among new ones has the old bus."""
    topology = Cluster("x", (A,) * 4 + (B,) * 2, 4, FAST, NET, insides=((1, SLOW),))
    assert (topology.link(0, 3), topology.link(4, 5), topology.link(3, 4)) == (FAST, SLOW, NET)
    assert [topology.node(rank) for rank in range(6)] == [0, 0, 0, 0, 1, 1]
    assert topology.ranks_of_node(1) == (4, 5)
    assert topology.ranks_of_node(7) == ()


def test_ranks_may_stand_anywhere():
    """torchrun numbers ranks node after node, other launchers deal them out."""
    topology = Cluster("x", (A, B, A, B), 2, FAST, NET, node_of=(0, 1, 0, 1))
    assert (topology.link(0, 2), topology.link(1, 3), topology.link(0, 1)) == (FAST, FAST, NET)
    assert (topology.nodes, topology.devices_per_node, topology.kinds) == (2, 2, ("a", "b"))


def test_ranks_are_grouped_by_node_however_they_are_spread():
    """Ranks need not fill node after node, and some of them suffice."""
    link = Link(0.0, 1e9)
    cluster = Cluster("c", (Device("d", 1),) * 4, 2, link, link, node_of=(0, 1, 0, 1))
    assert cluster.by_node(range(4)) == [[0, 2], [1, 3]]
    assert cluster.by_node((3, 2)) == [[3], [2]]


def test_one_cluster_has_one_form():
    """Equal clusters must be equal, or nothing that is remembered for one is found again."""
    filled = Cluster("x", (A,) * 4, 2, FAST, NET)
    assert Cluster("x", (A,) * 4, 2, FAST, NET, node_of=(0, 0, 1, 1)) == filled
    assert Cluster("x", (A,) * 4, 7, FAST, NET, node_of=(0, 0, 1, 1)) == filled
    assert Cluster("x", (A,) * 4, 2, FAST, NET, insides=((1, FAST),)) == filled
    assert hash(Cluster("x", (A,) * 4, 2, FAST, NET, insides=((1, FAST),))) == hash(filled)


def test_some_ranks_of_a_cluster_are_a_cluster():
    """Planners place pipelines on parts of a cluster, in any order."""
    topology = cluster("2x8xV100-NVLink-25GbE")
    part = topology.on([9, 0, 8, 1])
    assert [part.node(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert part.link(0, 2) == topology.inside
    assert part.link(0, 1) == topology.between
    assert topology.on(range(16)) is topology
    assert topology.on([0, 8]).nodes == 2


@given(clusters(), st.data())
@settings(deadline=None, max_examples=100)
def test_a_part_keeps_devices_nodes_and_links(topology, data):
    """The one law of `on`, whatever the cluster and the ranks."""
    ranks = data.draw(st.lists(st.integers(0, topology.ranks - 1), min_size=1, unique=True))
    part = topology.on(ranks)
    assert part.devices == tuple(topology.devices[rank] for rank in ranks)
    for i, a in enumerate(ranks):
        for j, b in enumerate(ranks):
            assert (part.node(i) == part.node(j)) == (topology.node(a) == topology.node(b))
            assert part.link(i, j) == topology.link(a, b)


@given(clusters())
@settings(deadline=None, max_examples=100)
def test_every_rank_is_on_one_node_and_prints(topology):
    """Nodes are a division of the ranks."""
    assert sorted(
        rank for node in range(topology.nodes) for rank in topology.ranks_of_node(node)
    ) == list(range(topology.ranks))
    assert (
        max(len(topology.ranks_of_node(node)) for node in range(topology.nodes))
        <= topology.devices_per_node
    )
    assert str(topology).startswith(f"any: {topology.ranks} ranks on {topology.nodes} node")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Cluster("x", (A, A), 1, FAST, NET, node_of=(0,)),
            "cluster x has 2 ranks, and node_of has 1: one for each",
        ),
        (
            lambda: Cluster("x", (A, A), 1, FAST, NET, node_of=(0, 2)),
            r"ranks on nodes \[0, 2\]; nodes are numbered from 0, none left out",
        ),
        (
            lambda: Cluster("x", (A, A), 1, FAST, NET, insides=((2, SLOW),)),
            "an inside link for node 2, and nodes 0 to 1",
        ),
        (
            lambda: Cluster("x", (A, A), 1, FAST, NET, insides=((0, SLOW), (0, FAST))),
            "two inside links for one node",
        ),
        (
            lambda: Cluster("x", (A, A), 1, FAST, NET).on([0, 0]),
            r"has every rank once, and \[0, 0\] lists one twice",
        ),
        (lambda: Cluster("x", (A, A), 1, FAST, NET).on([0, 2]), "has ranks 0 to 1, and no rank 2"),
        (lambda: Cluster("x", (A, A), 1, FAST, NET).on([]), "cluster x has no devices"),
        (lambda: Cluster("x", (A, A), 1, FAST, NET).node(-1), "no rank -1"),
    ],
)
def test_nodes_that_do_not_go_with_the_ranks_are_refused(make, message):
    """A wrong node gives a wrong link, and a wrong plan far from here."""
    with pytest.raises(ClusterError, match=message):
        make()


def test_a_measured_inside_link_holds_in_every_node():
    """`with_links` is for what was measured here, which knows of no nodes that differ."""
    topology = Cluster("x", (A,) * 4, 2, FAST, NET, insides=((1, SLOW),))
    other = Link(1.0, 1.0)
    assert topology.with_links(inside=other).link(2, 3) == other
    assert topology.with_links(between=other).link(2, 3) == SLOW


def test_mixed_nodes_print_what_stands_on_each():
    """A plan for mixed devices is read beside this."""
    topology = Cluster("x", (A,) * 4 + (B,) * 2 + (A, B), 2, FAST, NET, insides=((2, SLOW),))
    assert str(topology).splitlines() == [
        "x: 8 ranks on 4 nodes (a, b)",
        "  node 0-1        2 x a, 1.0 us + 100 GB/s (assumed)",
        "  node 2          2 x b, 10.0 us + 1 GB/s (assumed)",
        "  node 3          1 x a + 1 x b, 1.0 us + 100 GB/s (assumed)",
        "  between nodes   100.0 us + 0.1 GB/s (assumed)",
    ]


def test_many_nodes_that_differ_print_in_a_dozen_lines():
    """A thousand devices must not scroll the plan away."""
    topology = Cluster("x", tuple(Device(f"d{i}", 1) for i in range(99)), 1, FAST, NET)
    lines = str(topology).splitlines()
    assert len(lines) == 14
    assert "88 more" in lines[-3]
    assert lines[-2] == "  node 98         1 x d98"


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    """After minutes of measuring, a traceback would be the wrong end."""
    with pytest.raises(
        FileError, match=r"cannot write .*the folder .* does not exist; create it first"
    ):
        cluster("local:2").save(tmp_path / "none" / "x.yaml")

"""Clusters written to YAML and read back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.cluster.device import DTYPES
from penstock.cluster.presets import Presets
from penstock.errors import ClusterError

positive = st.floats(1e-3, 1e18)
names = st.text("aZ0: '\"#-{}[]é,&*!|>%@`\\\n", max_size=8).map(
    lambda text: f"x{text}"
) | st.sampled_from(["no", "1e3", "null", "1:30"])
texts = names | st.just("")
devices = st.builds(
    Device,
    names,
    st.integers(1, 10**15),
    st.sampled_from(["cpu", "gpu", "fpga"]),
    st.dictionaries(st.sampled_from(DTYPES), positive, max_size=3).map(
        lambda numbers: tuple(numbers.items())
    ),
    st.none() | positive,
    st.floats(0, 1),
    st.integers(0, 10**9),
    st.floats(1, 50),
    texts,
)
links = st.builds(
    Link,
    st.floats(0, 10),
    positive | st.just(float("inf")),
    names,
    st.booleans(),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1),
)


@st.composite
def clusters(draw):
    """Devices, nodes and links of every kind."""
    topology = draw(st.lists(devices, min_size=1, max_size=5))
    chosen = draw(st.lists(st.sampled_from(topology), min_size=1, max_size=8))
    nodes_so_far: list[int] = []
    for _ in chosen:
        nodes_so_far.append(draw(st.integers(0, max(nodes_so_far, default=-1) + 1)))
    insides = tuple(
        (node, draw(links)) for node in sorted(set(nodes_so_far)) if draw(st.booleans())
    )
    node_of = tuple(nodes_so_far) if draw(st.booleans()) else ()
    return Cluster(
        draw(names),
        tuple(chosen),
        draw(st.integers(1, 9)),
        draw(links),
        draw(links),
        node_of,
        insides if node_of else (),
        draw(texts),
    )


@given(clusters())
@settings(deadline=None, max_examples=80)
def test_what_is_written_reads_back_equal(tmp_path_factory, topology):
    """A cluster that changes on its way through a file changes every plan that is made for it."""
    path = tmp_path_factory.mktemp("clusters") / "any.yaml"
    topology.save(path)
    assert cluster(path) == topology


@pytest.mark.parametrize(
    "name",
    [*Presets.load().clusters, "local:3", "4xV100+2xP100-PCIe3-25GbE", "2x8xH100-NVLink-IB400"],
)
def test_presets_and_words_read_back_equal(name, tmp_path):
    """Who starts from a preset and changes a line must start from the same cluster."""
    cluster(name).save(tmp_path / "x.yaml")
    assert cluster(tmp_path / "x.yaml") == cluster(name)


def test_what_is_written_is_what_people_write():
    """The file is there to be edited."""
    link = Link(5 * 1e-6, 25e9, "measured", shared=True)
    topology = Cluster(
        "lab",
        (Device("V100", 16 * 10**9, flops=(("float32", 15.7e12),), launch_s=10 * 1e-6),) * 2,
        2,
        link,
        link,
    )
    assert topology.to_yaml() == (
        "name: lab\n"
        "devices_per_node: 2\n"
        "devices:\n"
        "- name: V100\n"
        "  kind: gpu\n"
        "  memory: 16 GB\n"
        "  flops:\n"
        "    float32: 15.7 TFLOP/s\n"
        "  launch: 10 us\n"
        "  count: 2\n"
        "inside:\n"
        "  latency: 5 us\n"
        "  bandwidth: 25 GB/s\n"
        "  shared: true\n"
        "  source: measured\n"
        "between:\n"
        "  latency: 5 us\n"
        "  bandwidth: 25 GB/s\n"
        "  shared: true\n"
        "  source: measured\n"
    )


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_names_of_hosts_read_back_equal(nodes, tmp_path):
    """In both forms of a description, and for a part of the cluster."""
    whole = replace(cluster(f"{nodes}x2xV100-NVLink-25GbE"), hosts=tuple("abc"[:nodes]))
    for described in (whole, replace(whole, node_of=(0, *range(nodes), *range(1, nodes)))):
        path = tmp_path / "cluster.yaml"
        described.save(path)
        assert cluster(path) == described
    assert whole.on((2, 3)).hosts == ("b",)


def test_two_hosts_of_one_name_are_refused():
    """Plans name the hosts that they are for."""
    with pytest.raises(ClusterError, match=r"has 2 nodes, and its hosts are \['a', 'a'\]"):
        replace(cluster("2xV100-25GbE"), hosts=("a", "a"))

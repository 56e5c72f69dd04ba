"""Clusters from words and files."""

import textwrap

import pytest

from penstock.cluster import local
from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import ClusterError


def test_local_splits_this_host_s_memory():
    """Ranks on one host share its memory: a plan that counts it twice would swap."""
    one, four = cluster("local"), cluster("local:4")
    assert four.ranks == 4
    assert four.nodes == 1
    assert four.devices[0].kind == "cpu"
    assert four.devices[0].memory_bytes == one.devices[0].memory_bytes // 4
    assert four.inside.source == "assumed: measure by `penstock doctor`"
    assert (four.inside.latency_s, four.inside.bandwidth_bytes_per_s) == (50e-6, 1e9)
    assert cluster(4) == four


def test_a_network_joins_nodes_of_one_device():
    """4xV100-10GbE is four machines: every boundary pays the network."""
    topology = cluster("4xV100-10GbE")
    assert (topology.ranks, topology.nodes, topology.devices_per_node) == (4, 4, 1)
    assert (
        topology.devices[0].name,
        topology.devices[0].memory_bytes,
        topology.devices[0].kind,
    ) == (
        "V100",
        16 * 10**9,
        "gpu",
    )
    assert topology.link(0, 1).bandwidth_bytes_per_s == 1.25e9


def test_a_bus_joins_the_devices_of_one_node():
    """8xA100-NVLink is one machine."""
    topology = cluster("8xA100-NVLink")
    assert (topology.ranks, topology.nodes) == (8, 1)
    assert topology.link(0, 7) == topology.inside


def test_nodes_of_several_devices_have_two_kinds_of_links():
    """Ranks fill node after node: 7 and 8 are neighbours in the pipeline and on different machines."""
    topology = cluster("2x8xV100-NVLink-25GbE")
    assert (topology.ranks, topology.nodes, topology.devices_per_node) == (16, 2, 8)
    assert topology.link(6, 7) == topology.link(8, 15) == topology.inside
    assert topology.link(7, 8) == topology.link(8, 7) == topology.link(0, 15) == topology.between
    assert topology.between.bandwidth_bytes_per_s == 3.125e9
    assert topology.transfer_seconds(3.125e9, 7, 8) == pytest.approx(1 + 50e-6)
    assert topology.transfer_seconds(1e9, 3, 3) == 0


def test_device_names_with_a_dash_are_read_whole():
    """V100-32 must not be read as V100 with a link called 32."""
    assert cluster("2xV100-32-10GbE").devices[0].memory_bytes == 32 * 10**9
    assert cluster("2x4xa100-80-nvlink-ib200").between.bandwidth_bytes_per_s == 25e9


def test_links_can_be_exchanged_for_measured_ones():
    """That is what `penstock doctor` does with a preset."""
    measured = Link(1e-5, 2e9, "measured")
    topology = cluster("2x8xV100-NVLink-25GbE")
    assert topology.with_links(between=measured) == Cluster(
        topology.name, topology.devices, 8, topology.inside, measured
    )
    assert topology.with_links(inside=measured).inside == measured


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "4xV1000-10GbE",
            "no cluster called '4xV1000-10GbE'.*Devices: V100, .*Links: NVLink, PCIe3",
        ),
        ("V100", "no cluster called 'V100'"),
        ("8xP100-NVLink", "no link for P100 called 'NVLink'"),
        ("2x8xV100-NVLink", "nodes of several devices need both links"),
        ("8xV100-NVLink-10GbE", "one link goes with one number"),
        ("0xV100-10GbE", "has 1 to 65536 devices"),
        ("99999x99999xV100-NVLink-IB", "has 1 to 65536 devices"),
        ("local:0", "local:0: a cluster has 1 to 65536 ranks"),
        (0, "local:0: a cluster has 1 to 65536 ranks"),
        (True, "described by a text, a path or a number of ranks, not by True"),
        (None, "not by None"),
        ("nowhere.yaml", "cannot read the cluster nowhere.yaml"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(spec, message):
    """The list of names is the documentation that is read."""
    with pytest.raises(ClusterError, match=message):
        cluster(spec)


def test_a_rank_outside_the_cluster_is_refused():
    """A negative index would quietly give another node's link."""
    with pytest.raises(ClusterError, match="has ranks 0 to 3, and no rank 4"):
        cluster("4xV100-10GbE").link(3, 4)
    with pytest.raises(ClusterError, match="no rank -1"):
        cluster("4xV100-10GbE").transfer_seconds(1, -1, 0)


def test_a_cluster_has_devices_and_room_for_them():
    """Both are divisors further on."""
    link = Link(0, 1)
    with pytest.raises(ClusterError, match="cluster x has no devices"):
        Cluster("x", (), 1, link, link)
    with pytest.raises(ClusterError, match="cluster x has 0 devices per node"):
        Cluster("x", (Device("d", 1),), 0, link, link)


def example() -> str:
    """The YAML of `cluster`'s own docstring."""
    inside = cluster.__doc__.partition("```yaml\n")[2].partition("```")[0]
    return textwrap.dedent(inside)


def test_the_example_of_the_docstring_works(tmp_path):
    """It is what people copy."""
    path = tmp_path / "lab.yaml"
    path.write_text(example())
    topology = cluster(path)
    assert topology == cluster(str(path))
    assert [device.name for device in topology.devices] == ["V100", "V100", "old", "old"]
    assert topology.devices[2] == Device("old", 12 * 10**9, "gpu")
    assert (topology.name, topology.devices_per_node, topology.nodes) == ("lab", 2, 2)
    assert topology.inside.bandwidth_bytes_per_s == 15.75e9
    assert topology.between.latency_s == pytest.approx(30e-6)
    assert (topology.between.bandwidth_bytes_per_s, topology.between.source) == (1.25e9, "measured")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: lab", "name: lab\ncolour: red", "colour: unknown key"),
        ("name: lab", "", "at name: the key is missing"),
        ("name: lab", "name: 3", "name: 3 is not a text"),
        (
            "devices_per_node: 2",
            "devices_per_node: two",
            "devices_per_node: 'two' is not a whole number",
        ),
        ("inside: PCIe3", "", "the key 'inside' is missing: 4 devices, 2 on a node, need it"),
        ("inside: PCIe3", "inside: PCIe9", "inside: no link called 'PCIe9'. Did you mean"),
        ("inside: PCIe3", "inside: 3", "inside: 3 is no mapping"),
        ("10 Gb/s", "10", r"between\.bandwidth: 10 is not a bandwidth"),
        ("10 Gb/s", "0 Gb/s", "between: a link's bandwidth is above 0"),
        ("30 us", "soon", r"between\.latency: 'soon' is not a quantity"),
        ("source: measured", "sauce: measured", r"between\.sauce: unknown key"),
        ("12 GB", "12 Gb", r"devices\.1\.memory: '12 Gb' counts bits"),
        ("12 GB", "0", r"devices\.1: device old has 0 bytes"),
        ("kind: gpu", "kind: tpu", r"devices\.1: device old is of kind 'tpu'"),
        ("memory: 12 GB, ", "", r"devices\.1: the key 'memory' is missing"),
        ("memory: 12 GB, kind: gpu, ", "", r"devices\.1: no device called 'old'.*needs 'memory'"),
        (
            "{name: V100, count: 2}",
            "{name: V100, count: 0}",
            r"devices\.0\.count: 0 is not a whole number",
        ),
        ("{name: V100, count: 2}", "[V100]", r"devices\.0: \['V100'\] is no mapping"),
    ],
)
def test_a_file_that_says_something_else_is_refused_with_file_and_key(tmp_path, old, new, message):
    """Files come from outside: what is not understood must not be passed over."""
    path = tmp_path / "lab.yaml"
    assert old in example()
    path.write_text(example().replace(old, new))
    with pytest.raises(ClusterError, match=f"lab.yaml.*{message}"):
        cluster(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "lab.yaml is not YAML"),
        ("!!python/object/apply:os.system ['true']", "lab.yaml is not YAML"),
        ("", "it is empty"),
        (
            "name: x\ndevices_per_node: 1\ndevices: []\n",
            r"devices: \[\] is not a list with at least one entry",
        ),
        (
            "name: x\ndevices_per_node: 1\ndevices: V100\n",
            "devices: 'V100' is not a list with at least one entry",
        ),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(tmp_path, text, message):
    """Nothing in a file is ever executed, either."""
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        cluster(path)


def test_links_that_nothing_uses_may_be_left_out(tmp_path):
    """A single machine has no network to describe."""
    path = tmp_path / "one.yaml"
    path.write_text(
        "name: one\ndevices_per_node: 8\ndevices: [{name: A100, count: 8}]\ninside: NVLink\n"
    )
    assert cluster(path).between == cluster(path).inside
    path.write_text("name: alone\ndevices_per_node: 1\ndevices: [H100]\n")
    assert cluster(path).ranks == 1


def test_a_cluster_prints_what_matters():
    """Links that nothing uses are not shown."""
    assert str(cluster("local:2")).splitlines() == [
        "local:2: 2 ranks on 1 node (cpu)",
        "  inside a node   50.0 us + 1 GB/s (assumed: measure by `penstock doctor`)",
    ]


def test_more_ranks_than_cores_slow_each_other_down(monkeypatch):
    """4 ranks on 2 cores take twice as long, 3 of them 1.5 times, and 2 as long as one."""
    monkeypatch.setattr(local, "available_cores", lambda: 2)
    four = cluster("local:4")
    assert {device.together for device in four.devices} == {2.0}
    assert [four.slowdown(0, range(busy)) for busy in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]
    assert {device.together for device in cluster("local:2").devices} == {1.0}
    assert "2 times as long while all are busy" in str(four.devices[0])


def test_ranks_of_other_nodes_do_not_slow_a_rank_down():
    """They have cores of their own."""
    device, link = Device("d", 10**9, together=1.5), Link(0.0, 1e9)
    two_nodes = Cluster("c", (device,) * 4, 2, link, link)
    assert two_nodes.slowdown(0, (0, 2, 3)) == 1.0
    assert two_nodes.slowdown(0, (0, 1)) == 1.5


def test_a_rank_alone_takes_its_seconds_alone():
    """Also where two together take three times as long, which is slower than one after the other."""
    link = Link(0.0, 1e9)
    pair = Cluster("c", (Device("d", 1, together=3.0),) * 2, 2, link, link)
    assert [pair.slowdown(0, range(busy)) for busy in (0, 1, 2)] == [1.0, 1.0, 3.0]

"""Cluster files with nodes that differ, and devices and links told key by key."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import read
from penstock.cluster.cluster import cluster
from penstock.errors import ClusterError


@pytest.fixture
def lab(tmp_path):
    """A cluster from the text of a file."""

    def run(text: str):
        path = tmp_path / "lab.yaml"
        path.write_text(text)
        return cluster(path)

    return run


def example() -> str:
    """The YAML of the module's own docstring: nodes that differ."""
    return read.__doc__.partition("```yaml\n")[2].partition("```")[0]


def test_the_example_of_mixed_nodes_works(lab):
    """It is what people copy."""
    topology = lab(example())
    assert (topology.ranks, topology.nodes, topology.kinds) == (
        11,
        4,
        ("A100", "slow A100", "old", "board"),
    )
    assert [topology.node(rank) for rank in (0, 3, 4, 7, 8, 9, 10)] == [0, 0, 1, 1, 2, 2, 3]
    assert topology.link(0, 1).bandwidth_bytes_per_s == 300e9
    assert (topology.link(8, 9).bandwidth_bytes_per_s, topology.link(8, 9).shared) == (
        15.75e9,
        True,
    )
    assert topology.link(9, 10).bandwidth_bytes_per_s == 3.125e9


def test_a_device_like_another_has_its_figures_but_for_what_is_said(lab):
    """Half of a card, or a slower one, is described in a line."""
    slow = lab(example()).devices[8]
    a100 = cluster("1xA100-NVLink").devices[0]
    assert (slow.memory_bytes, slow.launch_s, slow.together) == (
        30 * 10**9,
        pytest.approx(20e-6),
        1.1,
    )
    assert (slow.flops, slow.memory_bytes_per_s, slow.source) == (
        a100.flops,
        a100.memory_bytes_per_s,
        a100.source,
    )


def test_an_fpga_s_peaks_come_from_its_slices(lab):
    """Boards are sold by DSP slices; one multiply-add of 16 bits each in a cycle, five for one in
    float32.
    """
    board = lab(example()).devices[10]
    assert (board.kind, board.on_chip_bytes) == ("fpga", 43 * 10**6)
    assert board.peak("float16") == 2 * 6840 * 200e6
    assert board.peak("float32") == 2 * 6840 * 200e6 / 5


def test_ranks_may_be_dealt_out_over_the_nodes(lab):
    """Devices are listed node by node; `node_of` says which rank each is."""
    topology = lab(
        "name: x\nnodes: [{devices: [A100, A100], inside: NVLink}, {devices: [P100, P100], inside: PCIe3}]\n"
        "node_of: [0, 1, 0, 1]\nbetween: 10GbE\n"
    )
    assert [device.name for device in topology.devices] == ["A100", "P100", "A100", "P100"]
    assert topology.link(1, 3).bandwidth_bytes_per_s == 15.75e9
    assert topology.link(0, 1).bandwidth_bytes_per_s == 1.25e9


def test_nvlink_is_what_each_node_s_devices_have(lab):
    """One word for all nodes, and each node its own generation."""
    topology = lab(
        "name: x\ninside: NVLink\nbetween: IB\nnodes:\n- devices: [{name: V100, count: 2}]\n- devices: [{name: H100, count: 2}]\n"
    )
    assert [topology.link(rank, rank + 1).bandwidth_bytes_per_s for rank in (0, 2)] == [25e9, 450e9]


def test_nodes_that_are_alike_are_the_same_cluster_in_both_forms(lab):
    """The two forms say one thing."""
    short = lab(
        "name: x\ndevices_per_node: 2\ndevices: [{name: V100, count: 4}]\ninside: PCIe3\nbetween: 10GbE\n"
    )
    long = lab(
        "name: x\nnodes: [{count: 2, devices: [V100, V100]}]\ninside: PCIe3\nbetween: 10GbE\n"
    )
    assert short == long


def test_one_node_of_one_device_needs_no_links(lab):
    """Nothing is ever sent."""
    assert lab("name: x\nnodes: [{devices: [H100]}]\n").ranks == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count: 2, devices", "cuont: 2, devices", r"nodes\.0\.cuont: unknown key"),
        ("count: 4", "count: -4", r"nodes\.0\.devices\.0\.count: -4 is not a whole number"),
        (
            "count: 2, devices",
            "count: 60000, devices",
            "240000 devices are too many; a cluster has 1 to 65536",
        ),
        (
            ", inside: NVLink}",
            "}",
            r"nodes\.0: the key 'inside' is missing: 4 devices on a node need it, in this entry or for all nodes",
        ),
        (
            "like: A100",
            "like: A101",
            r"nodes\.1\.devices\.0\.like: no device called 'A101'\. Did you mean",
        ),
        (
            "launch: 20 us",
            "launch: 20 GB",
            r"devices\.0\.launch: '20 GB' is not a quantity in ns, us",
        ),
        ("launch: 20 us", "launch: -20 us", r"devices\.0\.launch: '-20 us' is not a quantity"),
        ("together: 1.1", "together: 0.9", r"devices\.0: device slow A100 takes 0.9 times as long"),
        ("together: 1.1", "together: fast", r"devices\.0\.together: 'fast' is not a number"),
        ("memory: 30 GB", "memory: -30 GB", r"devices\.0\.memory: '-30 GB' is not a quantity"),
        (
            "float32: 8 TFLOP/s",
            "float32: 8",
            r"devices\.1\.flops: float32: 8 is not a rate of computing",
        ),
        ("float32: 8 TFLOP/s", "half: 8 TFLOP/s", r"devices\.1\.flops: no dtype called 'half'"),
        ("320 GB/s", "320 GB", r"devices\.1\.memory_bandwidth: '320 GB' is not a bandwidth"),
        (
            "memory: 8 GB, ",
            "",
            r"devices\.1: the key 'memory' is missing: 'old' with 'flops' and 'memory_bandwidth' is",
        ),
        ("like: PCIe3", "like: PCIe9", r"nodes\.1\.inside: no link called 'PCIe9'"),
        (
            "shared: true",
            "shared: perhaps",
            r"nodes\.1\.inside\.shared: 'perhaps' is neither true nor false",
        ),
        (
            "like: PCIe3, shared: true",
            "shared: true",
            r"nodes\.1\.inside: the key 'latency' is missing",
        ),
        ("clock: 200 MHz, ", "", r"nodes\.2\.devices\.0: the key 'clock' is missing"),
        ("clock: 200 MHz", "clock: 200", r"nodes\.2\.devices\.0\.clock: 200 is not a clock"),
        (
            "dsp: 6840",
            "flops: {fp32: 1 TFLOP/s}, dsp: 6840",
            r"nodes\.2\.devices\.0: both 'flops' and 'dsp' are set",
        ),
        ("between: 25GbE", "", "the key 'between' is missing: 4 nodes need it"),
        ("between: 25GbE", "between: 25GbE\nbetween: 1GbE", "duplicate key 'between'"),
        (
            "between: 25GbE",
            "between: 25GbE\nnode_of: [0, 0]",
            r"node_of: \[0, 0\] is not the node of every rank; the nodes, from 0, hold",
        ),
        (
            "between: 25GbE",
            "between: 25GbE\nnode_of: all",
            "node_of: 'all' is not a list with at least one entry",
        ),
        ("between: 25GbE", "between: 25GbE\ndevices_per_node: 4", "devices_per_node: unknown key"),
    ],
)
def test_a_slip_in_a_file_of_nodes_is_refused_with_file_and_key(lab, old, new, message):
    """Each slip was made by hand once; none may be passed over."""
    assert old in example()
    with pytest.raises(ClusterError, match=f"lab.yaml.*{message}"):
        lab(example().replace(old, new))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nnodes: 3\n", "nodes: 3 is not a list with at least one entry"),
        ("name: x\nnodes: []\n", r"nodes: \[\] is not a list with at least one entry"),
        (
            "name: x\nnodes: [V100]\n",
            r"nodes\.0: 'V100' is no mapping with keys of devices, count, inside",
        ),
        (
            "name: x\nnode_of: [0]\ndevices: [V100]\ndevices_per_node: 1\n",
            "node_of gives the node of each rank",
        ),
        (
            "name: x\ndevices_per_node: 1\nbetween: IB\ndevices: [{name: V100, count: 65536}, V100]\n",
            "65537 devices are too many",
        ),
        (
            "name: x\ndevices_per_node: 1\ndevices: [{name: V100, together: 2}]\n",
            "take a preset's figures and change some, with 'like'",
        ),
        ("? [a]\n: b\n", r"lab.yaml.*unknown key|lab.yaml is not YAML"),
        ("name: 2026-13-45\n", "at devices_per_node: the key is missing"),
    ],
)
def test_what_is_no_cluster_of_nodes_is_refused(lab, text, message):
    """The message says what stands there and what may."""
    with pytest.raises(ClusterError, match=message):
        lab(text)


scalars = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=6)
keys = st.sampled_from(
    [
        "name",
        "nodes",
        "node_of",
        "devices",
        "devices_per_node",
        "inside",
        "between",
        "count",
        "memory",
        "like",
        "flops",
        "latency",
        "bandwidth",
        "x",
    ]
)
trees = st.recursive(
    scalars | st.just("V100"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=12,
)


@given(st.dictionaries(keys, trees, max_size=6))
@settings(deadline=None, max_examples=100)
def test_nonsense_is_refused_and_never_crashes(tmp_path_factory, tree):
    """A traceback would not show which line is wrong."""
    import yaml

    path = tmp_path_factory.mktemp("clusters") / "any.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "devices_per_node": 1} | tree))
    with contextlib.suppress(ClusterError):
        cluster(path)

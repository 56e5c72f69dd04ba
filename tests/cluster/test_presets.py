"""The tables of presets.yaml."""

import pytest

from penstock.cluster.cluster import cluster
from penstock.cluster.presets import Presets
from penstock.errors import UnknownName

PRESETS = Presets.load()


@pytest.mark.parametrize("name", sorted(PRESETS.clusters))
def test_every_paper_s_cluster_can_be_made_and_has_a_source(name):
    """A name in the table that fails on use would be found by a user."""
    topology = cluster(name)
    assert topology.name == name
    assert topology.source == PRESETS.clusters[name]["source"]
    assert topology.source
    assert topology.ranks % topology.devices_per_node == 0


def test_links_carry_what_their_names_say():
    """The Ethernet names are bits per second, the bus figures bytes."""
    rates = {
        name: PRESETS.links[name].bandwidth_bytes_per_s
        for name in ("1GbE", "10GbE", "25GbE", "40GbE", "100GbE", "PCIe3")
    }
    assert rates == {
        "1GbE": 0.125e9,
        "10GbE": 1.25e9,
        "25GbE": 3.125e9,
        "40GbE": 5e9,
        "100GbE": 12.5e9,
        "PCIe3": 15.75e9,
    }


def test_every_link_says_where_its_figure_is_from():
    """A latency that was not measured must not pass for a fact."""
    assert all(
        link.source.startswith("datasheet: ") and "assumed" in link.source
        for link in PRESETS.links.values()
    )


def test_nvlink_is_the_generation_of_the_device():
    """NVLink on a V100 and on an H100 differ eighteenfold."""
    assert [PRESETS.link_name("nvlink", name) for name in ("V100", "A100", "H200")] == [
        "NVLink2",
        "NVLink3",
        "NVLink4",
    ]
    with pytest.raises(UnknownName, match="no link for TitanX called 'NVLink'"):
        PRESETS.link_name("NVLink", "TitanX")


@pytest.mark.parametrize("name", sorted(PRESETS.devices))
def test_every_device_can_be_computed_with_and_says_where_its_figures_are_from(name):
    """A profile for hardware that is not here is made from nothing else."""
    device = PRESETS.devices[name]
    assert device.peak("float32") is not None
    assert device.memory_bytes_per_s is not None
    assert "assumed" in device.source  # launch costs and clocks are in no datasheet
    assert (device.launch_s == pytest.approx(10e-6)) == (device.kind == "gpu")


def test_peaks_are_dense_and_in_the_order_of_the_generations():
    """A sparse figure, as Hopper's datasheet prints them, would double every prediction."""
    half = [PRESETS.devices[name].peak("float16") for name in ("P100", "V100", "A100", "H100")]
    assert half == [21.2e12, 125e12, 312e12, 989e12]
    assert [PRESETS.devices[name].peak("tf32") for name in ("V100", "A100", "H200")] == [
        None,
        156e12,
        494e12,
    ]
    assert [
        PRESETS.devices[name].memory_bytes_per_s for name in ("V100", "A100-40", "H100", "H200")
    ] == [
        900e9,
        1555e9,
        3.35e12,
        4.8e12,
    ]


def test_fpga_boards_have_what_their_chips_have():
    """BaPipe's planner weighs slices against memory on the chip."""
    board, larger = PRESETS.devices["VCU118"], PRESETS.devices["VCU129"]
    assert (board.kind, larger.kind) == ("fpga", "fpga")
    assert board.peak("float16") == 2 * 6840 * 200e6
    assert larger.peak("float32") == pytest.approx(2 * 12288 * 200e6 / 5)
    assert board.on_chip_bytes == (2160 * 36 + 960 * 288) * 1024 // 8
    assert larger.on_chip_bytes == pytest.approx((94.5 + 360) * 2**20 / 8)
    mixed = cluster("BaPipe-2xVCU129+2xVCU118")
    assert mixed.kinds == ("VCU129", "VCU118")
    assert mixed.nodes == 4


@pytest.mark.parametrize("name", ["DGX-A100", "DGX-H100", "DGX-H200", "ThetaGPU"])
def test_nodes_of_eight_gpus_are_there_by_name(name):
    """What people have."""
    topology = cluster(name)
    assert (topology.ranks, topology.nodes) == (8, 1)
    assert topology.inside.bandwidth_bytes_per_s >= 300e9


def test_names_are_found_whatever_their_case():
    """Users do not remember whether it is TitanX or TITANX."""
    assert PRESETS.device("titanx").memory_bytes == 12 * 10**9
    with pytest.raises(UnknownName, match=r"no device called 'V101'\. Did you mean 'V100'\?"):
        PRESETS.device("V101")

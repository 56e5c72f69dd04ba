"""The tables of presets.yaml."""

import pytest

from penstock.cluster.cluster import cluster
from penstock.cluster.presets import Presets
from penstock.errors import UnknownName

PRESETS = Presets.load()


@pytest.mark.parametrize("name", sorted(PRESETS.clusters))
def test_every_paper_s_cluster_can_be_made_and_has_a_source(name):
    """A name in the table that fails on use would be found by a user."""
    made = cluster(name)
    assert made.name == name
    assert PRESETS.clusters[name]["source"]
    assert made.ranks % made.devices_per_node == 0


def test_links_carry_what_their_names_say():
    """The Ethernet names are bits per second, the bus figures bytes."""
    rates = {name: PRESETS.links[name].bandwidth_bytes_per_s for name in ("1GbE", "10GbE", "25GbE", "40GbE", "100GbE", "PCIe3")}
    assert rates == {"1GbE": 0.125e9, "10GbE": 1.25e9, "25GbE": 3.125e9, "40GbE": 5e9, "100GbE": 12.5e9, "PCIe3": 15.75e9}


def test_every_link_says_where_its_figure_is_from():
    """A latency that nobody measured must not pass for a fact."""
    assert all(link.source.startswith("datasheet: ") and "assumed" in link.source for link in PRESETS.links.values())


def test_nvlink_is_the_generation_of_the_device():
    """NVLink on a V100 and on an H100 differ eighteenfold."""
    assert [PRESETS.link_name("nvlink", name) for name in ("V100", "A100", "H200")] == ["NVLink2", "NVLink3", "NVLink4"]
    with pytest.raises(UnknownName, match="no link for TitanX called 'NVLink'"):
        PRESETS.link_name("NVLink", "TitanX")


def test_names_are_found_whatever_their_case():
    """Nobody remembers whether it is TitanX or TITANX."""
    assert PRESETS.device("titanx").memory_bytes == 12 * 10**9
    with pytest.raises(UnknownName, match=r"no device called 'V101'\. Did you mean 'V100'\?"):
        PRESETS.device("V101")

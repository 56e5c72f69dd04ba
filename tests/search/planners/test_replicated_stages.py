"""Where the devices of stages are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.cluster import cluster
from penstock.search.planners.replicated_stages import pack_devices, slowest_bandwidth


@settings(max_examples=60, deadline=None)
@given(powers=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_powers_of_two_in_nodes_of_a_power_of_two_never_straddle_nodes(powers):
    """Alpa's argument for its submesh shapes; what has more than a node has whole ones."""
    sizes = [2**power for power in powers]
    target = cluster(f"{-(-sum(sizes) // 4) + 1}x4xV100-NVLink-25GbE")
    devices = pack_devices(target, sizes)
    assert len(set(devices)) == sum(sizes)
    start = 0
    for size in sizes:
        nodes = {target.node(rank) for rank in devices[start : start + size]}
        assert len(nodes) == max(1, size // 4)
        start += size


def test_the_nodes_order_is_kept_where_nothing_straddles():
    """Neighbouring stages are then on neighbouring devices."""
    target = cluster("2x4xV100-NVLink-25GbE")
    assert pack_devices(target, [1, 1, 2, 4]) == tuple(range(8))
    assert pack_devices(target, [3, 1, 4]) == tuple(range(8))
    assert pack_devices(target, [3, 3]) == (0, 1, 2, 4, 5, 6)


def test_the_slowest_link_is_the_one_between_nodes_if_there_are_several():
    """A cluster of one node uses its bus."""
    two, one = cluster("2x4xV100-NVLink-25GbE"), cluster("4xV100-NVLink")
    assert slowest_bandwidth(two) == two.between.bandwidth_bytes_per_s
    assert slowest_bandwidth(one) == one.inside.bandwidth_bytes_per_s

"""SPP's order of devices."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.cluster import cluster
from penstock.search.planners.spp_order import device_order, minimum_cut


@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 7), data=st.data())
def test_no_cut_is_less(size, data):
    """Against all of them."""
    weights = [[0.0] * size for _ in range(size)]
    for a, b in combinations(range(size), 2):
        weights[a][b] = weights[b][a] = data.draw(st.integers(0, 9))

    def across(side):
        return sum(weights[a][b] for a in side for b in range(size) if b not in side)

    best = min(
        across(set(side)) for count in range(1, size) for side in combinations(range(size), count)
    )
    side = minimum_cut(weights)
    assert 0 < len(side) < size
    assert across(side) == best


@pytest.mark.parametrize(
    "node_of", [(0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1), (1, 1, 0, 2, 0, 2, 1, 0)]
)
def test_devices_of_a_node_become_neighbours(node_of):
    """Ranks may be dealt out over nodes in turn; stages next to each other must not be."""
    target = replace(cluster("2x4xV100-NVLink-10GbE"), node_of=node_of)
    order = device_order(target)
    assert sorted(order) == list(range(8))
    nodes = [node_of[rank] for rank in order]
    assert sum(a != b for a, b in pairwise(nodes)) == len(set(node_of)) - 1


def test_equal_links_leave_the_order_as_it_is():
    """There is nothing to cut by."""
    assert device_order(cluster("6xV100-NVLink")) == (0, 1, 2, 3, 4, 5)
    assert device_order(cluster("4x4xV100-NVLink-25GbE")) == tuple(range(16))

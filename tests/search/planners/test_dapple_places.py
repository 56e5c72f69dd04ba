"""DAPPLE's places of devices, and the links between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.search.planners.dapple_places import Network, placements


@pytest.mark.parametrize(
    ("sizes", "used", "devices", "places"),
    [
        # Fresh first takes the unused node; append first and scatter first the rest of node 0.
        ((4, 4, 4), (2, 0, 0), 3, [(0, 3, 0), (2, 1, 0)]),
        # All nodes are in use: fresh first has none but these.
        ((4, 4), (2, 2), 3, [(2, 1)]),
        ((4, 4), (1, 2), 4, [(3, 1), (2, 2)]),
        # No node is in use: scatter first takes equally many of all.
        ((4, 4, 4), (0, 0, 0), 5, [(4, 1, 0), (2, 2, 1)]),
        # Scatter first goes on with fresh nodes when those in use are full.
        ((4, 4, 4), (3, 2, 0), 5, [(1, 0, 4), (1, 2, 2)]),
        ((2, 4), (1, 0), 4, [(0, 4), (1, 3)]),
        # All devices that are left.
        ((2, 3), (1, 1), 3, [(1, 2)]),
        ((3,), (0,), 1, [(1,)]),
    ],
)
def test_a_stage_is_placed_by_three_rules_without_duplicates(sizes, used, devices, places):
    """Fresh first keeps it within a node, append first leaves no fragments, scatter first takes
    equally many of all nodes in use.
    """
    assert placements(sizes, used, devices) == places


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=4), st.data())
def test_every_place_has_the_devices_and_no_more_than_are_free(nodes, data):
    """Whatever is in use already."""
    sizes = tuple(size for size, _ in nodes)
    used = tuple(min(size, count) for size, count in nodes)
    free = [size - count for size, count in zip(sizes, used, strict=True)]
    if not sum(free):
        return
    devices = data.draw(st.integers(1, sum(free)))
    for place in placements(sizes, used, devices):
        assert sum(place) == devices
        assert all(0 <= count <= most for count, most in zip(place, free, strict=True))


NETWORK = Network(inside=(1.0, 0.5), between=(10.0, 8.0), collective=(20.0, 16.0))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((2, 0), (2, 0), (1.0, 0.25)),
        ((1, 0), (3, 0), (1.0, 0.5)),
        ((2, 0), (0, 4), (10.0, 4.0)),
        ((4, 0), (1, 1), (10.0, 4.0)),
    ],
)
def test_a_transfer_is_as_fast_as_the_side_with_fewer_devices(one, other, expected):
    """Over the links between nodes unless both stages are within the same node."""
    assert NETWORK.transfer(one, other) == expected
    assert NETWORK.transfer(other, one) == expected


@pytest.mark.parametrize(
    ("network", "place", "expected"),
    [
        (NETWORK, (4, 0), (6.0, 0.75)),
        (NETWORK, (0, 1), (0.0, 0.0)),
        (NETWORK, (1, 1), (40.0, 16.0)),
        (Network((1.0, 0.5), (10.0, 8.0)), (2, 2), (60.0, 12.0)),
    ],
)
def test_an_all_reduce_is_a_ring_over_the_slowest_links(network, place, expected):
    """2 (k - 1) messages of a k-th of the bytes; those between nodes may have other links."""
    assert network.all_reduce(place) == expected

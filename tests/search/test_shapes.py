"""How devices are shared out among pipelines."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import FAST, SLOW, clusters, profiles

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.search.request import PlanRequest
from penstock.search.shapes import Shape, placement_key, placements, shapes

LINK = Link(0.0, 1e12)


def kinds_of(shape: Shape, on: Cluster) -> list[list[str]]:
    """Per pipeline, the names of its devices."""
    names = [on.devices[rank].name for rank in shape.devices]
    return [names[i : i + shape.ranks] for i in range(0, len(names), shape.ranks)]


@settings(max_examples=100, deadline=None)
@given(profiles(), clusters(), st.integers(1, 16), st.sampled_from([None, 1, 2]))
def test_pipelines_stand_on_devices_of_their_own_with_the_same_kinds_in_the_same_order(
    profile, on, batch, most
):
    """Only so does one pipeline stand for all of them."""
    found = shapes(PlanRequest(profile, on, batch, max_replicas=most))
    assert len(set(found)) == len(found) > 0
    for shape in found:
        assert len(set(shape.devices)) == len(shape.devices) == shape.pipelines * shape.ranks
        assert set(shape.devices) <= set(range(on.ranks))
        assert shape.first == shape.devices[: shape.ranks]
        assert shape.pipelines <= min(batch, most or on.ranks)
        rows = kinds_of(shape, on)
        assert all(row == rows[0] for row in rows)


def test_of_few_equal_devices_every_number_of_pipelines_and_ranks_is_there(profile_of):
    """Nobody has to believe that only powers of two pay."""
    found = {
        (shape.pipelines, shape.ranks)
        for shape in shapes(PlanRequest(profile_of([1.0] * 9), cluster("7xV100-10GbE"), 64))
    }
    assert found == {(p, r) for p in range(1, 8) for r in range(1, 8) if p * r <= 7}


def test_pipelines_stand_along_nodes_and_across_them(profile_of):
    """Inside a node messages are quick; across nodes the copies' gradients are: which counts more
    depends on the model.
    """
    found = shapes(PlanRequest(profile_of([1.0] * 4), cluster("2x2xV100-NVLink-25GbE"), 16))
    assert {shape.devices for shape in found if (shape.pipelines, shape.ranks) == (2, 2)} == {
        (0, 1, 2, 3),
        (0, 2, 1, 3),
    }


def test_slower_devices_may_be_left_out_and_stand_first_or_last(profile_of):
    """A slow device can cost more than it gives."""
    devices = (Device("slow", 10**9, flops=SLOW), Device("fast", 10**9, flops=FAST))
    found = shapes(PlanRequest(profile_of([1.0] * 4), Cluster("c", devices, 2, LINK, LINK), 4))
    assert {shape.devices for shape in found} == {(0, 1), (1, 0), (1,)}


def test_each_pipeline_has_its_share_of_both_kinds(profile_of):
    """Two of four and two: each one of both, or all in one."""
    devices = (Device("fast", 10**9, flops=FAST),) * 2 + (Device("slow", 10**9, flops=SLOW),) * 2
    on = Cluster("c", devices, 4, LINK, LINK)
    found = [
        shape
        for shape in shapes(PlanRequest(profile_of([1.0] * 4), on, 4))
        if len(shape.devices) == 4
    ]
    assert {(shape.pipelines, *map(tuple, kinds_of(shape, on))) for shape in found} == {
        (1, ("fast", "fast", "slow", "slow")),
        (1, ("slow", "slow", "fast", "fast")),
        (2, ("fast", "slow"), ("fast", "slow")),
        (2, ("slow", "fast"), ("slow", "fast")),
    }


def test_mixed_pipelines_have_no_more_ranks_than_there_are_layers(profile_of):
    """Some of every kind then."""
    devices = (Device("fast", 10**9, flops=FAST),) * 6 + (Device("slow", 10**9, flops=SLOW),) * 2
    found = shapes(
        PlanRequest(profile_of([1.0] * 4), Cluster("c", devices, 8, LINK, LINK), 4, max_replicas=1)
    )
    mixed = [shape for shape in found if {6, 7} & set(shape.devices)]
    assert {shape.ranks for shape in mixed} == {4}


@pytest.mark.parametrize("spec", ["128x8xV100-NVLink-25GbE", "64x8xV100-NVLink-25GbE"])
def test_a_thousand_devices_have_few_shapes(profile_of, spec):
    """Each is cut and simulated with many schedules: there must not be thousands."""
    found = shapes(PlanRequest(profile_of([1.0] * 100), cluster(spec), 4096))
    assert 2 <= len(found) <= 100
    assert any(len(shape.devices) == cluster(spec).ranks for shape in found), "one uses all"


def test_a_thousand_mixed_devices_have_few_shapes(profile_of):
    """As the issue asks: 1,024 devices in 128 nodes, of two kinds."""
    devices = tuple(
        Device("fast" if node % 2 else "slow", 10**9, flops=FAST if node % 2 else SLOW)
        for node in range(128)
        for _ in range(8)
    )
    found = shapes(PlanRequest(profile_of([1.0] * 100), Cluster("c", devices, 8, LINK, LINK), 4096))
    assert 2 <= len(found) <= 200


@settings(max_examples=30, deadline=None)
@given(profiles(), clusters(4), st.integers(1, 8), st.sampled_from([None, 1]))
def test_every_choice_and_order_of_few_devices_is_equal_to_a_placement(profile, on, batch, most):
    """Equal means that devices and nodes can be renamed. One node of equal devices has no orders."""
    request = PlanRequest(profile, on, batch, max_replicas=most)
    found = placements(request)
    if on.nodes == 1 and len(on.kinds) == 1:
        assert not found
        return
    keys = [(shape.pipelines, placement_key(on, shape.devices)) for shape in found]
    assert len(set(keys)) == len(keys)
    for count in range(1, min(on.ranks, len(profile)) + 1):
        for devices in permutations(range(on.ranks), count):
            assert (1, placement_key(on, devices)) in keys


def test_placements_are_for_few_devices_that_differ(profile_of):
    """Of four equal devices on two hosts, a pipeline of two is inside a host or on both."""
    request = PlanRequest(profile_of([1.0] * 4), cluster("2x2xV100-NVLink-25GbE"), 8)
    pairs = [
        shape.devices for shape in placements(request) if (shape.pipelines, shape.ranks) == (1, 2)
    ]
    assert pairs == [(0, 1), (0, 2)]
    assert not placements(PlanRequest(profile_of([1.0] * 4), cluster("2x4xV100-NVLink-25GbE"), 8))

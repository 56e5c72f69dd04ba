"""How devices are shared out among pipelines."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import FAST, SLOW, clusters, profiles

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.partition.limited import limited
from penstock.search import shapes as module
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
    all_shapes = shapes(PlanRequest(profile, on, batch, max_replicas=most))
    assert len(set(all_shapes)) == len(all_shapes) > 0
    for shape in all_shapes:
        assert len(set(shape.devices)) == len(shape.devices) == shape.pipelines * shape.ranks
        assert set(shape.devices) <= set(range(on.ranks))
        assert shape.first == shape.devices[: shape.ranks]
        assert shape.pipelines <= min(batch, most or on.ranks)
        rows = kinds_of(shape, on)
        assert all(row == rows[0] for row in rows)


def test_of_few_equal_devices_every_number_of_pipelines_and_ranks_is_there(profile_of):
    """Numbers that are not powers of two may be best."""
    sizes = {
        (shape.pipelines, shape.ranks)
        for shape in shapes(PlanRequest(profile_of([1.0] * 9), cluster("7xV100-10GbE"), 64))
    }
    assert sizes == {(p, r) for p in range(1, 8) for r in range(1, 8) if p * r <= 7}


def test_pipelines_stand_along_nodes_and_across_them(profile_of):
    """Inside a node messages are quick; across nodes the copies' gradients are: which counts more
    depends on the model.
    """
    all_shapes = shapes(PlanRequest(profile_of([1.0] * 4), cluster("2x2xV100-NVLink-25GbE"), 16))
    assert {shape.devices for shape in all_shapes if (shape.pipelines, shape.ranks) == (2, 2)} == {
        (0, 1, 2, 3),
        (0, 2, 1, 3),
    }


def test_slower_devices_may_be_left_out_and_stand_first_or_last(profile_of):
    """A slow device can cost more than it gives."""
    devices = (Device("slow", 10**9, flops=SLOW), Device("fast", 10**9, flops=FAST))
    all_shapes = shapes(PlanRequest(profile_of([1.0] * 4), Cluster("c", devices, 2, LINK, LINK), 4))
    assert {shape.devices for shape in all_shapes} == {(0, 1), (1, 0), (1,)}


def test_each_pipeline_has_its_share_of_both_kinds(profile_of):
    """Two of four and two: each one of both, or all in one."""
    devices = (Device("fast", 10**9, flops=FAST),) * 2 + (Device("slow", 10**9, flops=SLOW),) * 2
    on = Cluster("c", devices, 4, LINK, LINK)
    sizes = [
        shape
        for shape in shapes(PlanRequest(profile_of([1.0] * 4), on, 4))
        if len(shape.devices) == 4
    ]
    assert {(shape.pipelines, *map(tuple, kinds_of(shape, on))) for shape in sizes} == {
        (1, ("fast", "fast", "slow", "slow")),
        (1, ("slow", "slow", "fast", "fast")),
        (2, ("fast", "slow"), ("fast", "slow")),
        (2, ("slow", "fast"), ("slow", "fast")),
    }


def test_mixed_pipelines_have_no_more_ranks_than_there_are_layers(profile_of):
    """Some of every kind then."""
    devices = (Device("fast", 10**9, flops=FAST),) * 6 + (Device("slow", 10**9, flops=SLOW),) * 2
    all_shapes = shapes(
        PlanRequest(profile_of([1.0] * 4), Cluster("c", devices, 8, LINK, LINK), 4, max_replicas=1)
    )
    mixed = [shape for shape in all_shapes if {6, 7} & set(shape.devices)]
    assert {shape.ranks for shape in mixed} == {4}


@pytest.mark.parametrize("spec", ["128x8xV100-NVLink-25GbE", "64x8xV100-NVLink-25GbE"])
def test_a_thousand_devices_have_few_shapes(profile_of, spec):
    """Each is cut and simulated with many schedules: there must not be thousands."""
    all_shapes = shapes(PlanRequest(profile_of([1.0] * 100), cluster(spec), 4096))
    assert 2 <= len(all_shapes) <= 100
    assert any(len(shape.devices) == cluster(spec).ranks for shape in all_shapes), "one uses all"


def test_a_thousand_mixed_devices_have_few_shapes(profile_of):
    """As the issue asks: 1,024 devices in 128 nodes, of two kinds."""
    devices = tuple(
        Device("fast" if node % 2 else "slow", 10**9, flops=FAST if node % 2 else SLOW)
        for node in range(128)
        for _ in range(8)
    )
    all_shapes = shapes(
        PlanRequest(profile_of([1.0] * 100), Cluster("c", devices, 8, LINK, LINK), 4096)
    )
    assert 2 <= len(all_shapes) <= 200


@settings(max_examples=30, deadline=None)
@given(profiles(), clusters(4), st.integers(1, 8), st.sampled_from([None, 1]))
def test_every_choice_and_order_of_few_devices_is_equal_to_a_placement(profile, on, batch, most):
    """Equal means that devices and nodes can be renamed. One node of equal devices has no orders."""
    request = PlanRequest(profile, on, batch, max_replicas=most)
    all_placements = placements(request)
    if on.nodes == 1 and len(on.kinds) == 1:
        assert not all_placements
        return
    keys = [(shape.pipelines, placement_key(on, shape.devices)) for shape in all_placements]
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


def equal(count: int, per_node: int = 0) -> Cluster:
    """Equal devices, all in one node unless a number per node is given."""
    return Cluster("c", (Device("d", 10**12),) * count, per_node or count, LINK, LINK)


def numbers(profile, on, batch=64, **options):
    """Pipelines and ranks of all shapes."""
    request = PlanRequest(profile, on, batch, **options)
    return sorted((shape.pipelines, shape.ranks) for shape in shapes(request))


def test_on_more_than_sixteen_devices_the_divisions_use_nearly_all(profile_of):
    """Powers of two and three times these, and all; a single pipeline may also leave devices out,
    and none has more ranks than layers.
    """
    profile = profile_of([1.0] * 10)
    assert numbers(profile, equal(20)) == [
        *((1, ranks) for ranks in (1, 2, 3, 4, 6, 8, 10)),
        *((2, 10), (3, 6), (4, 5), (6, 3), (8, 2), (12, 1), (16, 1), (20, 1)),
    ]
    assert len(numbers(profile, equal(16))) > len(numbers(profile, equal(17)))
    limited_copies = numbers(profile, equal(20), max_replicas=5)
    assert max(pipelines for pipelines, _ in limited_copies) == 5
    assert (5, 4) in limited_copies
    few_samples = numbers(profile, equal(20), batch=3)
    assert {pipelines for pipelines, _ in few_samples} == {1, 2, 3}


def test_shares_of_mixed_devices_keep_their_proportions(profile_of):
    """9 fast and 3 slow devices on 8 layers: six of the fast and two of the slow. Of a kind with
    few devices at least one stays, also where its share is less.
    """
    kinds = (Device("fast", 10**9, flops=FAST), Device("slow", 10**9, flops=SLOW))
    for counts, layers, expected in (
        ((9, 3), 8, (6, 2)),
        ((9, 3), 12, (9, 3)),
        ((9, 3), 11, (8, 2)),
        ((11, 1), 4, (3, 1)),
    ):
        devices = (kinds[0],) * counts[0] + (kinds[1],) * counts[1]
        on = Cluster("c", devices, 12, LINK, LINK)
        request = PlanRequest(profile_of([1.0] * layers), on, 4, max_replicas=1)
        mixed = [kinds_of(shape, on)[0] for shape in shapes(request)]
        mixed = [row for row in mixed if len(set(row)) == 2]
        assert mixed
        for row in mixed:
            assert (row.count("fast"), row.count("slow")) == expected


def test_a_pipeline_of_several_kinds_has_the_order_that_makes_its_slowest_stage_fastest(profile_of):
    """Besides the kinds one after the other: against all orders, each with its best cut."""
    devices = (
        Device("slow", 10**9, flops=SLOW),
        Device("fast", 10**9, flops=FAST),
        Device("fast", 10**9, flops=FAST),
    )
    on = Cluster("c", devices, 3, LINK, LINK)
    profile = replace(profile_of([1.0, 1.0, 1.0, 4.0, 1.0]), device="fast")
    request = PlanRequest(profile, on, 8, max_replicas=1)
    orders = {tuple(kinds_of(shape, on)[0]) for shape in shapes(request) if shape.ranks == 3}
    nothing = [0.0] * 5

    def slowest(order):
        rows = [request.profile_of(0 if kind == "slow" else 1).step_seconds(1) for kind in order]
        cut = limited(rows, None, nothing, nothing, [1, 1, 1], [float("inf")] * 3)
        first, times = 0, []
        for row, length in zip(rows, cut, strict=True):
            times.append(sum(row[first : first + length]))
            first += length
        return max(times)

    every = set(permutations(("slow", "fast", "fast")))
    best = min(map(slowest, every))
    assert {("slow", "fast", "fast"), ("fast", "fast", "slow")} <= orders
    assert min(map(slowest, orders)) == best


def test_long_pipelines_of_several_kinds_are_only_grouped(profile_of, monkeypatch):
    """The search over orders grows with the number of ranks."""
    calls = []

    def counted(seconds, counts, stages, **options):
        calls.append(stages)

    monkeypatch.setattr(module, "best_order", counted)
    kinds = (Device("fast", 10**9, flops=FAST), Device("slow", 10**9, flops=SLOW))
    for most, expected in ((4, True), (3, False)):
        calls.clear()
        monkeypatch.setattr(module, "MOST_ORDERED", most)
        on = Cluster("c", (kinds[0],) * 2 + (kinds[1],) * 2, 4, LINK, LINK)
        shapes(PlanRequest(profile_of([1.0] * 4), on, 4, max_replicas=1))
        assert bool(calls) == expected


def test_orders_of_kinds_begin_with_that_of_the_cluster_and_its_reverse(profile_of):
    """Up to six of them, which three kinds have; slower kinds are left out one by one."""
    flops = {"a": 3e12, "b": 2e12, "c": 1e12, "d": 0.5e12}
    for names in ("bac", "dabc"):
        devices = tuple(Device(name, 10**9, flops=(("float32", flops[name]),)) for name in names)
        on = Cluster("c", devices, len(names), LINK, LINK)
        request = PlanRequest(
            replace(profile_of([1.0] * 4), device=names[0]), on, 4, max_replicas=1
        )
        rows = [tuple(kinds_of(shape, on)[0]) for shape in shapes(request)]
        assert rows[0] == tuple(names)
        assert tuple(names[::-1]) in rows
        used = {frozenset(row) for row in rows}
        ranked = sorted(names, key=flops.get, reverse=True)
        assert used == {frozenset(ranked[:count]) for count in range(1, len(names) + 1)}


def test_placements_have_pipelines_in_the_order_of_their_first_devices(profile_of):
    """Pipelines are interchangeable. No more of them than the batch has samples or copies are
    allowed, and no more ranks than layers.
    """
    on = cluster("2x2xV100-NVLink-25GbE")
    for layers, batch, most in product((1, 2, 4), (1, 8), (None, 1, 2)):
        request = PlanRequest(profile_of([1.0] * layers), on, batch, max_replicas=most)
        for shape in placements(request):
            firsts = shape.devices[:: shape.ranks]
            assert list(firsts) == sorted(firsts)
            assert shape.pipelines <= min(batch, most or 4)
            assert shape.ranks <= layers
            assert len(set(shape.devices)) == shape.pipelines * shape.ranks
    doubles = [
        shape.devices
        for shape in placements(PlanRequest(profile_of([1.0] * 2), on, 8))
        if (shape.pipelines, shape.ranks) == (2, 2)
    ]
    assert (0, 1, 2, 3) in doubles
    assert (0, 2, 1, 3) in doubles


def test_equal_placements_are_on_equal_devices_of_equal_nodes():
    """Nodes differ by their devices and by the link inside."""
    link, fast = Link(0.0, 1e12), Link(0.0, 2e12)
    devices = (Device("a", 1), Device("b", 1), Device("a", 1), Device("b", 1), Device("a", 1))
    nodes = (0, 0, 1, 1, 2)
    on = Cluster("c", devices, 1, link, link, node_of=nodes)
    assert placement_key(on, (0, 1)) == placement_key(on, (2, 3))
    assert placement_key(on, (0, 3)) == placement_key(on, (2, 1))
    assert placement_key(on, (0, 1)) != placement_key(on, (0, 3))
    assert placement_key(on, (0, 1)) != placement_key(on, (1, 0))
    # Rank 4 is alone in its node.
    assert placement_key(on, (0,)) != placement_key(on, (4,))
    unlike = replace(on, insides=((1, fast),))
    assert placement_key(unlike, (0, 1)) != placement_key(unlike, (2, 3))

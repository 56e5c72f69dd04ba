"""Where ways are cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import clusters, profiles, unlike

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import UnknownName
from penstock.partition.catalogue import partition
from penstock.search.cuts import cut, layer_bytes
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import stage_costs


def every_cut(layers: int, stages: int):
    """Lengths of all cuts."""
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *inner, layers)))


def slowest(request, places, lengths, samples):
    """Seconds of the slowest stage or link, worked out layer by layer."""
    worst, start = 0.0, 0
    for stage, (place, length) in enumerate(zip(places, lengths, strict=True)):
        stage_layers = request.profile_of(place).layers[start : start + length]
        worst = max(
            worst,
            sum(
                layer.seconds("forward", samples) + layer.seconds("backward", samples)
                for layer in stage_layers
            ),
        )
        start += length
        if stage + 1 < len(places):
            size = samples * request.profile.layers[start - 1].output_bytes_per_sample
            worst = max(worst, request.cluster.transfer_seconds(size, place, places[stage + 1]))
    return worst


@settings(max_examples=80, deadline=None)
@given(st.data(), profiles(2, 7, simple=False), clusters(5, memory=(10**12,)), st.integers(1, 16))
def test_the_slowest_stage_or_link_is_as_fast_as_any_cut_makes_it(data, profile, on, batch):
    """On unlike devices and links, several stages on one rank too."""
    kind_profiles = data.draw(unlike(profile)) if len(on.kinds) > 1 else profile
    request = PlanRequest(kind_profiles, on, batch)
    stages = data.draw(st.integers(1, min(len(profile), 4)))
    places = tuple(
        data.draw(st.lists(st.integers(0, on.ranks - 1), min_size=stages, max_size=stages))
    )
    micro_batches = data.draw(st.integers(1, batch))
    best_lengths = cut(request, places, micro_batches, "time")
    best = min(
        slowest(request, places, lengths, batch / micro_batches)
        for lengths in every_cut(len(profile), stages)
    )
    assert slowest(request, places, best_lengths, batch / micro_batches) <= best * (1 + 1e-6)


def test_stages_on_like_devices_have_the_seconds_of_these(profile_of):
    """Which are not those of the first device of the cluster."""
    even, uneven = profile_of([1.0] * 4), profile_of([5.0, 1.0, 1.0, 1.0])
    devices = (Device("slow", 10**12), Device("fast", 10**12), Device("fast", 10**12))
    link = Link(0.0, 1e12)
    request = PlanRequest(
        {"slow": uneven, "fast": even}, Cluster("c", devices, 3, link, link), batch=1
    )
    assert cut(request, (1, 2), 1, "time") == (2, 2)
    assert cut(request, (0, 0), 1, "time") == (1, 3)


@settings(max_examples=60, deadline=None)
@given(st.data(), profiles(3, 6), st.integers(2, 3), st.integers(300, 60_000), st.integers(1, 8))
def test_within_limits_the_slowest_is_as_fast_as_any_cut_that_fits(
    data, profile, stages, room, micro_batches
):
    """And None means that no cut fits: bytes by layer, and for each micro-batch in flight."""
    link = Link(1e-4, 1e7)
    request = PlanRequest(profile, Cluster("c", (Device("d", room),) * stages, 1, link, link), 8)
    places, in_flight = (
        tuple(range(stages)),
        tuple(data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))),
    )
    single = stage_costs(
        profile,
        [1] * len(profile),
        8 / micro_batches,
        request.cluster.on((0,) * 1),
        micro_batches=micro_batches,
    )

    def fits(lengths):
        start = 0
        for length, held in zip(lengths, in_flight, strict=True):
            rows = range(start, start + length)
            if sum(single.weight_bytes[i] + held * single.activation_bytes[i] for i in rows) > room:
                return False
            start += length
        return True

    able = [lengths for lengths in every_cut(len(profile), stages) if fits(lengths)]
    best_lengths = cut(request, places, micro_batches, "limits", in_flight)
    assert (best_lengths is None) == (not able)
    if best_lengths is not None:
        best = min(slowest(request, places, lengths, 8 / micro_batches) for lengths in able)
        assert slowest(request, places, best_lengths, 8 / micro_batches) <= best * (1 + 1e-6)


def test_the_cut_for_memory_evens_out_bytes(profile_of):
    """The last way to make it fit."""
    profile = profile_of([8.0, 1.0, 1.0, 1.0], activation=1.0, parameters=[10, 1000, 1000, 1000])
    request = PlanRequest(profile, cluster(2), 4)
    assert cut(request, (0, 1), 2, "time") == (1, 3)
    lengths = cut(request, (0, 1), 2, "memory")
    costs = stage_costs(profile, lengths, 2, request.cluster, micro_batches=2)
    assert lengths in ((2, 2), (3, 1))
    assert max(costs.weight_bytes) == 6000


def test_the_cut_avoids_a_boundary_that_the_link_cannot_carry(profile_of):
    """Even stages over a choked link are slower than uneven ones beside it."""
    profile = profile_of([1.0] * 4, output=[1.0, 1e10, 1.0, 1.0])
    target = cluster("2xV100-1GbE")
    assert cut(PlanRequest(profile, target, 16), (0, 1), 1, "time") != (2, 2)
    assert cut(PlanRequest(profile_of([1.0] * 4), target, 16), (0, 1), 1, "time") == (2, 2)


@pytest.mark.parametrize("balance", ["time", "limits", "memory"])
@pytest.mark.parametrize("by", ["uniform", "time", "parameters", (3, 1)])
def test_a_method_or_a_cut_that_the_request_names_is_taken_whatever_the_balance(
    profile_of, by, balance
):
    """A named method takes precedence over the default."""
    profile = profile_of([1.0, 1.0, 1.0, 5.0], parameters=[9, 1, 1, 1])
    lengths = cut(PlanRequest(profile, cluster(2), 4, by=by), (0, 1), 2, balance, (1, 1))
    sized = {"micro_batch": 2} if by == "time" else {}
    assert lengths == tuple(partition(profile, 2, by=by, **sized))


def test_an_unknown_method_is_refused_by_name(profile_of):
    """With the closest that there is."""
    with pytest.raises(UnknownName, match=r"'unifrom'\. Did you mean 'uniform'"):
        cut(PlanRequest(profile_of([1.0] * 4), cluster(2), 4, by="unifrom"), (0, 1), 2, "time")


@pytest.mark.parametrize(
    ("places", "seconds", "expected"),
    [
        ((0, 1, 1, 0), [1, 1, 4, 1, 1, 1], 5.0),
        ((0, 1, 0, 1), [1, 1, 4, 1, 1, 1], 5.0),
    ],
)
def test_of_ranks_with_several_stages_the_busiest_counts(profile_of, places, seconds, expected):
    """9 s of work on two ranks, 4 of them in one layer: 4 and 5."""
    lengths = cut(PlanRequest(profile_of(seconds), cluster("2xV100-NVLink"), 1), places, 1, "ranks")
    load = [0.0, 0.0]
    start = 0
    for place, length in zip(places, lengths, strict=True):
        load[place] += sum(seconds[start : start + length])
        start += length
    assert max(load) == expected


def test_other_placements_have_no_such_cut(profile_of):
    """The exact cuts are for loops and for the V."""
    assert (
        cut(PlanRequest(profile_of([1.0] * 4), cluster("2xV100-NVLink"), 1), (1, 0), 1, "ranks")
        is None
    )


def test_a_cut_for_time_ignores_memory_on_unlike_devices_too(profile_of):
    """What does not fit is cut again within the limits, or recomputed."""
    devices = (Device("slow", 1), Device("fast", 1))
    link = Link(0.0, 1e12)
    profiles = {"slow": profile_of([2.0] * 6), "fast": profile_of([1.0] * 6)}
    request = PlanRequest(profiles, Cluster("c", devices, 2, link, link), batch=1)
    assert cut(request, (0, 1), 1, "time") == (2, 4)
    assert cut(request, (0, 1), 1, "limits", (1, 1)) is None


def test_no_more_micro_batches_than_there_are_count_in_the_cut_for_memory(profile_of):
    """Layer 0 has activations, the others weights: one micro-batch is in flight, not one for each
    of the two stages.
    """
    profile = profile_of(
        [1.0] * 4, activation=[100.0, 0.0, 0.0, 0.0], output=0.0, parameters=[0, 30, 60, 90]
    )
    request = PlanRequest(profile, cluster("2xV100-NVLink"), 1)
    (weights, activations) = layer_bytes(request, 1)
    once = [w + a for w, a in zip(weights, activations, strict=True)]
    expected = tuple(partition(profile, 2, by="bottleneck", costs=once))
    assert cut(request, (0, 1), 1, "memory") == expected
    twice = [w + 2 * a for w, a in zip(weights, activations, strict=True)]
    assert tuple(partition(profile, 2, by="bottleneck", costs=twice)) != expected


@pytest.mark.parametrize(
    ("places", "seconds"),
    [((0, 1, 1, 0), [1, 1, 4, 1, 1, 1]), ((0, 1, 0, 1), [3, 1, 4, 1, 1, 2])],
)
def test_links_count_where_ranks_have_several_stages(profile_of, places, seconds):
    """Of the cuts within 2 % of the busiest rank or link that is best, the one whose largest stage
    is smallest; all crossings between two ranks share their link.
    """
    output = [1.0, 300.0, 20.0, 10.0, 500.0, 1.0]
    profile = profile_of([float(value) for value in seconds], output=output)
    link = Link(0.5, 100.0)
    request = PlanRequest(profile, Cluster("c", (Device("d", 10**12),) * 2, 2, link, link), 2)

    def loads(lengths):
        ranks, crossing, start = [0.0, 0.0], 0.0, 0
        for stage, (place, length) in enumerate(zip(places, lengths, strict=True)):
            ranks[place] += sum(profile.step_seconds(2)[start : start + length])
            start += length
            if stage + 1 < len(places) and places[stage + 1] != place:
                crossing += link.transfer_seconds(2 * output[start - 1])
        return max(*ranks, crossing)

    chosen = cut(request, places, 1, "ranks")
    best = min(loads(lengths) for lengths in every_cut(6, 4))
    assert loads(chosen) <= best * 1.02 * (1 + 1e-9)

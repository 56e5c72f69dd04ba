"""The exact cut against every other cut."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.balanced import partition_balanced
from penstock.partition.block import block_partition
from penstock.partition.bottleneck import minimax, transfer_of
from penstock.partition.catalogue import partition
from penstock.profile.profile import LayerProfile, Profile, Timing

WHOLE = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 1000))
REAL = st.one_of(
    st.just(0.0),
    st.sampled_from([0.1, 0.2, 0.3]),
    st.floats(0, 1),
    st.floats(0, 1e-9),
    st.floats(0, 1e9),
)
both_ways = pytest.mark.parametrize("overlap", [True, False])

#: docs/literature/vgg-19-profile.md: stages, one optimal cut, its bottleneck in ms.
TABLE = [
    (2, [8, 17], 77.4),
    (3, [4, 6, 15], 54.75),
    (4, [3, 4, 5, 13], 39.885),
    (6, [1, 2, 3, 3, 4, 12], 31.185),
    (8, [1, 1, 2, 1, 3, 3, 3, 11], 22.545),
]


def loads(costs, lengths, transfer, overlap):
    """The loads of all stages and links, layer by layer in plain Python."""
    links, stages, end = [], [], 0
    for stage, length in enumerate(lengths):
        stages.append(sum(costs[end : end + length]))
        end += length
        if stage < len(lengths) - 1:
            links.append(transfer[end - 1] if transfer else 0)
    if overlap:
        return stages + links
    return [load + sum(links[max(s - 1, 0) : s + 1]) for s, load in enumerate(stages)]


def squares(costs, lengths, transfer, overlap):
    """What the tie-break makes least."""
    return sum(load * load for load in loads(costs, lengths, transfer, overlap))


def every_cut(layers, stages):
    """All stage lengths there are."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in zip((0, *cuts), (*cuts, layers), strict=True)]


def worst(costs, lengths, transfer=None, overlap=True):
    """The bottleneck, without help from the code under test."""
    return max(loads(costs, lengths, transfer, overlap))


@st.composite
def cases(draw, cost):
    """Up to nine layers, a number of stages, and transfers or none."""
    costs = draw(st.lists(cost, min_size=1, max_size=9))
    exactly = len(costs) - 1
    transfer = draw(st.none() | st.lists(cost, min_size=exactly, max_size=exactly))
    return costs, draw(st.integers(1, len(costs))), transfer


def packed(costs, stages):
    """The least bottleneck by another road: bisect over whole numbers, packing stages greedily.
    Costs are ints above 0.
    """

    def fits(limit):
        used, load = 1, 0
        for cost in costs:
            if load + cost > limit:
                used, load = used + 1, 0
            load += cost
        return used <= stages

    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


@both_ways
@settings(deadline=None, max_examples=250)
@given(case=cases(WHOLE))
def test_no_cut_is_better_and_none_as_good_has_more_slack(case, overlap):
    """Whole numbers are exact in floats, so the bottleneck and the sum of squares must be met to
    the last unit.
    """
    costs, stages, transfer = case
    lengths = minimax(costs, stages, transfer, overlap)
    assert len(lengths) == stages
    assert min(lengths) >= 1
    assert sum(lengths) == len(costs)
    cuts = every_cut(len(costs), stages)
    bottleneck, least = min(
        (worst(costs, cut, transfer, overlap), squares(costs, cut, transfer, overlap))
        for cut in cuts
    )
    assert worst(costs, lengths, transfer, overlap) == bottleneck
    assert squares(costs, lengths, transfer, overlap) <= least + 2e-9 * bottleneck**2


@both_ways
@settings(deadline=None, max_examples=250)
@given(case=cases(REAL))
def test_no_cut_is_better_for_real_costs_either(case, overlap):
    """Sums of floats in another order differ in their last digits, those of very unlike costs in
    more; it must not matter.
    """
    costs, stages, transfer = case
    lengths = minimax(costs, stages, transfer, overlap)
    least = min(worst(costs, cut, transfer, overlap) for cut in every_cut(len(costs), stages))
    assert worst(costs, lengths, transfer, overlap) <= least * (1 + 1e-11)
    assert minimax(np.array(costs), stages, transfer, overlap) == lengths


@pytest.mark.parametrize(("stages", "lengths", "bottleneck"), TABLE)
def test_vgg_reaches_the_optimum_of_the_table(vgg, stages, lengths, bottleneck):
    """docs/literature/vgg-19-profile.md: the bottleneck is the fact, the lengths are one way to it."""
    costs = vgg.step_seconds(32)
    assert worst(costs, partition(vgg, stages)) == pytest.approx(bottleneck, abs=1e-9)
    assert worst(costs, lengths) == pytest.approx(bottleneck, abs=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "stages", "bottleneck"),
    [
        (block_partition, 2, 77.4),
        (block_partition, 4, 43.95),
        (block_partition, 8, 31.8),
        (partition_balanced, 2, 77.4),
        (partition_balanced, 4, 39.885),
        (partition_balanced, 8, 22.545),
    ],
)
def test_the_libraries_bottlenecks_are_those_of_the_table(vgg, algorithm, stages, bottleneck):
    """What we claim to be faster than: torchgpipe by 1.10 at 4 stages and 1.41 at 8, DeepSpeed not
    at all on this model.
    """
    costs = vgg.step_seconds(32)
    assert worst(costs, algorithm(costs, stages)) == pytest.approx(bottleneck, abs=1e-9)


@pytest.mark.parametrize("stages", [2, 63, 64, 500, 1000])
@pytest.mark.parametrize("high", [2, 1000])
def test_a_thousand_layers_are_cut_as_well_as_by_bisection(stages, high):
    """Another exact method on a size that no brute force reaches; many equal costs, then few."""
    costs = np.random.default_rng(stages).integers(1, high + 1, 1000).tolist()
    lengths = minimax(costs, stages)
    assert (len(lengths), sum(lengths)) == (stages, 1000)
    assert worst(costs, lengths, None, True) == packed(costs, stages)


@both_ways
def test_one_layer_dearer_than_all_others_is_no_trouble(overlap):
    """No stage is too long to be optimal then: the case that takes the most work."""
    costs = [1] * 400 + [10_000] + [1] * 399
    lengths = minimax(costs, 32, [1] * 799, overlap)
    assert worst(costs, lengths, [1] * 799, overlap) == (10_000 if overlap else 10_002)
    assert 1 in lengths


@both_ways
def test_with_a_thousand_layers_transfers_are_within_sight_of_the_bound(overlap):
    """Transfers dearer than all layers, except every tenth: the cuts must be at the cheap ones."""
    transfer = [0 if layer % 10 == 9 else 1000 for layer in range(999)]
    lengths = minimax([1] * 1000, 20, transfer, overlap)
    assert lengths == [50] * 20


def test_overlapping_transfers_cost_nothing_up_to_the_bottleneck_and_others_do():
    """The difference between the two objectives on one small model."""
    costs, transfer = [4, 4, 4, 4], [1, 8, 1]
    assert minimax(costs, 2, transfer) == [2, 2]
    assert (worst(costs, [2, 2], transfer), worst(costs, [2, 2], transfer, overlap=False)) == (
        8,
        16,
    )
    assert worst(costs, minimax(costs, 2, transfer, overlap=False), transfer, overlap=False) == 13


@pytest.mark.parametrize(("costs", "stages", "lengths"), [
    ([1] * 8 + [20], 3, [4, 4, 1]),
    ([20] + [1] * 9, 4, [1, 3, 3, 3]),
    ([0] * 12, 4, [3, 3, 3, 3]),
    ([0] * 5 + [1] + [0] * 5, 2, [5, 6]),
    ([0.1] * 9, 3, [3, 3, 3]),
    ([1, 1, 1], 2, [1, 2]),
    # The last stage takes 0.8 s, as a difference of prefix sums 0.8000000000000003.
    ([0.3, 0.4, 0.2, 0.6, 0.1, 0.1], 3, [1, 2, 3]),
    # The mirrored cut is as good and has a shorter last stage; its 1.2 s are rounded otherwise.
    ([0.6, 0.6, 0.3, 0.6, 0.6], 3, [1, 2, 2]),
])  # fmt: skip
def test_among_optimal_cuts_the_even_one_is_chosen(costs, stages, lengths):
    """Stages below the bottleneck should have slack, not just be legal; without any costs, even
    counts are the best guess.
    """
    assert minimax(costs, stages) == lengths


def test_costs_at_the_edge_of_floats_are_no_trouble():
    """A bottleneck of the smallest float beside a forbidden transfer once overflowed in the
    tie-break.
    """
    assert minimax([0.0, 5e-324], 1, [0.1], overlap=False) == [2]
    assert minimax([9e306, 1e306], 2, [9e306], overlap=False) == [1, 1]


def test_the_unit_of_the_costs_does_not_matter():
    """Seconds or nanoseconds, denormals or 10^300: powers of two change no digit."""
    costs = np.random.default_rng(5).random(40)
    assert minimax(costs, 6) == minimax(costs * 2.0**-1000, 6) == minimax(costs * 2.0**1000, 6)
    # Even loads come before even counts.
    for unit in (2.0**-40, 1.0, 2.0**40):
        assert minimax(np.array([10, 3, 1, 1, 1]) * unit, 3) == [1, 1, 3]


@pytest.mark.parametrize("overlap", [True, np.False_])
def test_bandwidth_and_latency_make_the_transfers(make_profile, overlap):
    """latency + output bytes x micro-batch / bandwidth, after every layer but the last."""
    forward, output = [3.0, 1, 4, 1, 5, 9, 2, 6], [40.0, 2, 30, 90, 3, 70, 60, 7]
    profile = make_profile(forward, output_bytes=output, sizes=(8, 16))
    options = {"bandwidth_bytes_per_s": 80.0, "latency_s": 0.25, "overlap": overlap}
    for given_size, size in ((None, 16), (16, 16), (8, 8), (4, 4)):
        transfer = [0.25 + size * out / 80 for out in output[:-1]]
        costs = [second * size / 16 for second in forward]
        assert partition(profile, 3, micro_batch=given_size, **options) == minimax(
            costs, 3, transfer, bool(overlap)
        )
    assert partition(profile, 3, **options) != partition(profile, 3)


def test_own_costs_and_transfers_replace_the_measured_ones(make_profile):
    """A planner has its own idea of what a layer costs, with recompute for example."""
    profile = make_profile([1, 1, 1, 1])
    assert partition(profile, 2, costs=[9, 1, 1, 1]) == [1, 3]
    assert partition(profile, 2, transfer=[0, 5, 5]) == [1, 3]
    assert partition(
        profile, 2, costs=np.array([1, 1, 1, 9]), transfer=(5, 5, 0), overlap=False
    ) == [3, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": [1, 2, 3]}, "costs: has 3 entries, but 4 are needed"),
        ({"costs": [1, 2, -3, 4]}, "costs: entry 2 is -3.0"),
        ({"transfer": [1, 2, 3, 4]}, "transfer: has 4 entries, but 3 are needed"),
        ({"transfer": [1, float("nan"), 3]}, "transfer: entry 1 is nan"),
        (
            {"bandwidth_bytes_per_s": "1 GB/s"},
            "bandwidth_bytes_per_s is '1 GB/s'; it must be a plain number above 0",
        ),
        (
            {"bandwidth_bytes_per_s": 0},
            "bandwidth_bytes_per_s is 0; it must be a plain number above 0",
        ),
        (
            {"bandwidth_bytes_per_s": 1, "latency_s": -1},
            "latency_s is -1; it must be a plain number 0 or more",
        ),
        ({"latency_s": 1e-3}, "latency_s is 0.001, but bandwidth_bytes_per_s is not set"),
        (
            {"bandwidth_bytes_per_s": 1, "transfer": [1, 1, 1]},
            "remove bandwidth_bytes_per_s and latency_s",
        ),
        ({"latency_s": 1, "transfer": [1, 1, 1]}, "remove bandwidth_bytes_per_s and latency_s"),
        ({"micro_batch": 0}, "micro_batch is 0; it must be a plain number above 0"),
        ({"overlap": "no"}, "overlap is 'no'; it must be True or False"),
        (
            {"bandwith": 1},
            "bottleneck does not take bandwith: it takes micro_batch, bandwidth_bytes_per_s",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(make_profile, options, message):
    """Each would otherwise be a plausible and wrong cut."""
    with pytest.raises(PartitionError, match=message):
        partition(make_profile([1, 1, 1, 1]), 2, **options)


def test_an_endless_bandwidth_leaves_only_the_latency(make_profile):
    """Links within one process are described so."""
    assert partition(
        make_profile([1, 1, 1, 1]), 2, bandwidth_bytes_per_s=float("inf"), latency_s=7.0
    ) == [2, 2]


def test_of_equal_loads_the_most_even_layer_counts_win():
    """Layers of no cost may stand anywhere: [2, 2] and not [1, 3] or [3, 1]."""
    assert minimax([1, 0, 0, 1], 2) == [2, 2]
    assert minimax([1, 0, 0, 0, 0, 1], 2) == [3, 3]
    assert minimax([1, 0, 0, 1, 0, 0, 1, 0, 0], 3) == [3, 3, 3]


def test_transfers_take_the_latency_and_the_bytes_of_a_micro_batch():
    """At every boundary; the output of the last layer crosses none."""
    layers = tuple(
        LayerProfile(
            f"l{number}", "L", *(Timing((1,), (1.0,)),) * 4, 0, 0, 0, 0.0, 10.0 * (number + 1)
        )
        for number in range(3)
    )
    profile = Profile(layers, "f", 7.0, 1)
    options = {"bandwidth_bytes_per_s": 5.0, "latency_s": 0.25}
    assert transfer_of(profile, 2.0, options) == [0.25 + 4.0, 0.25 + 8.0]
    assert transfer_of(profile, 2.0, {}) is None

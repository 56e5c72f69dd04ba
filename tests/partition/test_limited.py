"""The exact cut under memory limits, for unequal ranks, against every other cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.bottleneck import minimax
from penstock.partition.limited import bytes_per_stage, least_excess, limited

REAL = st.one_of(st.just(0.0), st.sampled_from([0.1, 0.2, 0.3]), st.floats(0, 1), st.floats(0, 1e9))
BYTES = st.integers(0, 9)
NOTHING = [0] * 4


def every_cut(layers, stages):
    """All stage lengths there are."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in zip((0, *cuts), (*cuts, layers), strict=True)]


@st.composite
def chains(draw, cost=REAL):
    """What `limited` takes: up to eight layers, with limits that often bind."""
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, layers))

    def rows(values, count, length):
        return [draw(st.lists(values, min_size=length, max_size=length)) for _ in range(count)]

    limit = st.one_of(st.integers(0, 60), st.just(np.inf))
    return {
        "seconds": rows(cost, draw(st.sampled_from([1, stages])), layers),
        "transfer": draw(
            st.none() | st.just(rows(cost, stages - 1, layers - 1) if stages > 1 else None)
        ),
        "fixed_bytes": rows(BYTES, draw(st.sampled_from([1, stages])), layers),
        "saved_bytes": rows(BYTES, 1, layers)[0],
        "in_flight": draw(
            st.lists(st.sampled_from([0, 1, 2.5, 4]), min_size=stages, max_size=stages)
        ),
        "limits": draw(st.lists(limit, min_size=stages, max_size=stages)),
    }


def needs(case, lengths):
    """Bytes of every stage, layer by layer."""
    stage_bytes, start = [], 0
    for stage, length in enumerate(lengths):
        layers = range(start, start + length)
        holds = case["fixed_bytes"][stage % len(case["fixed_bytes"])]
        stage_bytes.append(
            sum(holds[x] for x in layers)
            + case["in_flight"][stage] * sum(case["saved_bytes"][x] for x in layers)
        )
        start += length
    return stage_bytes


def loads(case, lengths, overlap):
    """Seconds of every stage and link."""
    stages, links, end = [], [], 0
    for stage, length in enumerate(lengths):
        stages.append(sum(case["seconds"][stage % len(case["seconds"])][end : end + length]))
        end += length
        if stage < len(lengths) - 1:
            links.append(case["transfer"][stage][end - 1] if case["transfer"] else 0)
    if overlap:
        return stages + links
    return [load + sum(links[max(s - 1, 0) : s + 1]) for s, load in enumerate(stages)]


def fits(case, lengths):
    return all(
        need <= limit for need, limit in zip(needs(case, lengths), case["limits"], strict=True)
    )


@pytest.mark.parametrize("overlap", [True, False])
@settings(deadline=None, max_examples=150)
@given(case=chains())
def test_no_cut_that_fits_is_better_and_none_is_missed(case, overlap):
    """The planner believes "None" to mean that no cut fits, and else that no other has a faster
    slowest stage or link.
    """
    lengths = limited(*case.values(), overlap=overlap)
    cuts = [
        cut for cut in every_cut(len(case["saved_bytes"]), len(case["limits"])) if fits(case, cut)
    ]
    if lengths is None:
        assert not cuts
        return
    assert lengths in cuts
    least = min(max(loads(case, cut, overlap)) for cut in cuts)
    # Sums of layers are differences of prefix sums, which round at the size of the total.
    rounding = 1e-14 * sum(map(sum, case["seconds"]))
    assert max(loads(case, lengths, overlap)) <= least * (1 + 1e-11) + rounding


@pytest.mark.parametrize("overlap", [True, False])
@settings(deadline=None, max_examples=100)
@given(case=chains(st.integers(0, 5)))
def test_among_equals_the_rest_has_the_most_slack(case, overlap):
    """Whole numbers, so that ties are common and sums exact: the sum of squares decides, and counts
    of layers after that.
    """
    lengths = limited(*case.values(), overlap=overlap)
    if lengths is None:
        return
    cuts = [
        cut for cut in every_cut(len(case["saved_bytes"]), len(case["limits"])) if fits(case, cut)
    ]
    best = min(
        (max(loads(case, cut, overlap)), sum(load**2 for load in loads(case, cut, overlap)))
        for cut in cuts
    )
    assert max(loads(case, lengths, overlap)) == best[0]
    assert (
        sum(load**2 for load in loads(case, lengths, overlap))
        <= best[1] + 2e-8 * max(best[0], 1) ** 2
    )


@settings(deadline=None, max_examples=100)
@given(case=chains())
def test_least_excess_is_the_least_that_must_be_added_to_the_fullest_rank(case):
    """When nothing fits, the message names this cut: no other is content with fewer bytes more."""

    def excess(cut):
        return max(
            need - limit for need, limit in zip(needs(case, cut), case["limits"], strict=True)
        )

    lengths = least_excess(
        case["fixed_bytes"], case["saved_bytes"], case["in_flight"], case["limits"]
    )
    assert excess(lengths) == min(
        excess(cut) for cut in every_cut(len(case["saved_bytes"]), len(case["limits"]))
    )
    assert bytes_per_stage(
        lengths, case["fixed_bytes"], case["saved_bytes"], case["in_flight"]
    ) == needs(case, lengths)


@pytest.mark.parametrize("overlap", [True, False])
@settings(deadline=None, max_examples=100)
@given(costs=st.lists(REAL, min_size=2, max_size=9), data=st.data())
def test_without_limits_and_for_like_ranks_it_is_minimax(costs, overlap, data):
    """One engine for both would have been simpler to trust; two that agree are as good."""
    stages = data.draw(st.integers(1, len(costs)))
    transfer = data.draw(
        st.none() | st.lists(REAL, min_size=len(costs) - 1, max_size=len(costs) - 1)
    )
    nothing = [0] * len(costs)
    lengths = limited(
        costs, transfer, nothing, nothing, [1] * stages, [np.inf] * stages, overlap=overlap
    )
    assert lengths == minimax(costs, stages, transfer, overlap)


def test_a_thousand_layers_on_64_unlike_ranks_are_as_good_as_by_bisection():
    """Beyond brute force: whole costs, and a greedy packing that is exact because each rank takes
    all that it can.
    """
    rng = np.random.default_rng(3)
    costs, speed, bytes_ = (
        rng.integers(1, 100, 1000),
        rng.integers(1, 4, 64),
        rng.integers(1, 100, 1000),
    )
    limits = rng.integers(800, 1600, 64)

    def packs(bound):
        at = 0
        for stage in range(64):
            load = need = 0
            last = 1000 - (63 - stage)
            while (
                at < last
                and load + costs[at] * speed[stage] <= bound
                and need + bytes_[at] <= limits[stage]
            ):
                load, need, at = load + costs[at] * speed[stage], need + bytes_[at], at + 1
        return at == 1000

    low, high = 0, 10**6
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if packs(middle) else (middle + 1, high)
    seconds = costs * speed[:, None]
    lengths = limited(seconds, None, bytes_, [0] * 1000, [1] * 64, limits)
    edges = np.cumsum([0, *lengths])
    assert max(seconds[s, a:b].sum() for s, (a, b) in enumerate(pairwise(edges))) == low
    assert (np.array(bytes_per_stage(lengths, bytes_, [0] * 1000, [1] * 64)) <= limits).all()


def test_the_first_rank_of_1f1b_takes_fewer_layers_where_activations_bind():
    """It has the most micro-batches in flight: the even cut would overflow it first."""
    lengths = limited([1] * 8, None, [0] * 8, [1] * 8, in_flight=[4, 3, 2, 1], limits=[5, 6, 6, 6])
    assert lengths == [1, 2, 2, 3]


@pytest.mark.parametrize("seed", range(30))
def test_limits_in_fractions_of_bytes_are_kept_exactly(seed):
    """A cut that needs just its limits fits, and none fits that needs a rounding error more."""
    rng = np.random.default_rng(seed)
    layer_bytes = rng.choice([0.1, 0.2, 0.3, 0.7, 1.1], 8)
    ends = np.sort(rng.choice(np.arange(1, 8), 2, replace=False)).tolist()
    cut = np.diff([0, *ends, 8]).tolist()
    limits = np.array(bytes_per_stage(cut, layer_bytes, [0] * 8, [1] * 3))
    assert limited([1] * 8, None, layer_bytes, [0] * 8, [1] * 3, limits) is not None
    less = np.nextafter(limits, 0.0)
    lengths = limited([1] * 8, None, layer_bytes, [0] * 8, [1] * 3, less)
    if lengths is not None:
        assert (bytes_per_stage(lengths, layer_bytes, [0] * 8, [1] * 3) <= less).all()


def test_transfers_overlap_the_computation_unless_they_may_not():
    """A link of 8 s between two stages of 8 s is hidden; without overlap each stage takes 16 s."""
    numbers = [4] * 4, [1, 8, 1], NOTHING, NOTHING, [1, 1], [9, 9]
    assert limited(*numbers) == [2, 2]
    assert limited(*numbers, overlap=False) != [2, 2]
    # 10.5 s without a link are less than 10 s and a link of 5 s.
    numbers = [10, 0.5, 0.5], [5, 0], NOTHING[:3], NOTHING[:3], [1, 1], [9, 9]
    assert limited(*numbers) == [1, 2]
    assert limited(*numbers, overlap=False) == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": [1, 2, 3]}, "cannot make 4 stages from 3 layers"),
        ({"seconds": [1] * 5}, "fixed_bytes and saved_bytes have 4 layers, but seconds has 5"),
        ({"seconds": 3.0}, r"seconds: has the shape \(\); it must be one number per layer"),
        ({"limits": []}, "cannot make 0 stages from 4 layers"),
        ({"limits": [1, float("nan")]}, "limits: .* must be one number of bytes for each stage"),
        ({"limits": ["1 GiB", 9]}, "limits: .* must be one number of bytes for each stage"),
        ({"limits": [[9, 9]]}, "limits: .* must be one number of bytes for each stage"),
        (
            {"seconds": [[1] * 4] * 3, "limits": [9, 9]},
            r"seconds: has the shape \(3, 4\); it must be \(4,\) or \(2, 4\)",
        ),
        ({"seconds": [[1] * 4, [1, -2, 1, 1]], "limits": [9, 9]}, r"seconds\[1\]: entry 1 is -2.0"),
        ({"seconds": [[1, 1], [1]], "limits": [9, 9]}, "seconds: must be a list of numbers"),
        ({"transfer": [1, 1]}, "transfer: has 2 entries, but 3 are needed"),
        ({"saved_bytes": [1, 1]}, "saved_bytes: has 2 entries, but 4 are needed"),
        ({"fixed_bytes": [1, 1, 1, float("inf")]}, "fixed_bytes: entry 3 is inf"),
        (
            {"fixed_bytes": [1] * 5, "saved_bytes": [1] * 5},
            "fixed_bytes and saved_bytes have 5 layers, but seconds has 4",
        ),
        ({"overlap": 1}, "overlap is 1; it must be True or False"),
        ({"in_flight": [1, 1]}, "in_flight: has 2 entries, but 4 are needed"),
        ({"overlap": "no"}, "overlap is 'no'; it must be True or False"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(change, message):
    """NumPy would stretch some of them over the others in silence."""
    case = {
        "seconds": [1] * 4,
        "transfer": None,
        "fixed_bytes": NOTHING,
        "saved_bytes": NOTHING,
        "in_flight": [1] * 4,
        "limits": [9] * 4,
    }
    with pytest.raises(PartitionError, match=message):
        limited(**case | change)


def test_lengths_for_other_layers_have_no_bytes():
    """A cut from elsewhere may be for another model."""
    with pytest.raises(PartitionError, match=r"\[2, 1\] sums to 3, but the model has 4 layers"):
        bytes_per_stage([2, 1], NOTHING, NOTHING, [1, 1])


def test_a_rank_with_a_limit_below_0_holds_no_layer():
    """As one whose fixed memory exceeds what it has."""
    for limits in ([-1, 9], [9, -1]):
        assert limited([1] * 4, None, [1] * 4, NOTHING, [1, 1], limits) is None
    assert least_excess([1] * 4, NOTHING, [1, 1], [-1, 9]) == [1, 3]


def test_a_sum_that_is_rounded_to_more_than_the_limit_exceeds_it():
    """1.6 - 1.0 is above 0.6 in floating point, as `bytes_per_stage` reports."""
    layer_bytes, limits = [1.0, 0.6], [1.0, 0.6]
    assert bytes_per_stage([1, 1], layer_bytes, [0, 0], [1, 1])[1] > limits[1]
    assert limited([1, 1], None, layer_bytes, [0, 0], [1, 1], limits) is None


@pytest.mark.parametrize("overlap", [True, False])
def test_links_unlike_in_front_of_and_behind_a_stage_are_both_counted(overlap):
    """Whole numbers with links that are often the busiest, and limits that a random cut just keeps."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        layers, stages = 7, int(rng.integers(1, 5))
        case = {
            "seconds": rng.integers(0, 9, (stages, layers)).tolist(),
            "transfer": rng.integers(0, 20, (stages - 1, layers - 1)).tolist() or None,
            "fixed_bytes": rng.integers(0, 9, (stages, layers)).tolist(),
            "saved_bytes": rng.integers(0, 9, layers).tolist(),
            "in_flight": rng.integers(0, 4, stages).tolist(),
        }
        cuts = list(every_cut(layers, stages))
        margins = rng.integers(0, 9, stages)
        case["limits"] = np.add(needs(case, cuts[rng.integers(len(cuts))]), margins).tolist()
        lengths = limited(*case.values(), overlap=overlap)
        busiest = {tuple(cut): max(loads(case, cut, overlap)) for cut in cuts if fits(case, cut)}
        assert busiest[tuple(lengths)] == min(busiest.values())

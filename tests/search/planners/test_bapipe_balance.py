"""BaPipe's partitions against enumeration."""

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.search.planners.bapipe_balance import (
    balanced_lengths,
    coarse_boundaries,
    fractional_cut,
    tune_memory,
)

amounts = st.floats(0.01, 10)
rows = st.integers(1, 7).flatmap(
    lambda n: st.lists(st.lists(amounts, min_size=n, max_size=n), min_size=1, max_size=min(n, 4))
)  # by accelerator, then by layer


def all_lengths(layers, stages):
    """Every cut into whole layers."""
    return [
        tuple(b - a for a, b in pairwise((0, *cuts, layers)))
        for cuts in combinations(range(1, layers), stages - 1)
    ]


def stage_seconds(seconds, lengths):
    """What each stage takes on its accelerator."""
    ends = list(accumulate(lengths, initial=0))
    return [
        sum(row[start:stop]) for row, (start, stop) in zip(seconds, pairwise(ends), strict=True)
    ]


@settings(max_examples=100, deadline=None)
@given(rows)
def test_between_whole_layers_the_slowest_stage_is_as_fast_as_can_be(seconds):
    """On accelerators alike or not, in the given order."""
    lengths = balanced_lengths(seconds)
    every = all_lengths(len(seconds[0]), len(seconds))
    assert max(stage_seconds(seconds, lengths)) == pytest.approx(
        min(max(stage_seconds(seconds, cut)) for cut in every)
    )


@settings(max_examples=100, deadline=None)
@given(rows, st.data())
def test_with_fewer_boundaries_only_those_are_cut(seconds, data):
    """Coarse-grained: layers between two boundaries that may be cut stay together."""
    layers = len(seconds[0])
    allowed = data.draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    every = [
        lengths
        for lengths in all_lengths(layers, len(seconds))
        if all(allowed[end - 1] for end in list(accumulate(lengths))[:-1])
    ]
    if not every:
        with pytest.raises(PlanError, match="places to cut"):
            balanced_lengths(seconds, allowed)
        return
    lengths = balanced_lengths(seconds, allowed)
    assert lengths in every
    assert max(stage_seconds(seconds, lengths)) == pytest.approx(
        min(max(stage_seconds(seconds, cut)) for cut in every)
    )


@settings(max_examples=100, deadline=None)
@given(rows)
def test_through_layers_all_accelerators_are_busy_equally_long_and_none_longer_than_with_whole_layers(
    seconds,
):
    """Intra-layer: the parts of all layers add up, each accelerator takes the same time."""
    stage_s, ends = fractional_cut(seconds)
    layers = len(seconds[0])
    assert ends[-1] == layers
    assert list(ends) == sorted(ends)
    for row, start, stop in zip(seconds, (0.0, *ends), ends, strict=False):
        work = sum(row[i] * max(0.0, min(i + 1, stop) - max(i, start)) for i in range(layers))
        assert work == pytest.approx(stage_s, rel=1e-6)
    assert stage_s <= max(stage_seconds(seconds, balanced_lengths(seconds))) * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(amounts, min_size=1, max_size=6), st.lists(st.floats(0.2, 5), min_size=1, max_size=4)
)
def test_where_accelerators_differ_by_a_factor_the_ideal_is_reached_by_splitting_layers(
    layers, factors
):
    """T* = 1 / sum(1 / T^n)."""
    seconds = [[factor * layer for layer in layers] for factor in factors]
    assert fractional_cut(seconds)[0] == pytest.approx(
        1 / sum(1 / sum(row) for row in seconds), rel=1e-6
    )


def test_boundaries_are_those_that_the_link_carries_within_a_stages_time():
    """And if they are too few, the quickest there are."""
    assert coarse_boundaries([1.0, 5.0, 2.0, 9.0], 2.5, cuts=2) == [True, False, True, False]
    assert coarse_boundaries([1.0, 5.0, 2.0, 9.0], 0.5, cuts=2) == [True, False, True, False]
    assert coarse_boundaries([], 1.0, cuts=0) == []


def test_a_full_stage_hands_layers_to_neighbours_with_room():
    """Memory before balance: 5 layers of 1 byte fit nowhere, 3 and 3 do."""

    def excess(lengths):
        return [max(0, length - limit) for length, limit in zip(lengths, (3, 9), strict=True)]

    assert tune_memory((5, 1), excess) == (3, 3)


def test_a_layer_goes_past_a_neighbour_that_is_full_itself():
    """The stages between pass on a layer each: stage 1 holds as many as before."""

    def excess(lengths):
        return [max(0, length - limit) for length, limit in zip(lengths, (2, 2, 9), strict=True)]

    assert tune_memory((4, 2, 1), excess) == (2, 2, 3)


def test_what_cannot_fit_stays_as_it_is():
    """No stage has room: nothing is gained by moving."""
    assert tune_memory((2, 2), lambda lengths: [float(length) for length in lengths]) == (2, 2)

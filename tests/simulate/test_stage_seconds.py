"""Seconds of stages: sums over their layers, and the sizes of micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import cuts, profiles

from penstock.profile.profile import PHASES
from penstock.schedule.catalogue import schedule
from penstock.schedule.slicing import Slicing
from penstock.simulate.stage_seconds import (
    largest_part,
    micro_batch_sizes,
    parts_of,
    prefix_seconds,
    stage_seconds,
    update_seconds,
)


@settings(max_examples=20)
@given(
    st.data(), profiles(4, 7, simple=False), st.integers(1, 4), st.sampled_from([1, 2.5, 16, 40])
)
def test_a_stage_takes_the_seconds_of_its_layers_and_the_first_needs_no_input_gradient(
    data, profile, stages, samples
):
    """Prefix sums give the same; cached for each size."""
    lengths = data.draw(cuts(len(profile), stages))
    seconds = stage_seconds(profile, lengths, samples)
    start = 0
    for stage, length in enumerate(lengths):
        layers = profile.layers[start : start + length]
        assert list(range(len(profile)))[parts_of(lengths)[stage]] == list(
            range(start, start + length)
        )
        for row, phase in enumerate(PHASES):
            total = sum(layer.seconds(phase, samples) for layer in layers)
            for size in (samples, 3, samples):
                prefix = prefix_seconds(profile, size)
                by_layer = sum(layer.seconds(phase, size) for layer in layers)
                assert prefix[row, start + length] - prefix[row, start] == pytest.approx(by_layer)
            if stage == 0 and phase == "input_grad":
                total = 0.0
            if stage == 0 and phase == "weight_grad":
                total = sum(layer.seconds("backward", samples) for layer in layers)
            assert seconds[phase][stage] == pytest.approx(total)
        start += length
    paced = replace(profile, update_fixed_s=0.5)
    for part, update_s in zip(parts_of(lengths), update_seconds(paced, lengths), strict=True):
        bytes_ = sum(layer.parameter_bytes for layer in profile.layers[part])
        expected = 0.5 + bytes_ * profile.update_s_per_byte if bytes_ else 0.0
        assert update_s == pytest.approx(expected)


@given(st.integers(1, 60), st.integers(1, 9))
def test_sizes_are_those_of_cards_that_are_dealt_out(batch, count):
    """They add up to the batch, and the largest is what memory has to hold."""
    sizes = micro_batch_sizes(batch, schedule("gpipe", 2, 4), count)
    if batch < count:
        assert sizes == [batch / count] * count
        return
    hands = [0] * count
    for card in range(batch):
        hands[card % count] += 1
    assert sizes == hands
    assert largest_part(batch / count, count) == max(hands)


def test_sizes_count_as_equal_in_slices_of_samples_and_in_streams_and_for_parts_of_samples():
    """The schedule's own number of micro-batches counts unless another is given."""
    plain = schedule("gpipe", 2, 4)
    assert micro_batch_sizes(10, plain) == [3.0, 3.0, 2.0, 2.0]
    assert micro_batch_sizes(10.5, plain) == [10.5 / 4] * 4
    assert micro_batch_sizes(10, schedule("pipedream", 2, 4)) == [2.5] * 4
    cut = replace(plain, slicing=Slicing.even("samples", 1, 4))
    assert micro_batch_sizes(10, cut) == [2.5] * 4
    cut = replace(plain, slicing=Slicing.even("tokens", 1, 4))
    assert micro_batch_sizes(10, cut) == [3.0, 3.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("batch", "count", "largest"),
    [(1665, 13, 129), (29, 7, 5), (12, 4, 3), (13, 4, 4), (2.4, 1, 2.4), (10.5, 4, 3)],
)
def test_the_largest_part_is_a_whole_number_where_the_batch_is(batch, count, largest):
    """The mean times the number of parts may be a little less, or more, than the batch."""
    assert largest_part(batch / count, count) == largest


@given(profiles(2, 4))
@settings(max_examples=5)
def test_a_model_of_no_stage_has_no_seconds(profile):
    """There is no first stage then whose input gradient is left out."""
    assert parts_of([]) == []
    assert stage_seconds(profile, [], 3) == {phase: [] for phase in PHASES}
    assert update_seconds(profile, []) == []
    assert prefix_seconds(profile, 3)[:, 0].tolist() == [0.0] * len(PHASES)

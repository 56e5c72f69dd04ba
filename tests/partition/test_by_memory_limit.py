"""`limited` from a profile: the bytes that it counts, and its error when no cut fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition.conftest import build_profile

from penstock.errors import PartitionError
from penstock.partition.bottleneck import bottleneck
from penstock.partition.by_memory_limit import by_limit
from penstock.partition.catalogue import partition
from penstock.partition.limited import bytes_per_stage, least_excess, limited
from penstock.units import format_bytes


def test_without_a_limit_it_is_the_exact_cut(make_profile):
    """One name for both: a planner sets the limit or does not."""
    profile = make_profile([3, 1, 4, 1, 5, 9, 2, 6])
    for stages in range(1, 9):
        assert partition(profile, stages, "limited") == partition(profile, stages)


@pytest.mark.parametrize("states", [0, 1, 2])
def test_weights_gradients_optimizer_and_activations_are_counted(make_profile, states):
    """4 bytes per parameter, (2 + states) times, and the activations of as many micro-batches as
    1F1B has in flight.
    """
    profile = make_profile(
        [1.0] * 8, parameters=[10, 1, 1, 1, 1, 1, 1, 10], output_bytes=[3.0] * 8, sizes=(4,)
    )
    holds = [4 * (2 + states) * count for count in (10, 1, 1, 1, 1, 1, 1, 10)]
    numbers = holds, [12.0] * 8, [3.0, 2.0, 1.0]
    for limit in range(60, 400, 5):
        expected = limited([1.0] * 8, None, *numbers, [limit] * 3)
        if expected is None:
            with pytest.raises(PartitionError, match="no cut into 3 stages fits"):
                partition(profile, 3, "limited", memory_limit=limit, optimizer_states=states)
            continue
        assert (
            partition(profile, 3, "limited", memory_limit=limit, optimizer_states=states)
            == expected
        )
        assert max(bytes_per_stage(expected, *numbers)) <= limit


def test_in_flight_links_and_limits_can_be_given(make_profile):
    """Another schedule has other peaks, and another cluster other ranks."""
    profile = make_profile([1.0] * 4, output_bytes=[8.0, 8, 8, 8], sizes=(1,))
    assert partition(profile, 2, "limited", in_flight=[1, 1]) == [2, 2]
    assert partition(profile, 2, "limited", in_flight=[4, 1], memory_limit=[50, 100]) == [1, 3]
    assert partition(profile, 2, "limited", in_flight=[1, 4], memory_limit=[100, 60]) == [3, 1]
    slow = make_profile([1.0] * 4, output_bytes=[1.0, 80, 8, 8], sizes=(1,))
    assert partition(slow, 2, "limited", bandwidth_bytes_per_s=8.0) == [1, 3]


def test_where_nothing_fits_the_nearest_cut_and_its_fullest_stage_are_named(make_profile):
    """How much is lacking, and where, is what the next attempt needs to know."""
    profile = make_profile([1.0] * 4, parameters=[1, 1, 1, 256], output_bytes=[0.0] * 4)
    message = r"no cut into 2 stages fits: in the nearest one, \[3, 1\], stage 1 needs 3\.0 KiB and has 1\.0 KiB\. Use more stages"
    with pytest.raises(PartitionError, match=message):
        partition(profile, 2, "limited", memory_limit=1024)


@pytest.mark.parametrize("method", [bottleneck, by_limit])
def test_a_method_that_is_called_directly_refuses_unknown_options_too(make_profile, method):
    """Planners call it without the catalogue; a misspelt limit would be no limit."""
    with pytest.raises(PartitionError, match="does not take limit: it takes m"):
        method(make_profile([1.0] * 4), 2, limit=9)


def test_limits_may_be_an_array(make_profile):
    """Limits that a program computes are one, often of NumPy's own numbers."""
    profile = make_profile([1.0] * 4, output_bytes=[8.0, 8, 8, 8], sizes=(1,))
    options = {"in_flight": [4, 1], "memory_limit": np.array([50, 100])}
    assert partition(profile, 2, "limited", **options) == [1, 3]
    with pytest.raises(PartitionError, match="memory_limit has 3 entries, but 2 stages"):
        partition(profile, 2, "limited", memory_limit=np.ones(3))


@pytest.mark.parametrize("by", ["bottleneck", "limited"])
def test_transfers_overlap_the_computation_unless_they_may_not(make_profile, by):
    """A link of 8 s between two stages of 8 s is hidden; without overlap each stage takes 16 s."""
    profile = make_profile([4.0] * 4, output_bytes=[1.0, 8, 1, 1], sizes=(1,))
    links = {"bandwidth_bytes_per_s": 1.0}
    assert partition(profile, 2, by, **links) == [2, 2]
    assert partition(profile, 2, by, overlap=False, **links) != [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 0}, "memory_limit is 0; it must be a plain number above 0"),
        ({"memory_limit": "1 GiB"}, "memory_limit is '1 GiB'; it must be a plain number above 0"),
        ({"memory_limit": [1, "1 GiB"]}, "memory_limit is '1 GiB'; it must be a plain number"),
        ({"memory_limit": [1, 2, 3]}, "memory_limit has 3 entries, but 2 stages"),
        ({"in_flight": [1]}, "in_flight: has 1 entries, but 2 are needed"),
        ({"optimizer_states": -1}, "optimizer_states is -1; it must be a plain number 0 or more"),
        ({"latency_s": 1.0}, "latency_s is 1.0, but bandwidth_bytes_per_s is not set"),
        ({"overlap": 1}, "overlap is 1; it must be True or False"),
    ],
)
def test_options_that_make_no_sense_are_refused(make_profile, options, message):
    """Each would otherwise be a plausible and wrong cut."""
    with pytest.raises(PartitionError, match=message):
        partition(make_profile([1, 1, 1, 1]), 2, "limited", **options)


def test_the_stage_above_its_limit_is_named_not_the_one_with_the_most_bytes(make_profile):
    """Limits may differ: a full stage that fits is no problem."""
    profile = make_profile([1.0] * 4, parameters=[512, 64, 64, 64], output_bytes=[0.0] * 4)
    with pytest.raises(PartitionError, match=r"stage 1 needs 768 B and has 500 B"):
        partition(profile, 2, "limited", memory_limit=[8000, 500])


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 4))
def test_a_profile_and_its_options_are_the_numbers_of_the_search(rng, stages):
    """Weights, gradients, states and buffers once, activations for each sample in flight, links
    after every layer but the last; all numbers unlike.
    """
    layers = rng.randint(stages, 7)
    profile = build_profile(
        [rng.randint(1, 9) for _ in range(layers)],
        [rng.randint(1, 9) for _ in range(layers)],
        parameters=[rng.randint(1, 9) for _ in range(layers)],
        sizes=(1, 8),
    )
    rows = []
    for layer in profile:
        sizes = {
            "buffer_bytes": rng.randint(0, 40),
            "activation_bytes_per_sample": float(rng.randint(0, 9)),
            "output_bytes_per_sample": float(rng.randint(0, 9)),
        }
        rows.append(replace(layer, **sizes))
    profile = replace(profile, layers=tuple(rows))
    options = {"memory_limit": [float(rng.randint(100, 500)) for _ in range(stages)]}
    in_flight = [float(stages - stage) for stage in range(stages)]
    if rng.random() < 0.5:
        options["in_flight"] = in_flight = [float(rng.randint(0, 3)) for _ in range(stages)]
    samples = rng.choice([None, 1.0, 3.0])
    if samples is not None:
        options["micro_batch"] = samples
    samples = samples or 8.0
    states = rng.choice([0, 1, 2])
    if states != 1:
        options["optimizer_states"] = states
    transfer = None
    if rng.random() < 0.7:
        options |= {"bandwidth_bytes_per_s": 2.0, "latency_s": rng.choice([0.0, 0.5])}
        transfer = [
            options["latency_s"] + samples * layer.output_bytes_per_sample / 2.0
            for layer in rows[:-1]
        ]
    options["overlap"] = rng.random() < 0.5
    numbers = (
        [layer.parameter_bytes * (2 + states) + layer.buffer_bytes for layer in rows],
        [samples * layer.activation_bytes_per_sample for layer in rows],
        in_flight,
    )
    seconds = [
        layer.seconds("forward", samples) + layer.seconds("backward", samples) for layer in rows
    ]
    limits = options["memory_limit"]
    expected = limited(seconds, transfer, *numbers, limits, overlap=options["overlap"])
    if expected is not None:
        assert partition(profile, stages, "limited", **options) == expected
        return
    nearest = least_excess(*numbers, limits)
    required = bytes_per_stage(nearest, *numbers)
    excess = [need - limit for need, limit in zip(required, limits, strict=True)]
    worst = excess.index(max(excess))
    with pytest.raises(PartitionError) as caught:
        partition(profile, stages, "limited", **options)
    assert str(caught.value) == (
        f"no cut into {stages} stages fits: in the nearest one, {nearest}, stage {worst} needs "
        f"{format_bytes(required[worst])} and has {format_bytes(limits[worst])}. Use more stages, "
        "a smaller micro-batch or fewer micro-batches in flight"
    )

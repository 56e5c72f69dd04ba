"""PipeDream-2BW's planner against its cost functions."""

from itertools import accumulate, pairwise

import pytest

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.catalogue import plan
from penstock.search.planners.two_bw import shapes
from penstock.search.request import PlanRequest


def cluster_of(ranks, per_node=1, memory=10**12, names=("d",)):
    """Devices of these kinds in turn."""
    devices = tuple(
        Device(names[rank % len(names)], memory, flops=(("float32", 1e12),))
        for rank in range(ranks)
    )
    return Cluster("c", devices, per_node, Link(1e-5, 1e7), Link(1e-4, 1e6))


def held(profile, shape):
    """2 |W| / d + |A| + d |A_in|, with |A| / d for |A| where it recomputes; |W| with gradients and
    momenta; the fullest stage's.
    """
    ends = list(accumulate(shape.lengths, initial=0))
    parts = [profile.layers[a:b] for a, b in pairwise(ends)]
    weights = max(sum(layer.parameter_bytes for layer in part) for part in parts)
    activations = max(
        shape.micro_batch * sum(layer.activation_bytes_per_sample for layer in part)
        for part in parts
    )
    inputs = max(
        (shape.micro_batch * part[-1].output_bytes_per_sample for part in parts[:-1]), default=0.0
    )
    return (
        4 * weights + (1 if shape.recompute else shape.depth) * activations + shape.depth * inputs
    )


def taken(profile, cluster, shape):
    """max over stages of max(computing and sending, adding up gradients / m)."""
    ends = list(accumulate(shape.lengths, initial=0))
    times = []
    for stage, (start, stop) in enumerate(pairwise(ends)):
        layers = profile.layers[start:stop]
        stage_s = sum(
            layer.seconds("forward", shape.micro_batch)
            + layer.seconds("backward", shape.micro_batch)
            for layer in layers
        )
        stage_s *= 4 / 3 if shape.recompute else 1
        ranks = [pipeline * shape.depth + stage for pipeline in range(shape.width)]
        if stage + 1 < shape.depth:
            crossing = shape.micro_batch * layers[-1].output_bytes_per_sample
            stage_s += 2 * max(cluster.transfer_seconds(crossing, rank, rank + 1) for rank in ranks)
        piece = sum(layer.parameter_bytes for layer in layers) / shape.width
        ring = [
            cluster.transfer_seconds(piece, *pair)
            for pair in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        ]
        shared = 2 * (shape.width - 1) * max(ring) if shape.width > 1 else 0.0
        times.append(max(stage_s, shared / shape.micro_batches))
    return max(times)


@pytest.fixture
def profile(profile_of):
    """Eight equal blocks."""
    return profile_of(
        [1e-3] * 8, fixed=1e-4, activation=100.0, output=20.0, parameters=3000, batch=64
    )


@pytest.mark.parametrize("memory", [10**12, 60_000, 30_000])
def test_time_and_memory_are_the_papers_cost_functions(profile, memory):
    """Section 3.3, written out once more."""
    cluster = cluster_of(8, per_node=4, memory=memory)
    candidates = list(shapes(PlanRequest(profile, cluster, 128)))
    assert {shape.width * shape.depth for shape in candidates} == {8}
    for shape in candidates:
        assert shape.seconds == pytest.approx(taken(profile, cluster, shape))
        assert shape.bytes == pytest.approx(held(profile, shape))
        assert shape.bytes <= memory
        assert shape.micro_batches >= shape.depth


def test_the_micro_batch_is_the_largest_power_of_two_that_fits(profile):
    """Twice of it holds too much, or leaves fewer micro-batches than stages."""
    cluster = cluster_of(8, memory=60_000)
    for shape in shapes(PlanRequest(profile, cluster, 128)):
        twice = 2 * shape.micro_batch
        grown = held(profile, shape) + (held(profile, shape) - 4 * max(shape.lengths) * 3000)
        assert grown > 60_000 or -(-128 // (shape.width * twice)) < shape.depth
        assert shape.micro_batch & (shape.micro_batch - 1) == 0


def test_the_plan_is_one_of_the_shapes_with_its_objective(profile):
    """The value is t times the micro-batches of a pipeline."""
    chosen_plan = plan(profile, cluster_of(8, per_node=4), 128, planner="2bw")
    values = [
        shape.step_s for shape in shapes(PlanRequest(profile, cluster_of(8, per_node=4), 128))
    ]
    assert chosen_plan.objective.value in values
    assert (chosen_plan.schedule_name, chosen_plan.weights) == ("1f1b", "flush")


def test_with_asynchrony_two_versions_of_the_weights_are_kept(profile):
    """Its own schedule and rule; every pipeline has as many micro-batches as stages."""
    chosen_plan = plan(profile, cluster_of(8), 128, planner="2bw", asynchronous=True)
    assert (chosen_plan.schedule_name, chosen_plan.weights) == ("2bw", "double-buffer")


def test_recomputing_is_chosen_where_only_that_fits(profile):
    """c_extra = 4/3 of the computing buys |A| / d instead of |A|."""
    chosen_plan = plan(profile, cluster_of(8, memory=24_500), 64, planner="2bw", stages=4)
    roomy = plan(profile, cluster_of(8), 64, planner="2bw", stages=4)
    assert (roomy.recompute, chosen_plan.recompute) == ("never", "always")


def test_devices_of_different_kinds_and_depths_that_do_not_divide_are_refused(profile):
    """w d must be all devices, and they equal."""
    with pytest.raises(PlanError, match="2bw takes all devices for equal"):
        plan(profile, cluster_of(4, names=("d", "e")), 64, planner="2bw")
    with pytest.raises(PlanError, match="2bw finds no width and depth in 3 stages for 8 devices"):
        plan(profile, cluster_of(8), 64, planner="2bw", stages=3)

"""Data parallelism as a plan."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.catalogue import plan


def cluster_of(ranks, memory=10**12, speeds=(1.0,), latency=1e-4):
    """Devices of these speeds in turn, one on each node."""
    devices = tuple(
        Device(
            f"d{speeds[rank % len(speeds)]:g}",
            memory,
            flops=(("float32", 1e12 * speeds[rank % len(speeds)]),),
        )
        for rank in range(ranks)
    )
    link = Link(latency, 1e6)
    return Cluster("c", devices, 1, link, link)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=4), st.integers(3, 6), st.integers(1, 4)
)
def test_the_objective_is_the_ring_formula_and_what_simulation_says(
    profile_of, seconds, ranks, samples
):
    """Every device's share, then 2 (R - 1) pieces round the ring: the formula is exact for equal
    shares.
    """
    chosen_plan = plan(
        profile_of(seconds), cluster_of(ranks), ranks * samples, planner="data-parallel"
    )
    computing = sum(3 * samples * second for second in seconds)
    ring = 2 * (ranks - 1) * (1e-4 + 1000 * len(seconds) / ranks / 1e6)
    assert chosen_plan.objective.value == pytest.approx(computing + ring)
    assert chosen_plan.predicted.step_s == pytest.approx(computing + ring)
    assert (chosen_plan.stages, chosen_plan.micro_batches) == (1, ranks)


def test_gradients_are_accumulated_over_as_few_parts_as_fit(profile_of):
    """A share of 16 samples does not fit, 8 samples do: two parts, not four."""
    profile = profile_of([1e-3], activation=1000.0, parameters=10)
    chosen_plan = plan(
        profile, cluster_of(2, memory=8_500), 32, planner="data-parallel", recompute="never"
    )
    assert chosen_plan.micro_batches == 2 * 2


def test_devices_of_different_speed_wait_for_the_slowest(profile_of):
    """Shares are equal, so the slow one's time counts."""
    fast = plan(profile_of([1e-3]), cluster_of(4), 16, planner="data-parallel")
    mixed = plan(profile_of([1e-3]), cluster_of(4, speeds=(1.0, 0.5)), 16, planner="data-parallel")
    assert mixed.objective.value - fast.objective.value == pytest.approx(4 * 3e-3)


def test_a_batch_with_fewer_samples_than_devices_leaves_some_idle(profile_of):
    """Each needs a sample."""
    chosen_plan = plan(profile_of([1e-3]), cluster_of(4), 3, planner="data-parallel")
    assert chosen_plan.ranks == 3


def test_what_does_not_fit_in_the_smallest_parts_is_refused_with_what_it_needs(profile_of):
    """All weights stand on every device: no number of parts helps that."""
    with pytest.raises(PlanError, match="nothing fits the memory of c"):
        plan(
            profile_of([1e-3] * 4, parameters=1000),
            cluster_of(2, memory=8_000),
            8,
            planner="data-parallel",
        )


def test_several_stages_are_refused(profile_of):
    """It has one."""
    with pytest.raises(PlanError, match="data-parallel has one stage, and 2 are requested"):
        plan(profile_of([1e-3] * 4), cluster_of(2), 8, planner="data-parallel", stages=2)

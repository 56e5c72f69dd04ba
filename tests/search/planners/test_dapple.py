"""DAPPLE's planner."""

from itertools import accumulate

import pytest
from tests.search.planners.dapple_latency import latency

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.catalogue import plan
from penstock.search.planners.dapple import warm_up_of_policy_b


def cluster_of(ranks, per_node=1, inside=1e7, between=1e6, memory=10**12, names=("d",)):
    """Devices of these kinds in turn."""
    devices = tuple(
        Device(names[rank % len(names)], memory, flops=(("float32", 1e12),))
        for rank in range(ranks)
    )
    return Cluster("c", devices, per_node, Link(0.0, inside), Link(0.0, between))


@pytest.fixture
def profile(profile_of):
    """Nearly all weights in the last layer, which is quick."""
    return profile_of(
        [4e-3, 4e-3, 4e-3, 1e-3], parameters=[10, 10, 10, 500_000], output=[5, 5, 1, 1]
    )


def objective(profile, chosen_plan, micro_batches, bandwidth):
    """L of the plan for one node, stage by stage: each copy has its share of the samples."""
    samples = chosen_plan.batch / micro_batches
    replicas = dict(chosen_plan.schedule_options).get("replicas", (1,) * chosen_plan.stages)
    ends = list(accumulate(chosen_plan.lengths, initial=0))
    rows = []
    for stage, copies in enumerate(replicas):
        layers = profile.layers[ends[stage] : ends[stage + 1]]
        if stage:
            crossing = samples * profile.layers[ends[stage] - 1].output_bytes_per_sample
            hop = crossing / min(copies, replicas[stage - 1]) / bandwidth
            rows.append((hop, hop, 0.0))
        reduce = (
            2 * (copies - 1) / copies * sum(layer.parameter_bytes for layer in layers) / bandwidth
        )
        rows.append(
            (
                *(
                    sum(layer.seconds(phase, samples / copies) for layer in layers)
                    for phase in ("forward", "backward")
                ),
                reduce,
            )
        )
    return latency(*zip(*rows, strict=True), micro_batches).seconds


def test_the_plans_objective_is_l_of_the_plan(profile):
    """What was made least, put together again from the plan alone."""
    chosen_plan = plan(profile, cluster_of(4, 4), 64, planner="dapple")
    assert chosen_plan.objective is not None
    micro_batches = int(chosen_plan.objective.name.split()[2])
    assert chosen_plan.objective.value == pytest.approx(
        objective(profile, chosen_plan, micro_batches, 1e7)
    )


def test_a_layer_with_most_weights_stands_alone_so_that_they_need_not_be_added_up(profile):
    """15 : 1 for VGG-19, here 3 : 1."""
    chosen_plan = plan(profile, cluster_of(4), 64, planner="dapple")
    assert dict(chosen_plan.schedule_options)["replicas"] == (3, 1)
    assert chosen_plan.lengths == (3, 1)


def test_the_latency_is_near_what_simulation_says(profile_of):
    """On a straight pipeline the formula is about the step that the simulator plays."""
    profile = profile_of([1e-3] * 8, output=1)
    chosen_plan = plan(
        profile, cluster_of(4), 64, planner="dapple", max_replicas=1, micro_batches=16
    )
    assert chosen_plan.predicted.step_s == pytest.approx(chosen_plan.objective.value, rel=0.05)


def test_notable_transfers_bring_policy_b(profile_of):
    """Twice the warm-up hides them; where they are nothing, it would only cost memory."""
    slow = plan(
        profile_of([1e-3] * 4, output=100),
        cluster_of(4, between=4e5),
        64,
        planner="dapple",
        max_replicas=1,
        micro_batches=16,
    )
    quick = plan(
        profile_of([1e-3] * 4, output=1),
        cluster_of(4),
        64,
        planner="dapple",
        max_replicas=1,
        micro_batches=16,
    )
    assert dict(slow.schedule_options)["warm_up"] == warm_up_of_policy_b((1,) * slow.stages)
    assert "warm_up" not in dict(quick.schedule_options)


def test_policy_a_is_taken_where_only_that_fits(profile_of):
    """K_i is at most what memory holds."""
    profile, options = (
        profile_of([1e-3] * 4, output=100, activation=1000.0),
        {"max_replicas": 1, "micro_batches": 16, "stages": 4},
    )
    wide = plan(
        profile, cluster_of(4, between=4e5), 64, planner="dapple", recompute="never", **options
    )
    limit = max(wide.predicted.peak_memory) - 1
    chosen_plan = plan(
        profile,
        cluster_of(4, between=4e5, memory=limit),
        64,
        planner="dapple",
        recompute="never",
        **options,
    )
    assert "warm_up" in dict(wide.schedule_options)
    assert "warm_up" not in dict(chosen_plan.schedule_options)


def test_ranks_of_a_stage_stand_where_its_place_is(profile_of):
    """With a slow network between nodes, copies that have much to add up are on one node."""
    profile = profile_of([1e-3] * 2, parameters=[50_000, 50_000], output=1)
    chosen_plan = plan(
        profile, cluster_of(4, 2, inside=1e9, between=1e6), 64, planner="dapple", stages=2
    )
    ranks = [
        [chosen_plan.devices[rank] if chosen_plan.devices else rank for rank in stage_ranks]
        for stage_ranks in chosen_plan.schedule.ranks_of_stage
    ]
    assert sorted(sorted(devices) for devices in ranks) == [[0, 1], [2, 3]]


def test_devices_of_different_kinds_and_clusters_too_large_are_refused(profile_of):
    """The paper's planner is for equal devices, and its search for a few nodes."""
    profile = profile_of([1e-3] * 100)
    with pytest.raises(PlanError, match="dapple takes all devices for equal"):
        plan(profile, cluster_of(4, names=("d", "e")), 16, planner="dapple")
    with pytest.raises(
        PlanError, match=r"dapple's search has some .* ways to place stages of 100 layers"
    ):
        plan(profile, cluster_of(64, 8), 64, planner="dapple")


def test_more_stages_than_devices_are_refused(profile_of):
    """Every stage needs a device of its own."""
    with pytest.raises(PlanError, match="dapple finds no pipeline of 5 stages"):
        plan(profile_of([1e-3] * 6), cluster_of(4), 16, planner="dapple", stages=5)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_no_stage_has_more_copies_than_there_are_micro_batches(profile, micro_batches):
    """Each copy needs one of its own, however many samples there are to split."""
    chosen_plan = plan(profile, cluster_of(4), 64, planner="dapple", micro_batches=micro_batches)
    assert max(map(len, chosen_plan.schedule.ranks_of_stage)) <= micro_batches
    assert chosen_plan.micro_batches == micro_batches

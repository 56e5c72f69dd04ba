"""PipeDream's planner."""

from itertools import accumulate

import pytest

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.catalogue import plan
from penstock.search.planners.pipedream import MOST_STEPS
from penstock.search.planners.pipedream_cut import Part, spread


def cluster_of(ranks, per_node=1, inside=1e6, between=1e5, memory=10**12, names=("d",)):
    """Devices of these kinds in turn."""
    devices = tuple(
        Device(names[rank % len(names)], memory, flops=(("float32", 1e12),))
        for rank in range(ranks)
    )
    return Cluster("c", devices, per_node, Link(0.0, inside), Link(0.0, between))


def objective(profile, chosen_plan, bandwidth):
    """Section 3.1 written out for one level: the slowest stage or link for a micro-batch of the
    plan.
    """
    samples = chosen_plan.batch / chosen_plan.micro_batches
    replicas = dict(chosen_plan.schedule_options).get("replicas", (1,) * chosen_plan.stages)
    ends = list(accumulate(chosen_plan.lengths, initial=0))
    times = []
    for stage, copies in enumerate(replicas):
        layers = profile.layers[ends[stage] : ends[stage + 1]]
        compute_s = sum(
            layer.seconds("forward", samples) + layer.seconds("backward", samples)
            for layer in layers
        )
        sync = (
            2 * (copies - 1) / copies * sum(layer.parameter_bytes for layer in layers) / bandwidth
        )
        times.append(max(compute_s, sync) / copies)
        if stage:
            times.append(
                2 * samples * profile.layers[ends[stage] - 1].output_bytes_per_sample / bandwidth
            )
    return max(times)


@pytest.fixture
def profile(profile_of):
    """A heavy first layer, which wants copies, and a last one with nearly all weights, which does
    not.
    """
    return profile_of(
        [6e-3, 1e-3, 1e-3, 1e-3], parameters=[10, 10, 10, 20_000], output=[5, 5, 1, 1]
    )


def test_the_plans_objective_is_the_papers_formula_for_the_plan(profile):
    """What the planner says it made least can be checked from the plan alone."""
    chosen_plan = plan(profile, cluster_of(4), 16, planner="pipedream", micro_batches=16)
    assert chosen_plan.objective is not None
    assert chosen_plan.objective.value == pytest.approx(objective(profile, chosen_plan, 1e5))
    assert dict(chosen_plan.schedule_options)["replicas"] == (3, 1)


def test_without_asynchrony_the_stages_run_with_a_flush(profile):
    """The cut and the copies are the paper's; the training rule is the one that was asked for."""
    chosen_plan = plan(profile, cluster_of(4), 16, planner="pipedream")
    assert (chosen_plan.schedule_name, chosen_plan.synchronous, chosen_plan.weights) == (
        "1f1b",
        True,
        "flush",
    )


def test_with_asynchrony_the_schedule_is_pipedreams_own_with_stashed_weights(profile):
    """1F1B-RR without a flush needs equally many micro-batches of a batch on every copy."""
    chosen_plan = plan(profile, cluster_of(4), 18, planner="pipedream", asynchronous=True)
    replicas = dict(chosen_plan.schedule_options).get("replicas", (1,))
    assert (chosen_plan.schedule_name, chosen_plan.weights) == ("pipedream", "stash")
    assert all(chosen_plan.micro_batches % copies == 0 for copies in replicas)


def test_more_copies_than_micro_batches_are_refused_with_what_would_do(profile_of):
    """Every copy of a stage needs a micro-batch of its own: the message says how many copies would
    do.
    """
    profile = profile_of([1e-3] * 4, parameters=1, output=1000)
    with pytest.raises(
        PlanError, match=r"a stage on 8 devices, and each needs one of the 2 .* max_replicas=2"
    ):
        plan(profile, cluster_of(8, per_node=4), 16, planner="pipedream", micro_batches=2)
    assert (
        plan(
            profile,
            cluster_of(8, per_node=4),
            16,
            planner="pipedream",
            micro_batches=2,
            max_replicas=2,
        ).micro_batches
        == 2
    )


def test_copies_in_several_nodes_are_numbered_so_that_a_micro_batch_stays_in_its_node():
    """Micro-batch n goes to the n-th copies: on the same node at both stages, as long as these have
    copies on all nodes alike.
    """
    copies = spread([Part(0, 2, 2, (Part(0, 1, 1), Part(1, 2, 3)))], [[0, 1, 2, 3], [4, 5, 6, 7]])
    (_, _, first), (_, _, second) = copies
    assert all(first[n % 2] // 4 == second[n % 6] // 4 for n in range(12))


def test_nodes_are_a_level_of_their_own(profile_of):
    """Copies that must add up much stand in one node, where the link is fast."""
    profile = profile_of([1e-3] * 4, parameters=[40_000, 10, 10, 40_000], output=[1, 1, 1, 1])
    chosen_plan = plan(
        profile,
        cluster_of(4, per_node=2, inside=1e9, between=1e5),
        16,
        planner="pipedream",
        micro_batches=16,
    )
    ranks = [
        sorted(chosen_plan.devices[rank] for rank in stage_ranks)
        if chosen_plan.devices
        else list(stage_ranks)
        for stage_ranks in chosen_plan.schedule.ranks_of_stage
    ]
    assert all(len({rank // 2 for rank in stage_devices}) == 1 for stage_devices in ranks)


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_number_of_stages_and_of_replicas_is_kept(profile, per_node):
    """What is asked for is a limit on the search, not on what is reported; also where nodes would
    be a level of their own.
    """
    for stages, most in ((2, 2), (3, 2), (4, 1), (2, None), (3, None)):
        chosen_plan = plan(
            profile,
            cluster_of(4, per_node),
            16,
            planner="pipedream",
            stages=stages,
            max_replicas=most,
        )
        assert chosen_plan.stages == stages
        if most is None:
            continue
        assert max(dict(chosen_plan.schedule_options).get("replicas", (1,))) <= most


def test_where_a_cut_for_time_does_not_fit_it_is_cut_within_memory(profile_of):
    """Two and two layers would be even; the second layer's activations wait only behind an early
    stage.
    """
    profile = profile_of([1e-3] * 4, activation=[100, 10_000, 100, 100], parameters=1, output=1)
    options = {
        "planner": "pipedream",
        "stages": 2,
        "max_replicas": 1,
        "micro_batches": 4,
        "recompute": "never",
    }
    roomy = plan(profile, cluster_of(2), 16, **options)
    tight = plan(profile, cluster_of(2, memory=50_000), 16, **options)
    assert (roomy.lengths, tight.lengths) == ((2, 2), (1, 3))


def test_devices_of_different_kinds_are_refused(profile):
    """Its recurrence has one time per layer."""
    with pytest.raises(PlanError, match="pipedream takes all devices for equal, and c has d, e"):
        plan(profile, cluster_of(4, names=("d", "e")), 16, planner="pipedream")


def test_a_cluster_beyond_what_the_search_can_do_is_refused_at_once(profile_of):
    """So that a planner that asks all others is not held up."""
    profile = profile_of([1e-3] * 100)
    with pytest.raises(PlanError, match=r"layers\^2 x devices\^2 = 1.0e\+10 steps"):
        plan(profile, cluster_of(1024), 1024, planner="pipedream")
    assert MOST_STEPS > (100 * 512) ** 2


def test_a_cut_or_schedule_that_is_asked_for_is_refused_where_it_is_not_pipedreams(profile):
    """It would not be PipeDream's plan any more."""
    with pytest.raises(
        PlanError, match="pipedream cuts by its own method, and partition='uniform' is requested"
    ):
        plan(profile, cluster_of(4), 16, planner="pipedream", partition="uniform")
    with pytest.raises(PlanError, match="pipedream runs 1f1b, and gpipe is requested"):
        plan(profile, cluster_of(4), 16, planner="pipedream", schedules="gpipe")

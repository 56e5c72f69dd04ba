"""BaPipe's exploration."""

from itertools import accumulate, pairwise

import pytest

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.catalogue import plan
from penstock.search.planners.bapipe import explore, preferred
from penstock.search.planners.bapipe_table import AS, S
from penstock.search.request import PlanRequest


def cluster_of(ranks, bandwidth=1e9, memory=10**12, kind="gpu", speeds=(1.0,), chip=0):
    """Devices of these speeds in turn, one on each node."""
    devices = tuple(
        Device(
            f"d{speeds[rank % len(speeds)]:g}",
            memory,
            kind,
            (("float32", 1e12 * speeds[rank % len(speeds)]),),
            on_chip_bytes=chip,
        )
        for rank in range(ranks)
    )
    link = Link(0.0, bandwidth)
    return Cluster("c", devices, 1, link, link)


def ways(profile, cluster, batch, table, **options):
    """Every way of the exploration."""
    return list(
        explore(
            PlanRequest(profile, cluster, batch, **options),
            {name.lower(): row for name, row in table.items()},
        )
    )


def test_on_gpus_slow_links_bring_the_overlapping_schedule(profile_of):
    """SR is notable: SNO pays it for nearly every micro-batch, SO only to fill and drain."""
    chosen_plan = plan(
        profile_of([1e-3] * 8, output=100),
        cluster_of(4, bandwidth=2e6),
        64,
        planner="bapipe",
        micro_batches=16,
    )
    assert chosen_plan.schedule_name == "eager-1f1b"
    assert chosen_plan.objective.name == "1f1b-so step"


def test_on_gpus_quick_links_bring_the_leaner_schedule(profile_of):
    """As fast to within 0.1 %, and half the features."""
    chosen_plan = plan(
        profile_of([1e-3] * 8, output=1), cluster_of(4), 64, planner="bapipe", micro_batches=16
    )
    assert chosen_plan.schedule_name == "1f1b"


def test_on_gpus_the_overlapping_schedule_is_not_taken_where_its_features_do_not_fit(profile_of):
    """Twice the features on the first stage are what decides."""
    profile = profile_of([1e-3] * 8, output=100, activation=1000.0)
    options = {"planner": "bapipe", "micro_batches": 16, "recompute": "never"}
    wide = plan(profile, cluster_of(4, bandwidth=2e6), 64, **options)
    chosen_plan = plan(
        profile,
        cluster_of(4, bandwidth=2e6, memory=max(wide.predicted.peak_memory) - 1),
        64,
        **options,
    )
    assert (wide.schedule_name, chosen_plan.schedule_name) == ("eager-1f1b", "1f1b")


def test_on_fpgas_both_forward_and_backward_at_once_where_the_link_does_not_carry_what_one_asks(
    profile_of,
):
    """1F1B-AS asks a / F of the link, FBP-AS 2 a / (F + B): with B = 2 F that is two thirds of it."""
    profile = profile_of(
        [1e-3] * 8, output=100
    )  # a stage of 2 layers: F = 2 ms a sample, a = 100 bytes
    slow, quick = (
        cluster_of(4, bandwidth=4e4, kind="fpga"),
        cluster_of(4, bandwidth=6e4, kind="fpga"),
    )
    assert plan(profile, slow, 64, planner="bapipe", micro_batches=16).schedule_name == "fbp-as"
    assert plan(profile, quick, 64, planner="bapipe", micro_batches=16).schedule_name == "1f1b"


def test_the_objective_is_the_tables_time_with_the_slowest_stage_and_the_slowest_link(profile_of):
    """SNO, written out: (M + N - 1)(F + B) + (M + N - 2 - ceil((M - 1) / N)) 2 SR."""
    profile = profile_of([1e-3, 2e-3, 4e-3, 1e-3, 3e-3], output=[3, 1, 4, 1, 5])
    for way in ways(profile, cluster_of(3, bandwidth=1e4), 32, S, micro_batches=8):
        ends = list(accumulate(way.lengths, initial=0))
        slowest = max(sum(profile.step_seconds(4)[start:stop]) for start, stop in pairwise(ends))
        hop = max(4 * profile.layers[end - 1].output_bytes_per_sample / 1e4 for end in ends[1:-1])
        waits = 8 + 3 - 2 - 3 if way.schedule == "1f1b-sno" else 3 - 1
        assert way.step_s == pytest.approx((8 + 3 - 1) * slowest + waits * 2 * hop)


def test_equal_stages_take_in_simulation_what_the_table_says(profile_of):
    """Where the table's supposition holds, its time is the step's."""
    profile = profile_of([1e-3] * 8, output=100)
    chosen_plan = plan(
        profile, cluster_of(4, bandwidth=2e6), 64, planner="bapipe", micro_batches=16
    )
    assert chosen_plan.predicted.step_s == pytest.approx(chosen_plan.objective.value)


def test_where_transfers_bound_only_cheap_boundaries_are_cut(profile_of):
    """Balanced would be 2 + 2, at a boundary that takes longer than a stage."""
    profile = profile_of([1e-3] * 4, output=[1, 1000, 1, 1])
    (way, *_) = ways(profile, cluster_of(2, bandwidth=1e5), 16, S, micro_batches=4)
    assert way.lengths in ((1, 3), (3, 1))
    (way, *_) = ways(profile, cluster_of(2, bandwidth=1e9), 16, S, micro_batches=4)
    assert way.lengths == (2, 2)


def test_where_memory_lacks_layers_move_to_a_neighbour_with_room(profile_of):
    """The first stage of two holds two micro-batches' features, the last one."""
    profile = profile_of([1e-3] * 6, activation=1000.0, parameters=1)
    roomy = ways(profile, cluster_of(2), 16, S, micro_batches=8)[0]
    tight = ways(profile, cluster_of(2, memory=10_000), 16, S, micro_batches=8)[0]
    assert roomy.lengths == (3, 3)
    assert tight.lengths == (2, 4)
    assert tight.excess_bytes == 0


def test_split_layers_take_the_ideal_time_on_boards_of_different_speed(profile_of):
    """Intra-layer: its own number beside the plan of whole layers, T* = 1 / sum(1 / T^n) a stage."""
    profile = profile_of([1e-3] * 5, output=0.001)
    cluster = cluster_of(2, kind="fpga", speeds=(1.0, 2.0))
    for way in ways(profile, cluster, 32, AS, micro_batches=8):
        micro_batch_s = 1 / (3 / sum(profile.step_seconds(4)))
        assert way.split_s == pytest.approx((8 + 2 - 1) * micro_batch_s, rel=1e-6)
        assert way.split_s < way.step_s
    chosen_plan = plan(profile, cluster, 32, planner="bapipe", micro_batches=8)
    assert chosen_plan.objective.value == pytest.approx((8 + 2 - 1) * micro_batch_s, rel=1e-6)
    assert sum(chosen_plan.lengths) == 5


def test_on_fpgas_weights_stay_on_the_chip_where_that_costs_no_time(profile_of):
    """A board whose weights fit on its chip reads none from its memory."""
    profile = profile_of(
        [1e-3, 1e-3, 1e-3, 0.0, 1e-3, 1e-3, 1e-3],
        parameters=[10, 10, 10, 30, 1, 1, 1],
        output=0.001,
    )
    for chip, expected in ((0, (3, 4)), (40, (3, 4))):
        cluster = cluster_of(2, kind="fpga", chip=chip)
        assert preferred(ways(profile, cluster, 16, AS, micro_batches=4))[0].lengths == expected
    last = profile_of(
        [1e-3, 1e-3, 1e-3, 0.0, 1e-3, 1e-3, 1e-3],
        parameters=[1, 1, 1, 30, 10, 10, 10],
        output=0.001,
    )
    cluster = cluster_of(2, kind="fpga", chip=40)
    assert preferred(ways(last, cluster, 16, AS, micro_batches=4))[0].lengths == (4, 3)


def test_fpgas_among_gpus_are_refused(profile_of):
    """The schedules to choose from hang on the kind of accelerator."""
    gpu, fpga = (
        Device("g", 10**12, "gpu", (("float32", 1e12),)),
        Device("f", 10**12, "fpga", (("float32", 1e12),)),
    )
    cluster = Cluster("c", (gpu, fpga), 1, Link(0.0, 1e9), Link(0.0, 1e9))
    with pytest.raises(
        PlanError,
        match="bapipe chooses the schedule by the kind of accelerator, and c mixes fpga, gpu",
    ):
        plan(profile_of([1e-3] * 4), cluster, 16, planner="bapipe")


def test_more_stages_than_accelerators_are_refused(profile_of):
    """One stage stands on each."""
    with pytest.raises(
        PlanError, match="bapipe has one stage on every accelerator: 3 need as many, c has 2"
    ):
        plan(profile_of([1e-3] * 4), cluster_of(2), 16, planner="bapipe", stages=3)

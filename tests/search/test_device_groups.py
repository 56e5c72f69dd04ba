"""Plans of device groups: tensor parallelism, sequence parallelism and ZeRO."""

from dataclasses import replace

import pytest

import penstock as ps
from penstock.cluster.groups import group_devices
from penstock.errors import ClusterError, PlanError
from penstock.export.catalogue import exported
from penstock.plan.plan import Plan
from penstock.plan.sharding import Sharding, ShardingOptions
from penstock.profile.matrix_product import MatrixProduct
from penstock.profile.transformer import Transformer, transformer_profile
from penstock.search.device_groups import (
    SIZES,
    _configurations,
    best_zero_level,
    group_requests,
    has_groups,
)
from penstock.search.request import PlanRequest
from penstock.search.search_space import SearchSpace
from penstock.simulate.costs import Costs
from penstock.simulate.gradient_sync import all_reduce_seconds
from penstock.simulate.plan_costs import simulate_plan
from penstock.simulate.zero import with_zero
from penstock.store import to_json

CLUSTER = ps.cluster("2x8xA100-80-NVLink-IB200")
MODEL = Transformer(8, 4096, 32)


@pytest.fixture(scope="module")
def profile():
    """A small transformer at widths of 1 to 8."""
    return transformer_profile(MODEL, CLUSTER.devices[0], CLUSTER.inside, batch=32)


@pytest.fixture(scope="module")
def shared_plan(profile):
    """A plan with groups of 4 and ZeRO 1."""
    return ps.plan(profile, CLUSTER, 32, tensor_parallel=4, zero=1, stages=2, schedules="1f1b")


def test_a_width_shares_parameters_and_saves_less(profile):
    """Products and their weights are divided; without sequence parallelism norms are not."""
    by_width = {(p.tensor_parallel, p.sequence_parallel): p for p in profile.widths}
    whole, eight, split = (
        profile.layers[1],
        by_width[8, False].layers[1],
        by_width[8, True].layers[1],
    )
    assert whole.parameter_bytes / 8 <= eight.parameter_bytes < whole.parameter_bytes / 7
    assert split.activation_bytes_per_sample == whole.activation_bytes_per_sample / 8
    assert split.activation_bytes_per_sample < eight.activation_bytes_per_sample
    assert whole.forward.at(1) / 8 < split.forward.at(1) < whole.forward.at(1)


def test_parameters_are_those_of_the_published_formula(profile):
    """Narayanan et al. 2021, equation 2; the head's copy of the embedding counts twice here."""
    head = profile.layers[-1].parameters
    assert sum(layer.parameters for layer in profile) - head == pytest.approx(
        MODEL.parameters, rel=1e-3
    )


def test_small_products_reach_less_of_the_peak():
    """Each dimension that shrinks costs efficiency."""
    large = MatrixProduct(4096, 4096, 4096)
    for name in ("m", "n", "k"):
        assert replace(large, **{name: 64}).efficiency < large.efficiency


def test_a_profile_with_widths_reads_back_equal(profile, tmp_path):
    """Widths are plain data."""
    profile.save(tmp_path / "p.json")
    assert ps.Profile.load(tmp_path / "p.json") == profile


def test_zero_divides_state_and_keeps_the_bytes_on_the_wire():
    """Levels store 1/d of states, gradients, and parameters (with two layers in use)."""
    costs = Costs(
        forward=[8.0],
        backward=[8.0],
        input_grad=[4.0],
        weight_grad=[4.0],
        update=[2.0],
        weight_bytes=[800.0],
        gradient_bytes=[200.0],
        optimizer_bytes=[400.0],
    )
    ranks = [(0, 1, 2, 3)]
    sync = all_reduce_seconds(ranks[0], 200.0, CLUSTER)
    none, one, two, three = (with_zero(costs, ranks, CLUSTER, (8,), level) for level in range(4))
    assert (none.weight_bytes, none.update) == ((800.0,), (2.0 + sync,))
    assert (one.weight_bytes, one.update) == ((500.0,), (0.5 + sync,))
    assert two.weight_bytes == (400.0,)
    assert two.update == (0.5 + sync / 2,)
    assert three.weight_bytes == (300.0,)
    assert three.update == (0.5,)
    assert three.forward == (8.0 + sync / 2 / 8,)


def test_a_shared_plan_reads_back_is_simulated_and_shown(profile, shared_plan, tmp_path):
    """The prediction is the simulation of the plan that was read."""
    shared_plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == shared_plan
    assert plan.sharding == Sharding(4, sequence_parallel=True, zero=1)
    assert plan.cluster_ranks == 16
    assert simulate_plan(plan, profile, CLUSTER).makespan == pytest.approx(plan.predicted.step_s)
    assert "tensor parallel 4, sequence parallel, ZeRO 1" in str(plan)


def test_a_plan_file_of_the_version_before_is_read(shared_plan):
    """Version 3 has no sharding."""
    plain = replace(shared_plan, tensor_parallel=1, sequence_parallel=False, zero=0, schema=3)
    text = to_json(plain)
    assert Plan.parse(text, "old") == replace(plain, schema=4)


def test_a_shared_plan_is_refused_by_the_runtime_and_exported(shared_plan):
    """The message says where it can run."""
    with pytest.raises(PlanError, match="export it to torchtitan or Megatron"):
        shared_plan.check_fits(shared_plan.fingerprint, shared_plan.ranks)
    megatron = exported(shared_plan, "megatron").use
    assert (
        "--tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer" in megatron
    )
    titan = exported(shared_plan, "torchtitan").use
    assert "tensor_parallel_degree = 4, data_parallel_shard_degree = 2" in titan
    with pytest.raises(PlanError, match="deepspeed cannot run this plan"):
        exported(shared_plan, "deepspeed")


def test_the_search_is_no_slower_than_each_of_its_widths(profile):
    """All widths and levels compete under one budget."""
    free = ps.plan(profile, CLUSTER, 32, zero=None, budget_s=1000, schedules="1f1b")
    for width in (1, 2, 4, 8):
        for zero in (0, 1, 2, 3):
            plan = ps.plan(
                profile,
                CLUSTER,
                32,
                tensor_parallel=width,
                zero=zero,
                budget_s=1000,
                schedules="1f1b",
            )
            assert free.predicted.step_s <= plan.predicted.step_s * (1 + 1e-9)
    assert free.batch % free.micro_batches == 0


def test_the_table_of_candidates_has_the_chosen_plan_once(shared_plan, profile):
    """A pipeline that represents its replicas is the same candidate as all of them."""
    free = ps.plan(profile, CLUSTER, 32, zero=None, budget_s=2)
    for plan in (shared_plan, free):
        kinds = [(row.schedule, row.stages, row.replicas) for row in plan.candidates]
        assert len(kinds) == len(set(kinds))
        assert plan.candidates[0].step_s == plan.predicted.step_s


def test_all_levels_are_tried_without_widths(profile):
    """The memory that is stated is that of the level that is stated."""
    plain, cluster = replace(profile, widths=()), ps.cluster("4xA100-80-NVLink")
    free = ps.plan(plain, cluster, 32, schedules="1f1b", zero=None)
    fixed = [ps.plan(plain, cluster, 32, schedules="1f1b", zero=level) for level in range(4)]
    fastest = min(plan.predicted.step_s for plan in fixed)
    assert free.predicted.step_s == pytest.approx(fastest)
    assert free.predicted.peak_memory == fixed[free.zero].predicted.peak_memory
    assert free.zero > 0


def test_groups_that_cannot_be_formed_are_refused(profile):
    """A group has equal devices of one node."""
    with pytest.raises(ClusterError, match="no groups of 3 devices"):
        group_devices(CLUSTER, 3)
    with pytest.raises(PlanError, match="only for layers on 1, 2, 4, 8 devices"):
        ps.plan(profile, CLUSTER, 32, tensor_parallel=16)
    with pytest.raises(PlanError, match="the profile has no costs of layers that 2 devices share"):
        ps.plan(replace(profile, widths=()), CLUSTER, 32, tensor_parallel=2)
    with pytest.raises(PlanError, match="tensor_parallel: 1 in the plan, 4 requested"):
        ps.plan(profile, CLUSTER, 32, tensor_parallel=4, planner="dapple")


@pytest.mark.parametrize(
    ("options", "shardings"),
    [
        ((None, None, 0), [(1, False, 0), (2, True, 0), (4, True, 0), (8, True, 0)]),
        ((4, None, 1), [(4, True, 1)]),
        ((4, False, 0), [(4, False, 0)]),
        ((1, None, None), [(1, False, 0), (1, False, 1), (1, False, 2), (1, False, 3)]),
        ((None, True, 2), [(2, True, 2), (4, True, 2), (8, True, 2)]),
        ((None, False, 3), [(1, False, 3), (2, False, 3), (4, False, 3), (8, False, 3)]),
    ],
)
def test_each_way_to_share_stages_is_a_request_of_its_own(profile, options, shardings):
    """A group is a device there: the profile has no other widths, and the cluster as many ranks as
    groups.
    """
    request = PlanRequest(profile, CLUSTER, 32)
    requests = group_requests(request, ShardingOptions(*options))
    assert [group.sharding for group in requests] == [Sharding(*row) for row in shardings]
    widths = {
        (shared.tensor_parallel, shared.sequence_parallel): shared for shared in profile.widths
    }
    for group in requests:
        count, parallel = group.sharding.tensor_parallel, group.sharding.sequence_parallel
        assert group.cluster.ranks == 16 // count
        assert not group.profile.widths
        shared = profile if count == 1 else widths[count, parallel]
        assert group.profile.layers == shared.layers
    assert has_groups(request)
    assert not has_groups(requests[0])


@pytest.mark.parametrize(
    ("options", "cluster", "reasons"),
    [
        ((1, True, 0), CLUSTER, ["sequence parallelism needs tensor_parallel of 2 or more"]),
        ((16, None, 0), CLUSTER, ["only for layers on 1, 2, 4, 8 devices"]),
        ((8, None, None), ps.cluster("2x4xA100-80-NVLink-IB200"), ["no groups of 8 devices"]),
    ],
)
def test_without_any_group_the_reasons_are_given_once_each(profile, options, cluster, reasons):
    """All levels of ZeRO fail for the same reason."""
    with pytest.raises(PlanError, match="no device groups can be formed") as caught:
        group_requests(PlanRequest(profile, cluster, 32), ShardingOptions(*options))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + len(reasons)
    for line, reason in zip(lines[1:], reasons, strict=True):
        assert reason in line


def configurations_of(profile, ranks, batch, **options):
    """The configurations of single devices: pipelines, ranks, stages and micro-batches."""
    cluster = ps.cluster(f"{ranks}xA100-80-NVLink")
    request = PlanRequest(replace(profile, widths=()), cluster, batch, **options)
    return [
        (
            entry.shape.pipelines,
            entry.shape.ranks,
            entry.stages,
            entry.micro_batches,
            entry.schedule,
        )
        for entry in _configurations(request, SearchSpace(request, []))
    ]


@pytest.mark.parametrize(("ranks", "batch"), [(8, 24), (6, 32), (12, 7)])
def test_numbers_of_pipelines_and_micro_batches_divide_the_batch(profile, ranks, batch):
    """Pipelines have all ranks there are, or the nearest number that divides the blocks between the
    embedding and the head.
    """
    layers = len(profile)
    blocks = layers - 2
    expected = set()
    for pipelines in range(1, min(ranks, batch) + 1):
        if batch % pipelines:
            continue
        longest = min(ranks // pipelines, layers)
        even = max(count for count in range(1, longest + 1) if blocks % count == 0)
        for count in {longest, even} if 2 * even > longest - longest % 2 else {longest}:
            for size in SIZES:
                if batch // pipelines % size == 0:
                    expected.add((pipelines, count, count, batch // size, "1f1b"))
    result = configurations_of(profile, ranks, batch, schedules=("1f1b",))
    assert set(result) == expected
    assert len(result) == len(expected)


def test_without_names_the_schedules_are_those_that_other_frameworks_run(profile):
    """In one stage a rank, or in several where the schedule takes them; given numbers are kept."""
    result = configurations_of(profile, 4, 8)
    assert {schedule for *_, schedule in result} == {"1f1b", "interleaved", "zb-h1", "zb-v"}
    chunks = {
        stages // ranks
        for _, ranks, stages, _, name in result
        if name == "interleaved" and ranks > 1
    }
    assert chunks == {2, 3, 4}
    assert all(stages <= len(profile) for _, _, stages, _, _ in result)
    fixed = configurations_of(profile, 4, 8, stages=2, micro_batches=4, max_replicas=2)
    assert {(pipelines, stages, count) for pipelines, _, stages, count, _ in fixed} <= {
        (1, 2, 4),
        (2, 2, 4),
    }
    # Three micro-batches cannot be shared equally by two pipelines.
    odd = {"micro_batches": 3, "stages": 2}
    assert configurations_of(profile, 4, 6, max_replicas=2, **odd) == configurations_of(
        profile, 4, 6, max_replicas=1, **odd
    )


def test_the_level_of_zero_is_the_fastest_and_of_equals_the_lowest(profile):
    """Every level has an equal part of the budget. What does not fit at one may fit at another; the
    message is that of the highest level.
    """
    request = PlanRequest(profile, CLUSTER, 32, budget_s=8.0)
    request = replace(request, sharding_options=ShardingOptions(1, False, None))
    plan = ps.plan(replace(profile, widths=()), ps.cluster("2xA100-80-NVLink"), 32, budget_s=0)
    seen = []

    def planner(steps):
        def make(fixed):
            level = fixed.sharding.zero
            seen.append((level, fixed.sharding_options.zero, fixed.budget_s))
            if steps[level] is None:
                raise PlanError(f"level {level} does not fit")
            predicted = replace(plan.predicted, step_s=steps[level])
            return replace(plan, predicted=predicted, zero=level)

        return make

    assert best_zero_level(request, planner([3.0, 2.0, 2.0, 4.0])).zero == 1
    assert seen == [(level, level, 2.0) for level in range(4)]
    assert best_zero_level(request, planner([None, None, 5.0, None])).zero == 2
    with pytest.raises(PlanError, match="level 3 does not fit"):
        best_zero_level(request, planner([None] * 4))

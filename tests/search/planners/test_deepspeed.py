"""DeepSpeed's planner against its known cuts."""

import pytest
from tests.search.planners.cutters import VGG19, ask, bounds, profile

from penstock.search.planners.deepspeed import deepspeed, deepspeed_uniform


@pytest.mark.parametrize(
    ("weights", "stages", "ends"),
    [
        ([1] * 10, 4, [3, 6, 8, 10]),
        ([5, 1, 1, 1, 1, 1, 1, 5], 3, [2, 7, 8]),
        ([1] * 8 + [20], 3, [4, 8, 9]),
    ],
    ids=["equal", "heavy ends", "one heavy"],
)
def test_its_known_cuts_come_out(weights, stages, ends):
    """docs/literature/deepspeed.md, oracles of partition_balanced."""
    costs = profile([(0.1, 0.2)] * len(weights), parameters=weights)
    chosen_plan = deepspeed(ask(costs, f"{stages}xV100-NVLink"))
    assert [end for _, end in bounds(chosen_plan.lengths)] == ends
    sums = [sum(weights[a:b]) for a, b in bounds(chosen_plan.lengths)]
    assert chosen_plan.objective.value == max(sums) - min(sums)
    assert (
        str(chosen_plan.objective)
        == f"most less fewest parameters of a stage {max(sums) - min(sums)}"
    )


@pytest.mark.parametrize(
    ("stages", "lengths"), [(2, (8, 17)), (4, (3, 4, 5, 13)), (8, (1, 1, 2, 2, 2, 3, 3, 11))]
)
def test_vgg19_with_times_for_weights_is_cut_as_in_the_table(stages, lengths):
    """docs/literature/vgg-19-profile.md, the last column."""
    costs = profile([(0.1, 0.2)] * len(VGG19), parameters=[round(1000 * (f + b)) for f, b in VGG19])
    assert deepspeed(ask(costs, f"{stages}xV100-NVLink")).lengths == lengths


def test_uniform_has_one_more_layer_in_the_first_stages():
    """partition_uniform; as partition="uniform" of the same planner."""
    costs = profile([(0.1, 0.2)] * 10)
    chosen_plan = deepspeed_uniform(ask(costs, "4xV100-NVLink"))
    assert (
        chosen_plan.lengths
        == deepspeed(ask(costs, "4xV100-NVLink", by="uniform")).lengths
        == (3, 3, 2, 2)
    )
    assert chosen_plan.objective.value == 1


def test_types_are_counted():
    """partition_method="type:…" goes by class names."""
    chosen_plan = deepspeed(ask(profile([(0.1, 0.2)] * 8), "4xV100-NVLink", by="type:l"))
    assert chosen_plan.lengths == (2, 2, 2, 2)
    assert chosen_plan.objective.value == 0


def test_devices_that_are_left_are_more_pipelines():
    """world size = pipe x data, as its topology has it; each pipeline has as many micro-batches."""
    chosen_plan = deepspeed(
        ask(profile([(0.1, 0.2)] * 8), "7xV100-NVLink", stages=2, micro_batches=12)
    )
    assert [len(ranks) for ranks in chosen_plan.schedule.ranks_of_stage] == [3, 3]
    assert dict(chosen_plan.schedule_options) == {"replicas": 3}

"""Megatron's grid."""

import pytest
from tests.search.planners.cutters import ask, bounds, profile

from penstock.errors import PlanError
from penstock.search.planners.megatron import megatron


@pytest.mark.parametrize(
    "asked", [{}, {"max_replicas": 1}, {"schedules": ("interleaved",)}, {"stages": 4}]
)
def test_the_objective_is_the_estimate_of_the_step(asked):
    """(v m + p - 1) / v micro-batches of the slowest rank, for m of one pipeline."""
    costs = profile([(0.1, 0.2)] * 12, fixed=1e-3)
    chosen_plan = megatron(ask(costs, "4xV100-NVLink", batch=64, **asked))
    pipelines = max(map(len, chosen_plan.schedule.ranks_of_stage))
    width = chosen_plan.ranks // pipelines
    virtual, per_pipeline = chosen_plan.stages // width, chosen_plan.micro_batches // pipelines
    seconds = costs.step_seconds(64 / chosen_plan.micro_batches)
    parts = [sum(seconds[a:b]) for a, b in bounds(chosen_plan.lengths)]
    slowest = max(sum(parts[rank::width]) for rank in range(width))
    assert chosen_plan.objective.value == pytest.approx(
        (virtual * per_pipeline + width - 1) / virtual * slowest
    )
    if "schedules" in asked:
        assert virtual > 1


def test_layers_are_shared_evenly():
    """It counts layers, and nothing else."""
    chosen_plan = megatron(
        ask(
            profile([(0.1 * i, 0.2) for i in range(1, 11)]),
            "4xV100-NVLink",
            max_replicas=1,
            schedules=("1f1b",),
        )
    )
    assert max(chosen_plan.lengths) - min(chosen_plan.lengths) <= 1


def test_pipelines_get_equally_many_micro_batches():
    """Three pipelines of two ranks share 3, 6, 12 …; of seven micro-batches, one pipeline gets all."""
    chosen_plan = megatron(ask(profile([(0.1, 0.2)] * 10), "6xV100-NVLink", stages=2))
    assert max(map(len, chosen_plan.schedule.ranks_of_stage)) == 3
    assert chosen_plan.micro_batches % 3 == 0
    chosen_plan = megatron(
        ask(profile([(0.1, 0.2)] * 10), "4xV100-NVLink", stages=2, micro_batches=7)
    )
    assert (chosen_plan.ranks, chosen_plan.micro_batches) == (2, 7)


def test_a_number_of_stages_that_is_no_grid_point_is_refused():
    """Six stages are not 1, 2 or 4 on each of up to two ranks."""
    with pytest.raises(PlanError, match="megatron finds no way to cut 10 layers for 2 devices"):
        megatron(ask(profile([(0.1, 0.2)] * 10), "2xV100-NVLink", stages=6))

"""The best pipeline beside a plan that is none."""

from __future__ import annotations

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.plan.plan import Plan
from penstock.schedule.catalogue import schedule
from penstock.search.best_pipeline import is_pipeline
from penstock.search.catalogue import plan

FREE = Link(0.0, 1e12)


def on(ranks: int) -> Cluster:
    """Equal devices with free links."""
    return Cluster("c", (Device("d", 10**12),) * ranks, 1, FREE, FREE)


@pytest.mark.parametrize(
    ("name", "stages", "options", "expected"),
    [
        ("1f1b", 1, {}, False),
        ("1f1b", 1, {"replicas": 4}, False),
        ("chimera", 2, {}, False),
        ("chimera", 4, {}, True),
        ("1f1b", 2, {}, True),
        ("1f1b", 2, {"replicas": 2}, True),
        ("interleaved", 4, {}, True),
    ],
)
def test_a_pipeline_is_where_no_rank_holds_the_whole_model(name, stages, options, expected):
    """Chimera on two ranks is data parallelism in another form."""
    assert is_pipeline(schedule(name, stages, 4, **options)) is expected


def test_beside_data_parallelism_stands_the_pipeline_that_a_search_without_replicas_finds(
    profile_of, tmp_path
):
    """Its numbers are those of a plan of its own, and the plan says why it is slower."""
    profile = profile_of([1.0, 2.0, 1.0, 3.0], fixed=0.1)
    parallel = plan(profile, on(2), 16, budget_s=19)
    alone = plan(profile, on(2), 16, budget_s=19, max_replicas=1)
    assert parallel.stages == 1
    assert parallel.pipeline.stages > 1
    assert parallel.predicted.step_s < parallel.pipeline.step_s
    # The search without replicas also makes schedules from the costs.
    assert alone.predicted.step_s <= parallel.pipeline.step_s <= alone.predicted.step_s * 1.02
    text = str(parallel)
    assert f"best pipeline: {parallel.pipeline.schedule}, " in text
    assert "each of its ranks holds the whole model: no activations cross" in text
    parallel.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == parallel


def test_a_plan_that_is_a_pipeline_shows_no_other(profile_of):
    """The table of candidates has the others."""
    pipeline = plan(profile_of([1.0] * 4), on(2), 16, max_replicas=1, budget_s=19)
    assert pipeline.stages > 1
    assert pipeline.pipeline is None
    assert "best pipeline" not in str(pipeline)


def test_one_rank_has_no_pipeline(profile_of):
    """There is nothing to compare with."""
    assert plan(profile_of([1.0] * 4), on(1), 16, budget_s=19).pipeline is None


def test_one_rank_of_several_is_compared_with_their_pipeline(profile_of):
    """Where links are slow, the reader sees by how much."""
    slow = Link(100.0, 1e12)
    cluster = Cluster("c", (Device("d", 10**12),) * 2, 1, slow, slow)
    single = plan(profile_of([1.0, 1.0]), cluster, 4, budget_s=19)
    assert single.ranks == 1
    assert "one rank alone is faster: the pipeline is limited by " in str(single)

"""The best pipeline beside a plan that is none."""

from __future__ import annotations

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.plan.plan import Plan
from penstock.schedule.catalogue import schedule
from penstock.search.best_pipeline import best_pipeline, is_pipeline, pipeline_note
from penstock.search.catalogue import plan
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.search_space import SearchSpace
from penstock.search.shapes import shapes

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


def searched(profile, cluster, proposals, **options):
    """A search that has evaluated these proposals, with its space."""
    request = PlanRequest(profile, cluster, 16, **options)
    search = PlanSearch(request)
    for proposal in proposals:
        search.evaluate(proposal, force=True)
    return search, SearchSpace(request, shapes(request))


def test_the_pipeline_is_as_fast_as_any_that_was_evaluated_or_skipped(profile_of):
    """What a search skipped, because it could not beat data parallelism, is simulated here."""
    profile = profile_of([1.0, 2.0, 1.0, 3.0], fixed=0.1)
    parallel = Proposal((4,), "1f1b", 2, (("replicas", 2),))
    search, space = searched(profile, on(2), [parallel], budget_s=19)
    (chosen,) = search.feasible
    pipeline = best_pipeline(search, space, chosen)
    for proposal in (Proposal((2, 2), "1f1b", 16), Proposal((3, 1), "zb-h1", 16)):
        search.evaluate(proposal, force=True)
        (_, *others) = search.feasible
        assert pipeline.step_s <= min(other.step_s for other in others) * (1 + 1e-9)
    assert is_pipeline(pipeline.placed.schedule)
    # A chosen pipeline needs no other.
    assert best_pipeline(search, space, search.feasible[1]) is None


def test_the_note_has_the_idle_time_of_both_and_what_limits_the_pipeline(profile_of):
    """Of one rank the idle time says nothing."""
    profile = profile_of([1.0, 2.0, 1.0, 3.0])
    search, _ = searched(
        profile,
        on(2),
        [
            Proposal((4,), "1f1b", 2, (("replicas", 2),)),
            Proposal((3, 1), "1f1b", 16),
            Proposal((4,), "1f1b", 16),
        ],
    )
    parallel, pipeline, single = search.feasible
    bubble = pipeline.steady_state.bubble_ratio
    assert pipeline_note(parallel, pipeline) == (
        "the plan above is faster because each of its ranks holds the whole model: no activations "
        f"cross, and a rank idles for 0% of the step instead of {bubble:.0%}; the pipeline is "
        f"limited by {pipeline.bottleneck}"
    )
    assert pipeline_note(single, pipeline) == (
        f"one rank alone is faster: the pipeline is limited by {pipeline.bottleneck}"
    )


def test_chimera_counts_as_a_pipeline_from_four_ranks_on(profile_of):
    """On two ranks each holds both stages, so that its configurations are left out there."""
    profile = profile_of([1.0] * 4)
    for ranks, expected in ((2, None), (4, "chimera")):
        parallel = Proposal((4,), "1f1b", ranks, (("replicas", ranks),))
        search, space = searched(
            profile, on(ranks), [parallel], schedules=("chimera",), stages=ranks, budget_s=19
        )
        search.feasible.clear()
        everything = PlanSearch(PlanRequest(profile, on(ranks), 16))
        chosen = everything.evaluate(parallel)
        pipeline = best_pipeline(search, space, chosen)
        assert (pipeline and pipeline.placed.schedule.name) == expected

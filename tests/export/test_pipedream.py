"""PipeDream's configuration."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.export.catalogue import export, exported
from penstock.schedule.catalogue import schedule


@settings(max_examples=40, deadline=None)
@given(replicas=st.sampled_from([(1, 1, 1, 1), (3, 1), (2, 1, 1), (2, 2), (4, 2, 1), (1, 1)]))
def test_depths_are_those_that_pipedreams_runtime_would_choose(plan_of, replicas):
    """w = floor((R - 1 - the ranks before) / k): the warm-up of every stage, and of weights one
    version more.
    """
    every = {1: 1, 2: 2, 3: 3, 4: 4}[max(replicas)]
    example = schedule(
        "pipedream", len(replicas), every, **({} if max(replicas) == 1 else {"replicas": replicas})
    )
    content = json.loads(
        export(plan_of(example, [14 - len(replicas) + 2, *[1] * (len(replicas) - 1)]), "pipedream")
    )
    ranks = sum(replicas)
    expected = {
        str(stage): (ranks - 1 - sum(replicas[:stage])) // copies
        for stage, copies in enumerate(replicas)
    }
    assert content["stage_to_depth_map"] == expected
    assert [
        len(content["stage_to_rank_map"][str(stage)]) for stage in range(len(replicas))
    ] == list(replicas)
    assert sorted(
        rank for ranks in content["stage_to_rank_map"].values() for rank in ranks
    ) == list(range(ranks))
    assert content["module_to_stage_map"] == [*range(len(replicas)), len(replicas) - 1]


def test_the_export_reports_different_updates(plan_of):
    """In PipeDream a stage without replicas updates after every minibatch; here all stages update
    together.
    """
    assert exported(plan_of(schedule("pipedream", 2, 1), (8, 7)), "pipedream").left_out == ()
    (note,) = exported(
        plan_of(schedule("pipedream", 2, 3, replicas=(3, 1)), (8, 7)), "pipedream"
    ).left_out
    assert (
        "PipeDream updates a stage on k ranks after every k minibatches (replicas [3, 1])" in note
    )


def test_synchronous_plans_and_other_weights_are_refused(plan_of):
    """It has no flush, and one way to keep weights."""
    with pytest.raises(
        PlanError, match=r"zb-v flushes after every batch.*\n.*zb-v has several stages on a rank"
    ):
        export(plan_of(schedule("zb-v", 8, 8), [8, *[1] * 7]), "pipedream")
    with pytest.raises(PlanError, match="weights 'vertical-sync'"):
        export(plan_of(schedule("pipedream", 2, 1), (8, 7), weights="vertical-sync"), "pipedream")

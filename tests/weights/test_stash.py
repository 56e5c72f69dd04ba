"""stash: a backward reads the version of its forward."""

from __future__ import annotations

import math

import pytest

from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.weight_uses import uses


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_stage_s_keeps_p_minus_s_versions_and_is_p_minus_1_minus_s_updates_late(stages):
    """Narayanan et al. 2019, 3.3; 2021, section 2: the price of stashing, stage by stage."""
    report = verify(schedule("pipedream", stages, 1))
    assert report.weights == "stash"
    assert report.versions == tuple(range(stages, 0, -1))
    assert report.staleness_max == tuple(range(stages - 1, -1, -1))


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_the_version_gap_is_that_of_the_general_formula(stages, micro_batches):
    """docs/literature/weight-versions.md: micro-batch j of batch t reads t - min(t, max(0, ceil((p - 1 - s - j) / m)));
    versions follow from it.
    """
    pipedream = schedule("pipedream", stages, micro_batches)
    weight_uses = uses(pipedream, weight_rule("stash"))
    for stage in range(stages):
        for number in (*range(40), *range(1000, 1010)):
            t, j = divmod(number, micro_batches)
            use = weight_uses.at(stage, number)
            assert (
                use.reads.forward
                == use.reads.backward
                == t - min(t, max(0, math.ceil((stages - 1 - stage - j) / micro_batches)))
            )
    report = verify(pipedream)
    oldest = tuple(math.ceil((stages - 1 - stage) / micro_batches) for stage in range(stages))
    assert report.staleness_max == oldest
    assert report.versions == tuple(age + 1 for age in oldest)


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_from_p_minus_1_micro_batches_on_nothing_is_more_than_one_update_late(stages):
    """docs/literature/one-f-one-b.md: all of PipeDream collapses to a delay of 1, and two versions."""
    report = verify(schedule("pipedream", stages, stages - 1))
    assert report.staleness_max == (1,) * (stages - 1) + (0,)
    assert max(report.versions) == 2


def test_replicas_of_a_stage_keep_what_their_own_part_of_the_batches_needs():
    """Two ranks take micro-batches in turn, and synchronise at every U; as many versions as updates
    pass one of them.
    """
    report = verify(schedule("pipedream", 3, 2, replicas=[2, 1, 1]))
    assert report.staleness_max[2] == 0
    assert report.versions == tuple(age + 1 for age in report.staleness_max)

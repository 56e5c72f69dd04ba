"""vertical-sync: one version for a micro-batch, on all stages."""

from __future__ import annotations

import math

import pytest

from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.rule_types import Place, Reads
from penstock.weights.weight_uses import uses


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_all_stages_are_p_minus_1_updates_late_and_keep_p_versions(stages):
    """docs/literature/pipedream.md: the option's price is that the last stage keeps as many versions as the
    first.
    """
    report = verify(schedule("pipedream", stages, 1), weights="vertical-sync")
    assert report.staleness_max == (stages - 1,) * stages
    assert report.versions == (stages,) * stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (4, 2), (5, 3), (4, 4), (3, 7)])
def test_a_micro_batch_reads_the_same_version_everywhere(stages, micro_batches):
    """That is all that it is for: gradients of one function, on weights that once stood side by
    side.
    """
    pipedream = schedule("pipedream", stages, micro_batches)
    weight_uses = uses(pipedream, weight_rule("vertical-sync"))
    for number in (*range(40), *range(10**6, 10**6 + 10)):
        reads = [weight_uses.at(stage, number).reads for stage in range(stages)]
        assert len(set(reads)) == 1
        assert (
            reads[0].forward
            == reads[0].backward
            == uses(pipedream, weight_rule("stash")).at(0, number).reads.forward
        )
    report = verify(pipedream, weights="vertical-sync")
    oldest = math.ceil((stages - 1) / micro_batches)
    assert report.staleness_max == (oldest,) * stages
    assert report.versions == (oldest + 1,) * stages


def test_a_version_that_this_stage_has_not_made_yet_is_read_all_the_same():
    """The check of versions refuses the program; another version would be another gradient."""
    place = Place(1, 2, 5, 0, 1, 3, 4, 3, 4, 5)
    assert weight_rule("vertical-sync").reads(place) == Reads(5, 5)

"""none: forwards and backwards read the newest weights."""

from __future__ import annotations

import pytest

from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.weight_uses import uses


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_forward_and_backward_are_p_minus_1_minus_s_versions_apart_and_one_is_kept(stages):
    """The discrepancy that stashing is against: docs/literature/weight-versions.md, the frame at m = 1."""
    pipedream = schedule("pipedream", stages, 1)
    weight_uses = uses(pipedream, weight_rule("none"))
    for stage in range(stages):
        for t in range(40):
            reads = weight_uses.at(stage, t).reads
            assert (reads.forward, reads.backward) == (t - min(t, stages - 1 - stage), t)
    report = verify(pipedream, weights="none")
    assert report.versions == (1,) * stages
    assert report.staleness_max == tuple(range(stages - 1, -1, -1))

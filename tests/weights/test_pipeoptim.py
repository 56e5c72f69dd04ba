"""pipeoptim: a forward predicts exactly the updates that come before its backward."""

from __future__ import annotations

import pytest

from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.weight_uses import uses

RULE = weight_rule("pipeoptim")


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_distance_is_p_minus_1_minus_s(stages):
    """Guan et al. 2023: s = D - rank - 1; their code looks one further."""
    weight_uses = uses(schedule("pipedream", stages, 1), RULE)
    for stage in range(stages):
        reads = weight_uses.at(stage, 50).reads
        assert (reads.forward_ahead, reads.backward_ahead) == (stages - 1 - stage, 0)


@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(2, 1), (4, 1), (4, 2), (5, 3), (8, 3), (4, 6)]
)
@pytest.mark.parametrize("copies", [1, 2])
def test_in_the_steady_state_it_predicts_the_version_that_the_backward_finds(
    stages, micro_batches, copies
):
    """That is the whole idea: forward and backward agree without a stash."""
    weight_uses = uses(schedule("pipedream", stages, micro_batches * copies, replicas=copies), RULE)
    for stage in range(stages):
        for number in range(100 * micro_batches, 104 * micro_batches):
            reads = weight_uses.at(stage, number).reads
            assert reads.forward + reads.forward_ahead == reads.backward


def test_one_version_is_kept():
    """M of weights, and a working copy."""
    assert verify(schedule("pipedream", 4, 1), weights="pipeoptim").versions == (1, 1, 1, 1)
    assert (RULE.extra, RULE.optimizers) == (1.0, ("SGD", "Adam", "AdamW", "RMSprop"))

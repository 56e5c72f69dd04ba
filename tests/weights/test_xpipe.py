"""xpipe: the first micro-batch of a batch predicts, and the others read its prediction."""

from __future__ import annotations

import pytest

from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.rule_types import Place
from penstock.weights.weight_uses import uses

RULE = weight_rule("xpipe")


@pytest.mark.parametrize(("stages", "micro_batches", "distances"), [
    (4, 1, [3, 2, 2, 2]), (4, 2, [2, 2, 2, 1]), (4, 4, [2, 1, 1, 1]), (8, 8, [2, 2, 2, 2, 2, 1, 1, 1])])  # fmt: skip
def test_forward_distances_are_those_of_the_table(stages, micro_batches, distances):
    """docs/literature/xpipe.md, rounded as Python does, half to even: (4 + 1 - 1/2 - 2) / 1 = 2.5 is 2, not
    3.
    """
    weight_uses = uses(schedule("xpipe", stages, micro_batches), RULE)
    assert [weight_uses.at(stage, 0).reads.forward_ahead for stage in range(stages)] == distances


@pytest.mark.parametrize(("stages", "micro_batches", "distances"), [
    (4, 1, [0, 0, 1, 1]), (4, 2, [0, 0, 1, 1]), (4, 4, [1, 1, 1, 1]), (8, 8, [1] * 8), (8, 1, [0, 0, 1, 1, 2, 2, 3, 3])])  # fmt: skip
def test_backward_distances_are_those_of_the_formula(stages, micro_batches, distances):
    """round((T + floor(r/2) - 1) / T), by hand; at T = 1 they are SpecTrain's."""
    weight_uses = uses(schedule("xpipe", stages, micro_batches), RULE)
    assert [weight_uses.at(stage, 0).reads.backward_ahead for stage in range(stages)] == distances


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 1), (4, 3), (4, 4), (6, 4), (3, 8)])
def test_all_of_a_batch_reads_what_its_bellwether_found(stages, micro_batches):
    """One prediction per batch and pass; an update that comes between its micro-batches does not
    change it.
    """
    xpipe = schedule("xpipe", stages, micro_batches)
    weight_uses = uses(xpipe, RULE)
    for stage in range(stages):
        for batch in range(20):
            batches = [
                weight_uses.at(stage, batch * micro_batches + j) for j in range(micro_batches)
            ]
            assert len({use.reads for use in batches}) == 1
            assert [use.first for use in batches] == [True] + [False] * (micro_batches - 1)
            gap = -(-(stages - 1 - stage) // micro_batches)
            assert batches[0].reads.forward == batch - min(batch, gap)
            assert batches[0].reads.backward == batch


def test_one_version_is_kept_and_its_optimizers_are_adams():
    """M of weights; the working copy and the two predictions come on top."""
    assert verify(schedule("xpipe", 4, 4)).versions == (1, 1, 1, 1)
    assert verify(schedule("xpipe", 4, 4)).staleness_max == (1, 1, 1, 0)
    assert (RULE.extra, RULE.optimizers) == (3.0, ("Adam", "AdamW"))


def test_with_replicas_distances_are_for_the_micro_batches_that_a_rank_has():
    """Each pipeline has a bellwether of its own, and T is what it runs of a batch."""
    plain, doubled = (
        uses(schedule("xpipe", 4, 2 * copies, replicas=copies), RULE) for copies in (1, 2)
    )
    for stage in range(4):
        assert doubled.at(stage, 40).reads.forward_ahead == plain.at(stage, 20).reads.forward_ahead
        assert (
            doubled.at(stage, 40).first,
            doubled.at(stage, 41).first,
            doubled.at(stage, 42).first,
        ) == (True, True, False)


def test_versions_are_those_of_the_first_forward_and_the_first_backward_of_the_batch():
    """Updates before a later micro-batch make no other prediction."""
    place = Place(
        0,
        2,
        batch=9,
        micro_batch=1,
        micro_batches=2,
        at_forward=6,
        at_backward=8,
        batch_at_forward=5,
        batch_at_backward=7,
        at_first_stage=6,
    )
    reads = RULE.reads(place)
    assert (reads.forward, reads.backward) == (5, 7)

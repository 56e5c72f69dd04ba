"""spectrain: both passes read weights predicted for the end of the batch's backward."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.compatibility import rule_of
from penstock.weights.weight_uses import uses

RULE = weight_rule("spectrain")


def test_distances_at_four_stages_are_those_of_the_paper():
    """docs/literature/spectrain.md: N = 4 has s_fwd 3, 2, 2, 1 and s_bwd 0, 0, 1, 1."""
    weight_uses = uses(schedule("pipedream", 4, 1), RULE)
    reads = [weight_uses.at(stage, 100).reads for stage in range(4)]
    assert [read.forward_ahead for read in reads] == [3, 2, 2, 1]
    assert [read.backward_ahead for read in reads] == [0, 0, 1, 1]
    assert [read.backward - read.forward for read in reads] == [3, 2, 1, 0]


@pytest.mark.parametrize("stages", range(1, 9))
def test_distances_count_the_updates_until_the_batch_has_come_back_to_the_first_stage(stages):
    """The paper's reason, on a timeline: U of a stage from the start of F (or B) to the end of B on
    stage 0, but for the batch's own.
    """
    pipedream = schedule("pipedream", stages, 1, batches=24)
    timeline = simulate_schedule(pipedream, Costs(forward=1, backward=1))
    at = {event.op: (event.start, event.end) for event in timeline.events if event.to_rank is None}
    weight_uses = uses(pipedream, RULE)
    t = 12
    for stage in range(stages):
        back = at[(Kind.B, 0, t)][1]
        updates = [
            start
            for (kind, of, version), (start, _) in at.items()
            if kind is Kind.U and of == stage and version != t + 1
        ]
        reads = weight_uses.at(stage, t).reads
        assert reads.forward_ahead == sum(
            at[Kind.F, stage, t][0] < start <= back for start in updates
        )
        assert reads.backward_ahead == sum(
            at[Kind.B, stage, t][0] < start <= back for start in updates
        )


def test_one_version_is_kept_and_staleness_is_told_without_the_prediction():
    """Memory M: the working copy comes on top. What is predicted cannot be promised."""
    report = verify(schedule("pipedream", 4, 1), weights="spectrain")
    assert report.versions == (1, 1, 1, 1)
    assert report.staleness_max == (3, 2, 1, 0)
    assert (RULE.extra, RULE.optimizers) == (1.0, ("SGD",))


def test_batches_of_several_micro_batches_are_refused():
    """Its distances count batches as micro-batches; those of `xpipe` are for several."""
    with pytest.raises(
        ScheduleError,
        match=r"pipedream has 2 on a rank: give micro_batches=1, or take 'xpipe' or 'pipeoptim'",
    ):
        verify(schedule("pipedream", 3, 2), weights="spectrain")
    assert (
        verify(schedule("pipedream", 3, 2, replicas=2), weights="spectrain").weights == "spectrain"
    )
    with pytest.raises(ScheduleError, match="pipedream has 2 on a rank: give micro_batches=1"):
        verify(schedule("pipedream", 2, 2, replicas=[2, 1]), weights="spectrain")


def test_copies_that_exchange_updates_in_waves_are_refused():
    """Its predictions know nothing of the updates of other copies."""
    with pytest.raises(ScheduleError, match="copies of a stage do not synchronise at every U"):
        rule_of(schedule("hetpipe", 2, 1), "spectrain")

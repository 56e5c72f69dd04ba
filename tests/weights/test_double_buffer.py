"""double-buffer: the version before the newest, for all of a batch and on all stages."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import WeightRule, weight_rule
from penstock.weights.compatibility import rule_of
from penstock.weights.weight_uses import readings, uses

SIZES = [(1, 1), (2, 2), (2, 5), (3, 3), (4, 4), (4, 7), (8, 8)]


@pytest.mark.parametrize("name", ["2bw", "pipedream"])
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_stage_keeps_two_versions_and_is_one_update_late(name, stages, micro_batches):
    """Narayanan et al. 2021, 3.1: W(t+1) = W(t) - lr grad(W(t-1)), whatever the depth."""
    family_schedule = schedule(name, stages, micro_batches)
    report = verify(family_schedule, weights="double-buffer")
    assert report.versions == (2,) * stages
    for ages in readings(family_schedule, weight_rule("double-buffer")).ages:
        assert ages == (0,) * micro_batches + (1,) * (len(ages) - micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_micro_batch_k_reads_the_version_of_the_papers_formula(stages, micro_batches):
    """max(floor((k - 1) / m) - 1, 0), k from 1, in both passes; batches 0 and 1 both read W(0)."""
    weight_uses = uses(schedule("2bw", stages, micro_batches), weight_rule("double-buffer"))
    for k in range(1, 60):
        expected = max((k - 1) // micro_batches - 1, 0)
        for stage in range(stages):
            reads = weight_uses.at(stage, k - 1).reads
            assert (reads.forward, reads.backward) == (expected, expected)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (3, 2), (4, 3), (4, 1), (8, 5)])
def test_with_fewer_micro_batches_than_stages_it_is_refused(stages, micro_batches):
    """The paper's condition, even where one less would do."""
    pipedream = schedule("pipedream", stages, micro_batches)
    match = rf"pipedream has {micro_batches} on a rank, and {stages} stages\. Give {stages} or more; {stages - 1} can still be sound"
    with pytest.raises(ScheduleError, match=match):
        rule_of(pipedream, "double-buffer")
    with pytest.raises(ScheduleError, match=match) as caught:
        verify(pipedream, weights="double-buffer")
    assert [finding.rule for finding in caught.value.findings] == ["weights"]


@pytest.mark.parametrize("stages", [3, 4, 6])
def test_without_the_condition_p_minus_1_is_sound_and_p_minus_2_reads_what_is_not_there(stages):
    """What the refusal says of itself: docs/literature/pipedream-2bw.md."""
    rule = WeightRule(
        "bare", weight_rule("double-buffer").reads, synchronous=False, source="a test"
    )
    assert readings(schedule("pipedream", stages, stages - 1), rule).versions == (2,) * stages
    with pytest.raises(
        ScheduleError, match=r"on rank 0 reads version \d+ of stage 0, where the newest is \d+"
    ):
        readings(schedule("pipedream", stages, stages - 2), rule)


def test_with_replicas_every_rank_needs_as_many_as_there_are_stages():
    """Two pipelines of two stages have two micro-batches of four each."""
    assert verify(schedule("pipedream", 2, 4, replicas=2), weights="double-buffer").versions == (
        2,
        2,
    )
    with pytest.raises(ScheduleError, match=r"has 1 on a rank, and 2 stages"):
        verify(schedule("pipedream", 2, 2, replicas=2), weights="double-buffer")
    with pytest.raises(ScheduleError, match=r"has 1 on a rank, and 2 stages"):
        verify(schedule("pipedream", 2, 2, replicas=[2, 1]), weights="double-buffer")


def test_copies_of_the_weights_that_take_turns_are_refused():
    """The version before the newest would be one of another copy."""
    with pytest.raises(ScheduleError, match="has 2 copies of the weights that take turns"):
        rule_of(schedule("avgpipe", 2, 2), "double-buffer")

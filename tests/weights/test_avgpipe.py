"""avgpipe: copies of the weights take turns, each drained before its update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.weight_uses import uses

RULE = weight_rule("avgpipe")


@pytest.mark.parametrize(
    ("stages", "micro_batches", "pipelines"),
    [(1, 1, 2), (2, 1, 2), (3, 2, 2), (4, 4, 2), (4, 2, 3), (4, 1, 5)],
)
def test_nothing_is_stale_and_a_version_of_every_copy_is_kept(stages, micro_batches, pipelines):
    """N M of weights, and gradients that agree with the weights that they update."""
    avgpipe = schedule("avgpipe", stages, micro_batches, pipelines=pipelines)
    report = verify(avgpipe)
    assert (report.weights, report.versions, report.staleness_max) == (
        "avgpipe",
        (pipelines,) * stages,
        (0,) * stages,
    )
    weight_uses = uses(avgpipe, RULE)
    for stage in range(stages):
        for number in (*range(40), *range(10**6, 10**6 + 40)):
            use = weight_uses.at(stage, number)
            assert use.reads.forward == use.reads.backward == number // micro_batches // pipelines
    assert RULE.extra == 2.0


def test_one_copy_of_the_weights_is_refused():
    """There is nothing to average."""
    with pytest.raises(
        ScheduleError,
        match=r"'avgpipe' averages several copies of the weights .* pipedream has one",
    ):
        verify(schedule("pipedream", 3, 1), weights="avgpipe")


def test_other_rules_are_refused_where_copies_take_turns():
    """They would train N models without saying so."""
    with pytest.raises(
        ScheduleError,
        match=r"avgpipe has 2 copies of the weights that take turns.*such as 'avgpipe'",
    ):
        verify(schedule("avgpipe", 3, 2), weights="stash")


def test_an_update_between_forward_and_backward_is_refused():
    """Two copies are too few for this order; the third batch begins before the first has been taken
    in.
    """
    text = "0F0 0F1 0F2 0B0 0U1 0B1 0U2 0B2 0U3"
    schedule = Schedule(
        Schedule.parse(text).programs,
        "early",
        synchronous=False,
        stream=Stream(3, "avgpipe", pipelines=2),
    )
    with pytest.raises(
        ScheduleError,
        match=r"an update of the same copy falls between forward and backward on stage 0 in batch 2",
    ):
        verify(schedule)


@pytest.mark.parametrize("weights", ["avgpipe", "hetpipe"])
def test_copies_that_take_turns_and_have_waves_are_refused(weights):
    """No rule both averages copies on the same ranks and exchanges waves."""
    avgpipe = schedule("avgpipe", 2, 2)
    both = replace(avgpipe, stream=replace(avgpipe.stream, waves=Waves(2)))
    with pytest.raises(ScheduleError, match=f"weight rule '{weights}' "):
        weight_rule(weights).check(both)

"""trace_versions: the version at every op, from one pass over the programs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.weights import slow

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.streaming.period import with_batches
from penstock.weights.rule_types import Place
from penstock.weights.version_trace import trace_versions


@given(slow.streams(pipelines=3))
@settings(deadline=None, max_examples=60)
def test_places_are_those_of_a_slow_count(schedule):
    """Rules depend on nothing else. The last gradient of a batch is that of its last B or W."""
    rows = [list(with_batches(program, schedule.micro_batches)) for program in schedule.programs]
    trace = trace_versions(rows, schedule.stages, schedule.stream.pipelines)
    for (stage, number), place in slow.places(schedule).items():
        assert trace.place(stage, number) == place
    last = {}
    for rank, row in enumerate(rows):
        for op, batch in row:
            if op.kind in (Kind.B, Kind.W):
                last[rank, op.stage, batch] = op.micro_batch
    assert {key: share.last_gradient for key, share in trace.shares.items()} == last


def test_a_split_backward_begins_with_i_and_has_its_gradient_with_w():
    """An update between them makes the gradient older, and changes nothing that I has read."""
    program = Schedule.parse("0F0 0I0 0F1 0U1 0W0 0I1 0W1 0U2").programs[0]
    trace = trace_versions([list(with_batches(program, 2))], 1)
    standing = trace.stages[0][0]
    assert (
        standing.at_forward,
        standing.at_backward,
        standing.at_gradient,
        standing.next_number,
    ) == (
        0,
        0,
        1,
        1,
    )
    assert trace.share(0, 1).last_gradient == 1


def test_a_place_some_periods_later_has_versions_moved_on_and_all_else_as_it_was():
    """So a few places answer for all."""
    place = Place(
        1,
        4,
        batch=7,
        micro_batch=0,
        micro_batches=2,
        at_forward=5,
        at_backward=7,
        batch_at_forward=5,
        batch_at_backward=7,
        at_first_stage=4,
    )
    assert place.later(batches=6, updates=3, updates_of_first_stage=2) == Place(
        1, 4, 13, 0, 2, 8, 10, 8, 10, 6
    )


@pytest.mark.parametrize("kind", ["B", "I", "W"])
def test_a_backward_without_a_forward_before_it_is_refused_with_its_rank(kind):
    """Also where the forward is on another rank, or follows."""
    for text in (f"0F0\n0{kind}0", f"\nrank 0 |\nrank 1 | 0{kind}0 0F0"):
        rows = [list(with_batches(program, 1)) for program in Schedule.parse(text).programs]
        with pytest.raises(ScheduleError, match=f"0{kind}0 on rank 1 has no forward before it"):
            trace_versions(rows, 1)


def test_a_batch_begins_at_its_first_forward_and_its_first_backward():
    """Rules that predict once per batch read what was the newest then, not what is at each op."""
    program = Schedule.parse("0F0 0F1 0F2 0B0 0B2 0B1 0U1 0F3 0B3 0U2").programs[0]
    trace = trace_versions([list(with_batches(program, 2))], 1)
    assert trace.place(0, 2) == Place(0, 1, 1, 0, 2, 0, 0, 0, 0, 0)
    assert trace.place(0, 3) == Place(0, 1, 1, 1, 2, 1, 1, 0, 0, 1)


def test_a_place_has_the_version_at_i_and_not_the_later_one_at_w():
    """The input gradient of I is taken with the weights that it reads."""
    program = Schedule.parse("0F0 0I0 0F1 0U1 0I1 0W0 0W1 0U2").programs[0]
    place = trace_versions([list(with_batches(program, 1))], 1).place(0, 0)
    assert (place.at_forward, place.at_backward, place.batch_at_backward) == (0, 0, 0)


def test_replicas_on_two_ranks_have_versions_and_next_forwards_of_their_own():
    """Their updates are numbered alike, and the last F of one is not followed by the first of the
    other.
    """
    text = "0F0 0B0 0U1 0F2 0B2 0U2\n0F1 0B1 0U1 0F3 0B3 0U2"
    rows = [list(with_batches(program, 2)) for program in Schedule.parse(text).programs]
    trace = trace_versions(rows, 1)
    micro_batches = trace.stages[0]
    assert [micro_batches[n].at_forward for n in range(4)] == [0, 0, 1, 1]
    assert [micro_batches[n].next_number for n in range(4)] == [2, 3, None, None]
    assert [micro_batches[n].rank for n in range(4)] == [0, 1, 0, 1]
    assert {key: share.count for key, share in trace.shares.items()} == {
        (rank, 0, batch): 1 for rank in range(2) for batch in range(2)
    }


def test_the_first_stage_may_be_ahead_of_a_later_one():
    """Stage 1 makes its first update after the forward that reads it on stage 0."""
    text = "0F0 0B0 0U1 0F1 0B1 0U2\n1F0 1B0 1F1 1U1 1B1 1U2"
    rows = [list(with_batches(program, 1)) for program in Schedule.parse(text).programs]
    place = trace_versions(rows, 2).place(1, 1)
    assert (place.at_forward, place.at_first_stage) == (0, 1)

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

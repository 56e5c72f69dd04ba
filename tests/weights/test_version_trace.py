"""trace_versions: the version at every op, from one pass over the programs."""

from __future__ import annotations

from hypothesis import given, settings
from tests.weights import slow

from penstock.schedule.op import Schedule
from penstock.schedule.streaming.period import with_batches
from penstock.weights.rule_types import Place
from penstock.weights.version_trace import trace_versions


@given(slow.streams(pipelines=3))
@settings(deadline=None, max_examples=60)
def test_places_are_those_of_a_slow_count(schedule):
    """Rules depend on nothing else."""
    rows = [list(with_batches(program, schedule.micro_batches)) for program in schedule.programs]
    trace = trace_versions(rows, schedule.stages, schedule.stream.pipelines)
    for (stage, number), place in slow.places(schedule).items():
        assert trace.place(stage, number) == place


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

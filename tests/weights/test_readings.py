"""Readings are those of the endless stream, however few batches its programs have."""

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.weights.catalogue import weight_rule
from penstock.weights.weight_uses import readings

STASH = weight_rule("stash")


@pytest.mark.parametrize("batches", [6, 7, 8, 30])
def test_versions_do_not_depend_on_how_many_batches_the_programs_show(batches):
    """A stretch that drains as soon as it is full holds fewer."""
    assert readings(schedule("pipedream", 4, 1, batches=batches), STASH).versions == (4, 3, 2, 1)


def test_the_oldest_gradients_are_among_the_readings():
    """p - 1 - s updates."""
    weight_readings = readings(schedule("pipedream", 8, 1), STASH)
    assert [max(ages) for ages in weight_readings.ages] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert weight_readings.versions == (8, 7, 6, 5, 4, 3, 2, 1)


def test_a_synchronous_schedule_and_a_stream_that_does_not_repeat_itself_are_as_they_are():
    """There is no more of them."""
    assert readings(schedule("1f1b", 2, 2), weight_rule("flush")).versions == (1, 1)
    custom_schedule = Schedule.parse("0F0 0F1 0B0 0U1 0B1 0U2", synchronous=False)
    custom_schedule = Schedule(custom_schedule.programs, synchronous=False, stream=Stream(2))
    assert readings(custom_schedule, STASH).versions == (2,)


def test_a_program_whose_loop_is_just_visible_has_the_readings_of_the_full_pipeline():
    """The start of the stream counts for the ages of its own gradients alone."""
    short = readings(schedule("pipedream", 4, 1, batches=6), STASH)
    assert short.ages[0] == (0, 1, 2, 3, 3, 3)
    assert short.max_staleness == (3, 2, 1, 0)
    assert short.mean_staleness == (3.0, 2.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("stages", "options", "across"),
    [
        (1, {"virtual_workers": 2, "in_flight": 1}, (0,)),
        (2, {"virtual_workers": 2, "in_flight": 2}, (2, 1)),
        (2, {"virtual_workers": 3, "in_flight": 2, "distance": 1}, (4, 3)),
        (2, {"virtual_workers": 2, "in_flight": 3, "distance": 4, "batches": 12}, (16, 15)),
        (2, {"virtual_workers": 1}, (0, 0)),
    ],
)
def test_what_a_batch_lacks_of_another_copy_is_counted_for_every_stage(stages, options, across):
    """(D + 1) Nm + s_local - 1 on the first stage, and less where less is in flight."""
    assert readings(schedule("hetpipe", stages, 1, **options), weight_rule("hetpipe")).across == (
        across
    )


def test_more_in_flight_than_a_wave_has_is_a_finding_of_waves():
    """Two batches are in flight on the first stage; with a wave of two, one may be missing."""
    hetpipe = schedule("hetpipe", 2, 1, virtual_workers=2, in_flight=2)
    assert readings(hetpipe, weight_rule("hetpipe")).max_staleness == (1, 0)
    short = replace(hetpipe, stream=replace(hetpipe.stream, waves=Waves(length=1)))
    with pytest.raises(ScheduleError, match=r"has 1: .* so at most 0 may be missing") as caught:
        readings(short, weight_rule("hetpipe"))
    rules = [finding.rule for finding in caught.value.findings]
    assert set(rules) == {"wave"}

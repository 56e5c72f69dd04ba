"""Readings are those of the endless stream, however few batches its programs have."""

import pytest

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.streaming.streams import Stream
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

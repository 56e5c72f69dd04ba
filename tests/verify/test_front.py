"""verify: one function for schedules with and without their transfers."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import ScheduleError, SettingError, UnknownName
from penstock.schedule.catalogue import schedule
from penstock.schedule.lower import LoweredSchedule, Transfer, lower


def test_a_lowered_schedule_is_as_sound_as_the_schedule():
    """Same peaks, same staleness; the depth is that of the transfers where they stand."""
    zb_v = schedule("zb-v", 6, 6)
    plain, lowered = ps.verify(zb_v), ps.verify(lower(zb_v, ahead=2))
    assert lowered.peak_on_rank == plain.peak_on_rank
    assert lowered.staleness_max == plain.staleness_max


def test_receives_in_another_order_than_the_sends_are_found():
    """Backends without tags would hand one micro-batch over as another."""
    programs = [list(program) for program in lower(schedule("gpipe", 2, 3)).programs]
    first, second = [i for i, action in enumerate(programs[1]) if isinstance(action, Transfer)][:2]
    programs[1][first], programs[1][second] = programs[1][second], programs[1][first]
    with pytest.raises(ScheduleError, match="receive order") as caught:
        ps.verify(LoweredSchedule(tuple(map(tuple, programs))))
    assert "rank 1" in str(caught.value)


def test_what_is_no_schedule_is_refused_by_its_kind():
    """A plan is near enough to be tried."""
    with pytest.raises(SettingError, match="verify takes a Schedule or a LoweredSchedule, not str"):
        ps.verify("1f1b")


@pytest.mark.parametrize("form", [schedule, lambda *numbers: lower(schedule(*numbers))])
def test_limit_and_weight_rule_count_with_and_without_transfers(form):
    """Both forms take the same arguments."""
    case = form("1f1b", 3, 6)
    assert ps.verify(case, in_flight_limit=3).peak_on_rank == (3, 2, 1)
    with pytest.raises(ScheduleError, match="rank 0 holds 3 micro-batches in flight"):
        ps.verify(case, in_flight_limit=2)
    with pytest.raises(UnknownName, match="stach"):
        ps.verify(case, weights="stach")

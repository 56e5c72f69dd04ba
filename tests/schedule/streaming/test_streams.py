"""Stream and Waves: their checks, and which waves a copy waits for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.op import Op
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.schedule.updates import awaited_update


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True, None])
@pytest.mark.parametrize(
    ("word", "make"),
    [
        ("batches", Stream),
        ("pipelines", lambda number: Stream(1, pipelines=number)),
        ("wave length", lambda number: Stream(1, waves=Waves(number))),
    ],
)
def test_numbers_that_count_nothing_are_refused(word, make, wrong):
    """A stream of no batches would have no programs, and a wave of no updates no end."""
    with pytest.raises(ScheduleError, match=f"a stream's {word} is 1 or more, not {wrong!r}"):
        make(wrong)


def test_a_distance_may_be_none_but_not_below():
    """At 0 all copies end their waves together; less would be a wave that has not been."""
    assert Stream(1, waves=Waves(2, 0)).waves == Waves(2)
    with pytest.raises(ScheduleError, match="a stream's wave distance is 0 or more, not -1"):
        Stream(1, waves=Waves(2, -1))


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 60))
def test_the_last_update_of_a_wave_waits_for_that_of_an_earlier_wave(length, distance, version):
    """Park et al. 2020: a virtual worker may be D waves ahead of the slowest, and inside a wave
    no copy waits.
    """
    awaited = Waves(length, distance).awaited(version)
    wave = version / length  # waves done with this update
    if wave == int(wave) > distance:
        assert awaited == (wave - distance) * length
    else:
        assert awaited is None


def test_without_waves_every_update_meets_that_of_the_other_copies():
    """Gradients are added up; with waves they are not, and who waits for whom depends on the
    version.
    """
    update = Op.parse("3U4")
    assert (
        awaited_update(update, None)
        == awaited_update(update, Stream(9))
        == awaited_update(update, Stream(9, waves=Waves(2)))
        == update
    )
    assert awaited_update(update, Stream(9, waves=Waves(3))) is None
    assert awaited_update(update, Stream(9, waves=Waves(2, 1))) == Op.parse("3U2")
    assert awaited_update(update, Stream(9, waves=Waves(2, 2))) is None

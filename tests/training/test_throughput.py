"""The meter of a stream is taken where it is full."""

from __future__ import annotations

import pytest
import torch

from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.steady_state import steady
from penstock.training import throughput as module
from penstock.training.throughput import (
    BatchFeed,
    ThroughputMeter,
    measured_steady_state,
    median_recording,
)


class Clock:
    """A clock that advances only when the test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock that the module sees."""
    fake_clock = Clock()
    monkeypatch.setattr(module, "time", fake_clock)
    return fake_clock


def batches(clock, sizes, made_s):
    """Batches of the given sizes, each of which takes `made_s` seconds to make."""
    for size in sizes:
        clock.now += made_s
        yield torch.zeros(size, 1), torch.zeros(size)


def pipeline(clock, feed, *, late, fill_s=10.0, batch_s=2.0, drain_s=5.0, pause_s=0.0):
    """A stream whose losses arrive some batches late, with a pause before the sixth batch ends."""
    count = 0
    for number, _ in enumerate(feed):
        clock.now += (fill_s if number < late else batch_s) + pause_s * (number == 5)
        if number >= late:
            yield torch.tensor(float(count))
            count += 1
    clock.now += drain_s
    for _ in range(count, feed.count):
        yield torch.tensor(float(count))
        count += 1


def test_a_pause_does_not_stand_for_all_batches(clock):
    """A machine that was suspended for a minute did not make every batch of the epoch slower; a few
    batches do not tell a pause from a slow run.
    """
    for count, expected in ((30, 2.0), (8, (60 + 5 * 2) / 5)):
        feed = BatchFeed(batches(clock, [4] * count, made_s=0.0))
        meter = ThroughputMeter(feed, batch=4)
        for _ in meter.losses(pipeline(clock, feed, late=2, pause_s=60.0)):
            pass
        assert meter.seconds_per_batch == expected


def test_filling_draining_and_making_batches_do_not_count(clock):
    """What the plan predicts is the time of a batch in a full pipeline."""
    feed = BatchFeed(batches(clock, [4] * 8, made_s=100.0))
    meter = ThroughputMeter(feed, batch=4)
    times = [
        (float(loss), seconds) for loss, seconds in meter.losses(pipeline(clock, feed, late=2))
    ]
    assert [loss for loss, _ in times] == list(range(8))
    assert meter.seconds_per_batch == 2
    assert [seconds for _, seconds in times] == [
        22,
        2,
        2,
        2,
        2,
        2,
        2.5,
        2.5,
    ]  # the drain is shared by those that it brings
    assert feed.exhausted
    assert list(feed.sizes) == [4] * 8


def test_a_small_last_batch_does_not_count(clock):
    """It is not one as it was planned."""
    feed = BatchFeed(batches(clock, [4, 4, 4, 4, 1], made_s=0.0))
    meter = ThroughputMeter(feed, batch=4)
    for _ in meter.losses(pipeline(clock, feed, late=1)):
        clock.now += 1000.0  # what is done between losses is not the pipeline's time
    assert meter._counted[-1] == (4, 10 + 3 * 2)
    assert meter.seconds_per_batch == 2


def test_a_stream_that_is_never_full_counts_as_a_whole(clock):
    """Better than nothing."""
    feed = BatchFeed(batches(clock, [4, 4], made_s=0.0))
    meter = ThroughputMeter(feed, batch=4)
    assert len(list(meter.losses(pipeline(clock, feed, late=3)))) == 2
    assert meter.seconds_per_batch == (10 + 10 + 5) / 2


def test_the_steady_state_of_a_timeline_is_by_the_pace():
    """Work of whole batches, held against the time that they take when others run beside them."""
    program, costs = schedule("pipedream", 3, 2, batches=6), Costs(forward=[1, 2, 1], backward=2)
    predicted = steady(program, costs)
    measured = measured_steady_state(
        simulate_schedule(program, costs), predicted.seconds_per_batch, 2
    )
    assert measured.batches == 6
    assert measured.bubble_ratio == pytest.approx(predicted.bubble_ratio)


def test_the_median_timeline_is_neither_the_slowest_nor_the_last():
    """Of an even number the shorter of the two in the middle: it is one that was measured."""
    timelines = [
        simulate_schedule(schedule("1f1b", 2, 2), Costs(forward=seconds))
        for seconds in (3.0, 1.0, 9.0, 2.0)
    ]
    recordings = [(timeline, number + 0.5) for number, timeline in enumerate(timelines)]
    assert median_recording(recordings) == (timelines[3], 3.5)
    assert median_recording(recordings[:3]) == (timelines[0], 0.5)
    assert median_recording(recordings[2:3]) == (timelines[2], 2.5)

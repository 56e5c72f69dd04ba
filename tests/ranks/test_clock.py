"""Clocks of devices after hours of running, with events that round as those of CUDA."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch

from penstock.errors import RunError
from penstock.ranks.clock import EventClock, HostClock, clock_for

HOURS_S = 10 * 3600.0


class Device:
    """A device and a host with simulated clocks; the device's clock runs a little fast."""

    def __init__(self, fast=0.0):
        self.now_s = 1000.0
        self.fast = fast
        self.waits = 0

    def record(self):
        """Record an event at the current time."""
        return Event(self, self.now_s * (1 + self.fast))

    def host_s(self):
        """Return the time of the host's clock."""
        return self.now_s


class Event:
    """An event at a time of the device's clock."""

    def __init__(self, device, at_s):
        self.device, self.at_s = device, at_s

    def synchronize(self):
        """Count the call."""
        self.device.waits += 1

    def elapsed_time(self, end):
        """Return milliseconds, rounded to 32 bits."""
        milliseconds = (end.at_s - self.at_s) * 1e3
        return struct.unpack("f", struct.pack("f", milliseconds))[0]


def batch(device, clock, seconds):
    """Return the marks of consecutive ops of the given durations in seconds."""
    clock.begin()
    marks = [clock.mark()]
    for op_s in seconds:
        device.now_s += op_s
        marks.append(clock.mark())
    return marks


def test_ops_of_microseconds_are_resolved_after_hours():
    """Milliseconds since the pipeline was constructed would have a resolution of 4 ms by then."""
    device = Device()
    clock = EventClock(device.record, device.host_s)
    device.now_s += HOURS_S
    times = [clock.seconds(mark) for mark in batch(device, clock, [5e-6, 7e-6, 3e-6])]
    lengths = [end - start for start, end in itertools.pairwise(times)]
    assert lengths == pytest.approx([5e-6, 7e-6, 3e-6], abs=1e-9)
    assert times[0] == pytest.approx(1000.0 + HOURS_S, abs=1e-6)


def test_times_read_long_after_the_batch_keep_their_distances():
    """A timeline may be requested at the end of the run."""
    device = Device()
    clock = EventClock(device.record, device.host_s)
    marks = batch(device, clock, [5e-6, 7e-6])
    device.now_s += HOURS_S
    times = [clock.seconds(mark) for mark in marks]
    assert times[2] - times[1] == pytest.approx(7e-6, abs=1e-9)
    assert times[0] == pytest.approx(1000.0, abs=0.01)


def test_times_read_one_after_another_keep_their_distances():
    """The origin of a batch is located once: meanwhile the clock of the device runs off."""
    device = Device(fast=1e-5)
    clock = EventClock(device.record, device.host_s)
    marks = batch(device, clock, [5e-6, 7e-6])
    times = []
    for mark in marks:
        device.now_s += 60.0
        times.append(clock.seconds(mark))
    assert times[2] - times[1] == pytest.approx(7e-6, abs=1e-9)
    assert device.waits == 1 + len(marks)


def test_a_device_whose_clock_runs_fast_is_not_ahead_of_the_host_after_hours():
    """Otherwise the clocks of two GPUs would differ by milliseconds per hour."""
    device = Device(fast=1e-5)
    clock = EventClock(device.record, device.host_s)
    device.now_s += HOURS_S
    times = [clock.seconds(mark) for mark in batch(device, clock, [0.5, 0.5])]
    assert times[2] == pytest.approx(1000.0 + HOURS_S + 1.0, abs=2e-5)


def test_the_host_does_not_wait_before_a_time_is_read():
    """The host may be whole batches ahead of the device."""
    device = Device()
    clock = EventClock(device.record, device.host_s)
    marks = batch(device, clock, [0.1] * 10)
    assert device.waits == 0
    clock.seconds(marks[0])
    assert device.waits == 2


def test_marks_of_an_earlier_batch_keep_their_origin():
    """A stream continues while marks of earlier batches are stored."""
    device = Device()
    clock = EventClock(device.record, device.host_s)
    first = batch(device, clock, [1e-5])
    device.now_s += HOURS_S
    second = batch(device, clock, [1e-5])
    assert clock.seconds(second[1]) - clock.seconds(second[0]) == pytest.approx(1e-5, abs=1e-9)
    assert clock.seconds(first[1]) - clock.seconds(first[0]) == pytest.approx(1e-5, abs=1e-9)


def test_the_cpu_is_timed_by_the_host():
    """The host waits while the CPU computes."""
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    clock.begin()
    start, end = clock.mark(), clock.mark()
    assert clock.seconds(start) <= clock.seconds(end)


def test_no_event_is_recorded_while_ops_are_captured():
    """A query of such an event would end the capture. Later batches have times again."""
    device, capturing = Device(), [False]
    clock = EventClock(device.record, device.host_s, lambda: capturing[0])
    before = batch(device, clock, [1e-5])
    capturing[0] = True
    captured = batch(device, clock, [1e-5])
    capturing[0] = False
    assert captured == [None, None]
    with pytest.raises(RunError, match="captured as a graph, which has no times"):
        clock.seconds(captured[0])
    for marks in before, batch(device, clock, [1e-5]):
        assert clock.seconds(marks[1]) - clock.seconds(marks[0]) == pytest.approx(1e-5, abs=1e-9)


def test_seconds_between_two_marks_are_known_when_the_device_has_reached_the_later_one():
    """The host does not wait for it; marks of captured ops have no times."""
    device, capturing = Device(), [False]
    clock = EventClock(device.record, device.host_s, lambda: capturing[0])
    start, end = batch(device, clock, [0.25])
    reached = []
    end[1].query = lambda: reached.append(1) or len(reached) > 1
    assert clock.elapsed(start, end) is None
    assert clock.elapsed(start, end) == pytest.approx(0.25)
    assert device.waits == 0
    assert clock.elapsed(None, end) is None
    assert clock.elapsed(start, None) is None
    assert len(reached) == 2
    capturing[0] = True
    assert clock.elapsed(start, end) is None
    assert len(reached) == 2, "a query would end the capture"


def test_seconds_between_two_marks_of_the_host_are_their_difference():
    """The host has reached both."""
    assert HostClock().elapsed(2.0, 2.5) == 0.5
    assert HostClock().seconds(7.0) == 7.0


def test_ops_of_a_gpu_are_timed_in_the_current_stream_of_their_device(monkeypatch):
    """Events without timing have no times; other devices compute while the host waits."""
    recorded = []

    class CudaEvent:
        """An event of torch."""

        def __init__(self, *, enable_timing):
            self.timing = enable_timing

        def record(self, stream):
            """Note where."""
            recorded.append((self.timing, stream))

    monkeypatch.setattr(torch.cuda, "Event", CudaEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    clock = clock_for(torch.device("cuda", 1))
    assert isinstance(clock, EventClock)
    clock.mark()
    assert recorded == [(True, "stream of cuda:1")] * 2
    assert isinstance(clock_for(torch.device("meta")), HostClock)


def test_marks_within_a_capture_are_none_though_the_batch_began_before_it():
    """The batch has an origin then, and such an event would belong to the graph."""
    device, capturing = Device(), [False]
    clock = EventClock(device.record, device.host_s, lambda: capturing[0])
    clock.begin()
    capturing[0] = True
    assert clock.mark() is None
    capturing[0] = False
    assert clock.seconds(clock.mark()) == pytest.approx(1000.0)


def test_marks_after_a_capture_are_none_though_it_has_ended_within_the_batch():
    """The batch has no origin, from which its ops would be timed. The next one has."""
    device, capturing = Device(), [True]
    clock = EventClock(device.record, device.host_s, lambda: capturing[0])
    capturing[0] = False
    assert clock.mark() is None
    with pytest.raises(RunError, match="captured as a graph"):
        clock.seconds(clock.mark())
    clock.begin()
    assert clock.seconds(clock.mark()) == pytest.approx(1000.0)

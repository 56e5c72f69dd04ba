"""Layers on a queue are timed by events, with no wait of the host between them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import nn

from penstock.measure.profiler import host_timings
from penstock.measure.stopwatch import EventStopwatch, HostStopwatch, stopwatch_for
from penstock.measure.timed_passes import PHASES, TimedPasses


@dataclass
class Queue:
    """A device whose work comes 2 ms later with every mark, and is done when the host waits for it."""

    log: list[str] = field(default_factory=list)
    numbers: itertools.count = field(default_factory=itertools.count)

    def record(self):
        """Record an event at the end of the queue."""
        self.log.append("mark")
        return Event(self, next(self.numbers))

    def synchronize(self):
        """Wait until the queue is empty."""
        self.log.append("wait")


@dataclass
class Event:
    """A mark, whose time is there after a wait."""

    queue: Queue
    number: int

    def elapsed_time(self, end):
        """Return milliseconds to `end`, as torch.cuda.Event does."""
        assert self.queue.log[-1] == "wait", "an event is read before the queue has come to it"
        return 2.0 * (end.number - self.number)


def test_events_are_read_in_seconds_after_one_wait():
    """torch gives milliseconds, and refuses events that the queue has not come to."""
    queue = Queue()
    watch = EventStopwatch(queue.record, queue.synchronize)
    marks = [watch.mark() for _ in range(3)]
    assert watch.seconds([(marks[0], marks[1]), (marks[0], marks[2])]) == [0.002, 0.004]
    assert queue.log.count("wait") == 1


def test_a_pass_over_a_queue_does_not_wait_between_layers():
    """A wait around every layer counts launch latency and wake-up as work of the layer."""
    queue = Queue()
    modules = [nn.Linear(4, 4) for _ in range(5)]
    names = [f"l{index}" for index in range(5)]
    watch = EventStopwatch(queue.record, queue.synchronize)
    passes = TimedPasses(modules, False, torch.device("cpu"), names, watch)
    queue.log.clear()
    row = passes.run(torch.ones(2, 4))
    first_wait = queue.log.index("wait")
    # Forward twice, backward, input gradients and weight gradients: two marks for each layer.
    assert queue.log[:first_wait] == ["mark"] * 50
    assert "mark" not in queue.log[first_wait:]
    assert sorted(PHASES) == sorted(row.by_phase)


def test_a_cpu_is_timed_by_the_hosts_clock():
    """Its work is done when the call returns."""
    watch = stopwatch_for(torch.device("cpu"))
    assert isinstance(watch, HostStopwatch)
    assert watch.seconds([(1.0, 1.5), (2.0, 4.0)]) == [0.5, 2.0]


def test_the_hosts_own_seconds_of_each_layer_are_measured_beside_the_devices():
    """Where kernels are short, a step takes the time of their launches."""
    queue = Queue()
    watch = EventStopwatch(queue.record, queue.synchronize)
    modules, names = [nn.Linear(4, 4), nn.Linear(4, 4)], ["a", "b"]
    passes = TimedPasses(modules, False, torch.device("cpu"), names, watch)
    row = passes.run(torch.ones(2, 4))
    assert set(row.host) == {"forward", "backward"}
    assert [len(times) for times in row.host.values()] == [2, 2]
    assert all(host_s > 0 for times in row.host.values() for host_s in times)
    fields = host_timings((2,), [{phase: times[:1] for phase, times in row.host.items()}])
    assert set(fields) == {"host_forward", "host_backward"}
    assert fields["host_forward"].sizes == (2,)


def test_a_cpu_has_no_seconds_of_the_host_beside_its_own():
    """It does the work itself."""
    modules = [nn.Linear(4, 4)]
    passes = TimedPasses(modules, False, torch.device("cpu"), ["a"])
    assert passes.run(torch.ones(2, 4)).host == {}
    assert host_timings((2,), [{}]) == {}

"""Ranks that become slower, or are slower than planned, are named."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from tests.time_limits import HANG_S
from torch import nn
from torch.distributed import HashStore

import penstock as ps
from penstock.ranks.clock import EventClock, HostClock
from penstock.runtime.slow_ranks import BusyTimes, SlowRanks, busy_seconds
from penstock.schedule.op import Op

HOSTS = ["a", "b"]


def test_a_rank_that_becomes_slower_is_named_once_and_again_after_a_while():
    """With its host and the ratio to its own best time, after two windows; a line says when it is
    over.
    """
    slow_ranks = SlowRanks([0.0, 0.0], HOSTS)
    usual, slow = {0: 0.010, 1: 0.020}, {0: 0.011, 1: 0.050}
    assert slow_ranks.compare(usual) is None
    assert slow_ranks.compare(usual) is None
    line = "slow: rank 1 (b) computes 2.5 times as long as before, 50 ms a step"
    lines = [slow_ranks.compare(slow) for _ in range(13)]
    assert lines == [None, line, *[None] * 9, line, None]
    assert slow_ranks.compare(usual) is None
    assert slow_ranks.compare(usual) == "no rank is slow any more"


def test_single_slow_windows_are_other_programs():
    """One of three is not named, and one usual window of three does not end what is."""
    slow_ranks = SlowRanks([0.0, 0.0], HOSTS)
    usual, slow = {0: 0.010, 1: 0.020}, {0: 0.011, 1: 0.050}
    by_turns = [slow_ranks.compare(times) for times in (usual, slow, usual, usual, slow, usual)]
    assert by_turns == [None] * 6
    lines = [slow_ranks.compare(times) is None for times in (slow, slow, usual, slow, slow, usual)]
    assert lines == [False, True, True, True, True, True]


@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_a_rank_that_is_slower_than_planned_is_named_from_the_start(factor):
    """A plan that is wrong by one factor everywhere is as good as a right one."""
    slow_ranks = SlowRanks([0.010, 0.020], HOSTS)
    assert slow_ranks.compare({0: 0.011 * factor, 1: 0.019 * factor}) is None
    slow_ranks = SlowRanks([0.010, 0.020], HOSTS)
    assert slow_ranks.compare({0: 0.010 * factor, 1: 0.040 * factor}) is None
    line = slow_ranks.compare({0: 0.010 * factor, 1: 0.040 * factor})
    assert line is not None
    assert "rank 1 (b) computes 2.0 times as long as planned, relative to the other ranks" in line


def test_ranks_that_have_not_published_yet_are_not_compared():
    """The comparison waits for nobody."""
    slow_ranks = SlowRanks([0.010, 0.020], HOSTS)
    assert slow_ranks.compare({}) is None
    assert slow_ranks.compare({1: 0.5}) is None


class Event:
    """An event of a device, which has reached it or has not."""

    def __init__(self, at_ms, reached):
        self.at_ms, self.reached = at_ms, reached

    def query(self):
        """Return whether the device has reached the event."""
        return self.reached

    def synchronize(self):
        """Fail: nothing may wait for the device."""
        raise AssertionError

    def elapsed_time(self, end):
        """Return milliseconds."""
        return end.at_ms - self.at_ms


@pytest.mark.parametrize(("reached", "seconds"), [(True, 0.003), (False, None)])
def test_a_device_is_not_waited_for(reached, seconds):
    """A step that the device has not finished is left out."""
    events = iter([Event(0.0, True), Event(5.0, True), Event(8.0, reached)])
    clock = EventClock(lambda: next(events))
    marks = {Op.parse("0F0"): (clock.mark(), clock.mark())}
    assert busy_seconds(clock, marks) == pytest.approx(seconds)


def test_no_event_is_queried_while_ops_are_captured():
    """A query would end the capture, also one of an event from before it."""
    capturing = [False]
    clock = EventClock(lambda: Event(0.0, reached=True), captures=lambda: capturing[0])
    start, end = clock.mark(), clock.mark()
    assert clock.elapsed(start, end) == 0.0
    capturing[0] = True
    assert clock.elapsed(start, end) is None


def test_updates_and_waits_do_not_count():
    """An update waits for the other replicas, so it is long on the fast ranks."""
    marks = {Op.parse("0F0"): (1.0, 1.5), Op.parse("0B0"): (2.0, 3.0), Op.parse("0U1"): (3.0, 9.0)}
    assert busy_seconds(HostClock(), marks) == pytest.approx(1.5)


class Repeated(nn.Module):
    """A layer that does its work `times` times."""

    def __init__(self):
        super().__init__()
        self.linear, self.times = nn.Linear(64, 64), 1

    def forward(self, x):
        """Compute, several times."""
        for _ in range(self.times):
            y = self.linear(x)
        return y


def test_the_thread_that_publishes_ends_when_the_pipeline_is_closed():
    """A program may make many pipelines."""
    exchange = SimpleNamespace(store=HashStore(), rank=1, size=2, hosts=HOSTS)
    setting = SimpleNamespace(planned_busy_s={}, schedule=ps.schedule("1f1b", 2, 2))
    times = BusyTimes(exchange, setting)
    times._enqueue(0.5)
    exchange.store.wait(["busy/1"], timedelta(seconds=HANG_S))
    thread = times._thread
    times.close()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_window_has_the_steps_since_the_last_one():
    """Their median, at the earliest after a number of steps and of seconds; the last step's times
    may not be known yet.
    """
    exchange = SimpleNamespace(store=HashStore(), rank=1, size=2, hosts=HOSTS)
    setting = SimpleNamespace(planned_busy_s={}, schedule=ps.schedule("1f1b", 2, 2))
    times = BusyTimes(exchange, setting)
    times._window, times._window_s = 3, 0.0
    medians = []
    times._enqueue = medians.append
    interpreter = SimpleNamespace(stages={1: None}, clock=HostClock(), marks={})
    for seconds in (1.0, 5.0, 2.0, 7.0, 7.0, 9.0, 1.0):
        interpreter.marks = {Op.parse("1F0"): (10.0, 10.0 + seconds)}
        times.step({1: interpreter})
    assert medians == [2.0, 7.0]
    times._window_s = 1e9
    for _ in range(9):
        times.step({1: interpreter})
    assert medians == [2.0, 7.0]
    idle = BusyTimes(exchange, setting)
    idle.step({1: SimpleNamespace(stages={})})
    assert idle._pending is None


def _lines():
    """Train with a rank that does 200 times its work after a while; return what was logged, and
    whether the pipeline has left a thread.
    """
    import torch.distributed as dist

    lines: list[str] = []
    logger = logging.getLogger("penstock")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    torch.manual_seed(0)
    layers = [Repeated(), Repeated()]
    pipe = ps.Pipeline(
        layers, loss=nn.functional.mse_loss, balance=[1, 1], micro_batches=2, deadline_s=60
    )
    busy_times = pipe._busy_times
    busy_times._window, busy_times._window_s = 4, 0.0
    # Without the thread, each comparison sees at least the window before it.
    enqueue, busy_times._enqueue = busy_times._enqueue, busy_times._publish
    x = torch.randn(8, 64)
    for step in range(60):
        if step == 12 and dist.get_rank() == 1:
            layers[1].times = 200
        pipe.train_batch(x, x)
    pipe._world.barrier()
    enqueue(0.0)
    thread = busy_times._thread
    pipe.close()
    thread.join(HANG_S)
    return [line for line in lines if "times as long" in line], thread.is_alive()


def test_a_rank_that_slows_down_in_a_run_is_named():
    """Rank 0 logs it; the other ranks log nothing."""
    (first, *threads), (second, *more_threads) = ps.launch(_lines, 2, threads=1)
    assert any("rank 1" in line and "times as long as before" in line for line in first)
    assert second == []
    assert not any(threads + more_threads)

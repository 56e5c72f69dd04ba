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
from penstock.runtime import slow_ranks as module
from penstock.runtime.slow_ranks import BusyTimes, SlowRanks, busy_seconds, planned_seconds
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
    assert [slow_ranks.compare(usual) for _ in range(25)] == [None] * 25


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
    """An update waits for the other replicas, and an evict or load op for its partner: these are
    long on the fast ranks.
    """
    seconds = {
        "0F0": 1.0,
        "0B0": 2.0,
        "0I1": 4.0,
        "0W1": 8.0,
        "0E0": 16.0,
        "0L0": 32.0,
        "0U1": 64.0,
    }
    marks = {Op.parse(text): (3.0, 3.0 + length) for text, length in seconds.items()}
    assert busy_seconds(HostClock(), marks) == 1.0 + 2.0 + 4.0 + 8.0


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
        # The interpreter uses its dictionary of marks again.
        interpreter.marks[Op.parse("1F0")] = 10.0, 10.0 + seconds
        times.step({1: interpreter})
    assert medians == [2.0, 7.0]
    times._window_s = 1e9
    for _ in range(9):
        times.step({1: interpreter})
    assert medians == [2.0, 7.0]
    idle = BusyTimes(exchange, setting)
    idle.step({1: SimpleNamespace(stages={})})
    assert idle._pending is None


def test_short_steps_are_sampled(monkeypatch):
    """At most 100 in the seconds of a window: to add up the times of a step takes time."""
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("penstock.runtime.slow_ranks.time", clock)
    times, _ = busy_times(1)
    times._window_s = 400.0
    interpreter = SimpleNamespace(stages={1: None}, clock=HostClock(), marks={})
    for number in range(101):
        now_s = float(number)
        interpreter.marks = {Op.parse("1F0"): (0.0, float(number))}
        times.step({1: interpreter})
    # Each is added up at the next sample.
    assert times._steps == [float(number) for number in range(0, 100, 4)]


def test_a_window_lasts_for_its_seconds_from_the_end_of_the_last_one(monkeypatch):
    """A fast rank would else publish after every step."""
    exchange = SimpleNamespace(store=HashStore(), rank=1, size=2, hosts=HOSTS)
    setting = SimpleNamespace(planned_busy_s={}, schedule=ps.schedule("1f1b", 2, 2))
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    times = BusyTimes(exchange, setting)
    times._window, times._window_s = 1, 10.0
    published = []
    times._enqueue = lambda median_s: published.append(now[0])
    interpreter = SimpleNamespace(stages={1: None}, clock=HostClock(), marks={})
    while now[0] < 140.0:
        times.step({1: interpreter})
        now[0] += 4.0
    assert published == [112.0, 124.0, 136.0]


def test_steps_that_a_device_has_not_finished_are_left_out():
    """Counted as 0, they would make the rank look fast."""
    exchange = SimpleNamespace(store=HashStore(), rank=1, size=2, hosts=HOSTS)
    setting = SimpleNamespace(planned_busy_s={}, schedule=ps.schedule("1f1b", 2, 2))
    times = BusyTimes(exchange, setting)
    times._window, times._window_s = 2, 0.0
    medians = []
    times._enqueue = medians.append
    times_s = iter([2.0, None, None, 4.0, 9.0])
    clock = SimpleNamespace(elapsed=lambda start, end: next(times_s))
    interpreter = SimpleNamespace(stages={1: None}, clock=clock, marks={Op.parse("1F0"): (0, 1)})
    for _ in range(5):
        times.step({1: interpreter})
    assert medians == [3.0]


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


def line_after(slow_ranks, *windows):
    """Return what is said after the last of some windows."""
    for seconds in windows:
        line = slow_ranks.compare(seconds)
    return line


@pytest.mark.parametrize(
    ("usual_s", "slow_s", "is_slow"),
    [
        (0.100, 0.129, False),
        (0.100, 0.131, True),
        # Differences below 1 ms are noise, whatever the ratio.
        (0.001, 0.0019, False),
        (0.001, 0.0021, True),
    ],
)
def test_a_rank_is_slower_than_before_by_a_ratio_and_by_more_than_noise(usual_s, slow_s, is_slow):
    """Its best time counts, not the last one: it may become slower in small steps."""
    slow_ranks = SlowRanks([0.0], HOSTS)
    between = {0: usual_s * 1.1}
    line = line_after(slow_ranks, {0: usual_s}, between, {0: slow_s}, {0: slow_s})
    assert (line is not None) == is_slow
    better = SlowRanks([0.0], HOSTS)
    assert line_after(better, {0: slow_s}, {0: usual_s}, {0: usual_s}) is None


@pytest.mark.parametrize(
    ("planned_s", "seconds", "is_slow"),
    [
        ([0.1, 0.1], {0: 0.1, 1: 0.149}, False),
        ([0.1, 0.1], {0: 0.1, 1: 0.151}, True),
        ([0.1, 0.2], {0: 0.1, 1: 0.2}, False),
        ([0.001, 0.001], {0: 0.001, 1: 0.0019}, False),
        ([0.001, 0.001], {0: 0.001, 1: 0.0021}, True),
        # Of a rank whose time is not planned, or is not known yet, nothing can be said.
        ([0.1, 0.0], {0: 0.1, 1: 9.0}, False),
        ([0.0, 0.0], {0: 0.1, 1: 9.0}, False),
        ([0.1, 0.1], {1: 9.0}, False),
        ([0.1, 0.1], {0: 0.0, 1: 9.0}, False),
    ],
)
def test_a_rank_is_slower_than_planned_by_a_ratio_and_by_more_than_noise(
    planned_s, seconds, is_slow
):
    """Relative to the rank that is nearest to its plan."""
    line = line_after(SlowRanks(planned_s, HOSTS), seconds, seconds)
    assert (line is not None) == is_slow
    if is_slow:
        assert line.startswith("slow: rank 1 (b) computes")
        assert "as long as planned, relative to the other ranks" in line


def test_all_slow_ranks_are_in_one_line_with_the_newer_reason_first():
    """A rank that has become slower is slower than planned, too."""
    slow_ranks = SlowRanks([0.1, 0.1, 0.1], ["a", "b", "c"])
    usual = {0: 0.1, 1: 0.1, 2: 0.1}
    slow = {0: 0.1, 1: 0.2, 2: 0.4}
    assert line_after(slow_ranks, usual, slow, slow) == (
        "slow: rank 1 (b) computes 2.0 times as long as before, 200 ms a step; "
        "rank 2 (c) computes 4.0 times as long as before, 400 ms a step"
    )
    assert line_after(slow_ranks, slow) is None
    only_one = {0: 0.1, 1: 0.1, 2: 0.4}
    assert line_after(slow_ranks, only_one, only_one) == (
        "slow: rank 2 (c) computes 4.0 times as long as before, 400 ms a step"
    )


def busy_times(rank):
    """Return the busy times of a rank with a store of its own."""
    exchange = SimpleNamespace(store=HashStore(), rank=rank, size=3, hosts=["a", "b", "c"])
    schedule = ps.schedule("1f1b", 3, 2)
    return BusyTimes(exchange, SimpleNamespace(planned_busy_s={}, schedule=schedule)), exchange


def test_rank_0_compares_the_medians_that_are_there(caplog):
    """A rank that has none yet is left out; the others only publish."""
    times, exchange = busy_times(0)
    compared = []
    times._slow_ranks.compare = lambda seconds: compared.append(seconds) or "a line"
    exchange.store.set("busy/2", "0.5")
    with caplog.at_level(logging.WARNING, "penstock"):
        times._publish(0.25)
        times._slow_ranks.compare = compared.append
        times._publish(0.75)
    assert compared == [{0: 0.25, 2: 0.5}, {0: 0.75, 2: 0.5}]
    assert caplog.messages == ["a line"]
    other, exchange = busy_times(1)
    other._slow_ranks.compare = None
    other._publish(0.25)
    assert exchange.store.get("busy/1") == b"0.25"


def test_a_thread_ends_with_the_store_and_a_later_one_begins_after_closing():
    """Threads of pipelines that are closed do not pile up."""
    times, _ = busy_times(1)
    published = []
    times._publish = published.append
    times.close()
    times._enqueue(1.0)
    first = times._thread
    assert first.daemon, "a program that fails would wait for it"
    times._enqueue(2.0)
    assert times._thread is first
    times.close()
    first.join(HANG_S)
    times._enqueue(3.0)
    second = times._thread
    assert second is not first

    def fail(median_s):
        raise RuntimeError("the store is gone")

    times.close()
    second.join(HANG_S)
    assert published == [1.0, 2.0, 3.0]
    times._publish = fail
    times._enqueue(4.0)
    times._thread.join(HANG_S)
    assert not times._thread.is_alive()


def test_threads_of_one_process_are_not_compared():
    """They share its cores."""
    times = BusyTimes(None, SimpleNamespace(planned_busy_s={}, schedule=ps.schedule("1f1b", 2, 2)))
    times.step({})
    times.close()
    assert times._pending is None


def test_planned_times_go_with_the_programs_of_the_ranks():
    """Programs may have been moved to other ranks since the plan."""
    schedule = ps.schedule("1f1b", 2, 2)
    first, second = schedule.programs
    setting = SimpleNamespace(schedule=schedule, planned_busy_s={second: 0.5})
    assert planned_seconds(setting) == [0.0, 0.5]
    setting.planned_busy_s[first] = 0.25
    assert planned_seconds(setting) == [0.25, 0.5]

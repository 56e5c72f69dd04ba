"""Times of several hosts are put on one clock, by round trips."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.ranks import clock_offsets as module
from penstock.ranks.clock_offsets import ClockOffsets, Reading, ahead_at
from penstock.transport.distributed import LOSS_TAG

#: Seconds by which the clocks of the test's processes differ, by rank: hosts that have been
#: running for different times.
AHEAD_S = (0.0, 5000.0, -123.456)

seconds = st.floats(0, 1e3, allow_nan=False)


@given(ahead_s=st.floats(-1e6, 1e6), sent_s=seconds, way_there=seconds, way_back=seconds)
def test_the_error_of_a_round_trip_is_at_most_half_of_it(ahead_s, sent_s, way_there, way_back):
    """However unequal the ways there and back are, and however long they take."""
    there_s = sent_s + way_there
    received_s = there_s + way_back
    reading = Reading.of_round_trip(sent_s + ahead_s, there_s, received_s + ahead_s)
    assert abs(reading.ahead_s - ahead_s) <= 2 * reading.error_s + 1e-6
    if reading.ahead_s:
        assert abs(reading.ahead_s - ahead_s) <= reading.error_s + 1e-6


def test_clocks_that_may_be_one_are_taken_to_be_one():
    """Ranks of one host then agree exactly, not to the error of a measurement."""
    assert Reading.of_round_trip(10.0, 10.001, 10.01).ahead_s == 0.0
    assert Reading.of_round_trip(10.0, 10.02, 10.01).ahead_s == pytest.approx(-0.015)


def test_a_clock_that_drifts_is_followed_between_two_readings():
    """A clock that runs fast by 0.1 ms per second is not late by the length of the run."""
    readings = [Reading(at, 50.0 + 1e-4 * at, 1e-5) for at in (100.0, 200.0, 300.0)]
    assert ahead_at(readings, 250.0) == pytest.approx(50.025, abs=1e-9)
    assert ahead_at(readings, 0.0) == readings[0].ahead_s
    assert ahead_at(readings, 999.0) == readings[-1].ahead_s
    assert ahead_at([], 1.0) == 0.0


def _timelines():
    """Train on ranks whose clocks are apart; return two timelines and the error of this rank."""
    import time

    import torch.distributed as dist

    from penstock.transport.process_group import join

    join()
    ahead_s = AHEAD_S[dist.get_rank()]
    host_s = time.monotonic

    def shifted():
        """Return the time of a clock that is not that of the other ranks."""
        return host_s() + ahead_s

    # Not a function of Penstock's: whatever reads the clock of the host reads this one.
    time.monotonic = shifted
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    pipe = ps.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        balance=[1, 1, 1],
        schedule="1f1b",
        micro_batches=4,
        deadline_s=60,
    )
    x = torch.randn(8, 16)
    timelines = []
    for _ in range(2):
        pipe.train_batch(x, x)
        timelines.append(pipe.timeline())
    readings = pipe._world._clocks.readings
    return timelines, max((reading.error_s for reading in readings), default=0.0)


def test_events_of_hosts_whose_clocks_are_apart_are_in_their_order():
    """No op starts before the one on another rank that it waits for has ended."""
    results = ps.launch(_timelines, 3, threads=1)
    error_s = sum(error for _, error in results)
    for timelines, _ in results:
        for timeline in timelines:
            assert timeline.makespan < 60
            times = {str(event.op): event for event in timeline.compute}
            for micro_batch in range(4):
                for stage in range(2):
                    forward = times[f"{stage}F{micro_batch}"]
                    next_forward = times[f"{stage + 1}F{micro_batch}"]
                    assert next_forward.start >= forward.end - error_s
                    backward = times[f"{stage + 1}B{micro_batch}"]
                    next_backward = times[f"{stage}B{micro_batch}"]
                    assert next_backward.start >= backward.end - error_s
            check_transfers(timeline, error_s)
    assert results[0][0] == results[1][0]


def check_transfers(timeline, error_s):
    """Every message of 1F1B is there, between the op that produces it and the one that takes it."""
    times = {(event.rank, str(event.op)): event for event in timeline.compute}
    transfers = [event for event in timeline.events if event.to_rank is not None]
    assert len(transfers) == 2 * 2 * 4
    for event in transfers:
        assert event.bytes >= 2 * 16 * 4
        assert event.start == times[event.rank, str(event.op)].end
        kind, stage, micro_batch = event.op
        consumer = times[event.to_rank, f"{event.to_rank}{kind.value}{micro_batch}"]
        assert abs(event.to_rank - stage) == 1
        assert event.start <= event.end <= consumer.start + error_s
        assert consumer.wait_s >= 0


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), min_size=1, max_size=12))
def test_the_best_of_several_round_trips_counts(ways):
    """One round trip of less than 2 ms is enough to align timelines to under 1 ms."""
    ahead_s = 50.0
    readings = []
    for way_there, way_back in ways:
        there_s = way_there
        readings.append(Reading.of_round_trip(ahead_s, there_s, ahead_s + there_s + way_back))
    best = min(readings, key=lambda reading: reading.error_s)
    assert abs(best.ahead_s - ahead_s) <= min(map(sum, ways)) / 2 + 1e-9


def _shared_clock():
    """Return what this rank has measured of the clock that all of them share."""
    pipe = ps.Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 2)],
        loss=nn.functional.mse_loss,
        balance=[1, 1],
        micro_batches=2,
        deadline_s=60,
    )
    return [reading.ahead_s for reading in pipe._world._clocks.readings]


def test_ranks_of_one_host_have_one_clock():
    """Their times are compared as they are."""
    assert ps.launch(_shared_clock, 2, threads=1) == [[], [0.0]]


class Network:
    """Messages of ranks to rank 0 and back, each of which takes some time; clocks are apart."""

    def __init__(self, monkeypatch, ways, ahead_s=5.0):
        self.now_s, self.ways, self.ahead_s = 100.0, iter(ways), ahead_s
        self.sent, self.answers, self.targets = [], [], []
        monkeypatch.setattr(module, "host_time", lambda: self.now_s + self.ahead_s)
        monkeypatch.setattr(module.dist, "isend", self.send)
        monkeypatch.setattr(module.dist, "irecv", self.receive)

    def send(self, number, target, *, group, tag):
        """Take a question to rank 0, which answers with its time."""
        self.sent.append(number.item())
        self.targets.append((target, group, tag))
        if number.item() != 0.0:
            there_s, back_s = next(self.ways)
            self.now_s += there_s
            self.answers.append(self.now_s)
            self.now_s += back_s

    def receive(self, number, source, *, group, tag):
        """Bring the answer."""
        self.targets.append((source, group, tag))
        number.fill_(self.answers[-1])


def offsets_of(rank, waits=None):
    """The offsets of a rank of a pipeline whose processes are 7, 8 and 9 of the job."""
    waits = [] if waits is None else waits
    return ClockOffsets(rank, [7, 8, 9], "group", lambda work, text: waits.append(text))


def test_questions_go_on_until_one_is_answered_fast_and_the_best_counts(monkeypatch):
    """A slow network is measured with its smallest error after twelve questions."""
    ways = [(0.01, 0.02), (0.002, 0.001), (0.03, 0.03)] + [(0.02, 0.02)] * 9
    network, waits = Network(monkeypatch, ways), []
    offsets = offsets_of(2, waits)
    offsets.measure()
    assert network.sent == [1.0] * 11 + [2.0]
    (reading,) = offsets.readings
    assert reading.error_s == pytest.approx(0.0015)
    assert reading.ahead_s == pytest.approx(5.0, abs=0.0015)
    assert set(network.targets) == {(7, "group", LOSS_TAG + 1)}
    assert waits == ["rank 0"] * 24
    network = Network(monkeypatch, [(0.01, 0.02), (9e-6, 9e-6), (1.0, 1.0)])
    offsets.measure()
    assert network.sent == [1.0, 1.0, 0.0]
    assert offsets.readings[1].error_s == pytest.approx(9e-6)
    assert offsets.to_first(offsets.readings[1].at_s) == pytest.approx(
        offsets.readings[1].at_s - 5.0, abs=1e-4
    )


def test_a_fast_last_answer_ends_the_questions_by_itself(monkeypatch):
    """Rank 0 expects nothing after the last question."""
    network = Network(monkeypatch, [(0.01, 0.02)] * 11 + [(1e-6, 1e-6)])
    offsets_of(1).measure()
    assert network.sent == [1.0] * 11 + [2.0]


def test_rank_0_answers_each_rank_until_it_has_no_more_questions(monkeypatch):
    """One rank after the other; its own clock is the first."""
    questions = iter([1.0, 1.0, 0.0, 1.0, 2.0])
    log = []

    def receive(number, source, *, group, tag):
        number.fill_(next(questions))
        log.append(("question", source))

    def send(number, target, *, group, tag):
        log.append(("answer", target, number.item()))

    monkeypatch.setattr(module, "host_time", lambda: 42.0)
    monkeypatch.setattr(module.dist, "isend", send)
    monkeypatch.setattr(module.dist, "irecv", receive)
    offsets = offsets_of(0)
    offsets.measure()
    assert log == [
        ("question", 8),
        ("answer", 8, 42.0),
        ("question", 8),
        ("answer", 8, 42.0),
        ("question", 8),
        ("question", 9),
        ("answer", 9, 42.0),
        ("question", 9),
        ("answer", 9, 42.0),
    ]
    assert list(offsets.readings) == []
    assert offsets.to_first(17.5) == 17.5


@pytest.mark.parametrize(
    ("at_s", "ahead_s"),
    [(5.0, 1.0), (10.0, 1.0), (12.5, 1.5), (20.0, 3.0), (25.0, 2.0), (99.0, 1.0)],
)
def test_offsets_between_two_readings_are_on_a_line(at_s, ahead_s):
    """At a reading it is that reading; beyond the last ones it stays."""
    readings = [Reading(10.0, 1.0, 0.0), Reading(20.0, 3.0, 0.0), Reading(30.0, 1.0, 0.0)]
    assert ahead_at(readings, at_s) == pytest.approx(ahead_s)


def test_a_reading_is_of_the_middle_of_its_round_trip():
    """Its offset is 0 where that is within the error, on both sides of it."""
    assert Reading.of_round_trip(10.0, 3.0, 12.0) == Reading(11.0, 8.0, 1.0)
    assert Reading.of_round_trip(10.0, 10.0, 12.0) == Reading(11.0, 0.0, 1.0)
    assert Reading.of_round_trip(10.0, 12.0, 12.0) == Reading(11.0, 0.0, 1.0)
    assert Reading.of_round_trip(10.0, 12.5, 12.0) == Reading(11.0, -1.5, 1.0)


def test_the_newest_64_measurements_are_remembered(monkeypatch):
    """A run of days is measured for every timeline; drift is followed between the last ones."""
    Network(monkeypatch, itertools.repeat((1e-6, 1e-6)))
    offsets, times = offsets_of(1), []
    for _ in range(70):
        offsets.measure()
        times.append(offsets.readings[-1].at_s)
    assert [reading.at_s for reading in offsets.readings] == times[-64:]

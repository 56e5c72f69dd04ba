"""Times of several hosts are put on one clock, by round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.ranks.clock_offsets import Reading, ahead_at

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

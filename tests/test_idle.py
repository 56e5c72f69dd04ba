"""What idle ranks wait for."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.event import Event, Timeline
from penstock.idle import IdleCause, IdleSeconds, idle_intervals, idle_seconds, link_traffic
from penstock.schedule.op import Op

NAMES = ("gpipe", "1f1b", "zb-h1", "interleaved", "bpipe", "dualpipe", "seq1f1b")


def op(text):
    """Return an op."""
    return Op.parse(text)


def two_ranks(forward_end, arrival, start, wait_s):
    """Return a measured timeline in which rank 1 waits for the first forward of rank 0."""
    events = [
        Event(0, op("0F0"), 0.0, forward_end),
        Event(0, op("0F0"), forward_end, arrival, 100, 1),
        Event(1, op("1F0"), start, start + 1.0, wait_s=wait_s),
    ]
    return Timeline.of(events, 2, 2, source="measured")


def parts(timeline, rank):
    """Return the idle intervals of a rank: start, end, and the first letter of the cause."""
    return [
        (interval.start, interval.end, interval.cause.value[0])
        for interval in idle_intervals(timeline)
        if interval.rank == rank
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((2.0, 5.0, 5.0, 5.0), [(0, 2, "n"), (2, 5, "l")]),
        ((2.0, 5.0, 5.0, 4.0), [(0, 1, "r"), (1, 2, "n"), (2, 5, "l")]),
        ((2.0, 5.0, 5.0, 1.0), [(0, 4, "r"), (4, 5, "l")]),
        ((2.0, 5.0, 5.0, 0.0), [(0, 5, "r")]),
        ((2.0, 2.0, 5.0, 4.5), [(0, 0.5, "r"), (0.5, 2, "n"), (2, 5, "r")]),
        ((2.0, 5.0, 5.0, None), [(0, 2, "n"), (2, 5, "l")]),
    ],
)
def test_an_idle_interval_is_split_by_what_the_rank_waits_for(times, expected):
    """Until the value is computed, until it has arrived, and what the rank itself needs."""
    assert parts(two_ranks(*times), 1) == expected


def test_time_after_the_last_op_is_the_rest():
    """Nothing is waited for."""
    assert parts(two_ranks(2.0, 5.0, 5.0, None), 0) == [(2, 6, "r")]


@given(
    st.sampled_from(NAMES),
    st.sampled_from([2, 4]),
    st.floats(0.5, 3),
    st.sampled_from([0.0, 0.25, 2.0]),
)
def test_busy_and_idle_time_make_up_the_makespan(name, stages, forward, transfer):
    """Each moment of a rank is an op or has one cause; free links are never waited for."""
    costs = ps.Costs(forward=forward, backward=2 * forward, transfer=transfer)
    timeline = ps.simulate(ps.schedule(name, stages, 8), costs)
    rows = idle_seconds(timeline)
    for busy, row in zip(timeline.busy, rows, strict=True):
        idle = row.neighbour + row.link + row.rest
        assert busy + idle == pytest.approx(timeline.makespan)
    if not transfer:
        assert all(row.link == 0 for row in rows)
    ends = [0.0] * timeline.ranks
    for interval in idle_intervals(timeline):
        assert interval.start >= ends[interval.rank]
        ends[interval.rank] = interval.end
        assert (interval.transfer is None) == (interval.cause is IdleCause.REST)


@pytest.mark.parametrize("transfer", [0.0, 0.5, 3.0])
def test_ranks_that_only_wait_for_values_have_no_rest_before_their_last_op(transfer):
    """In a simulation of 1F1B, a rank is idle only because of others."""
    costs = ps.Costs(forward=1, backward=2, transfer=transfer)
    timeline = ps.simulate(ps.schedule("1f1b", 4, 8), costs)
    last = [max(e.end for e in timeline.compute if e.rank == rank) for rank in range(4)]
    rest = [interval for interval in idle_intervals(timeline) if interval.transfer is None]
    assert all(interval.start >= last[interval.rank] for interval in rest)


def test_traffic_counts_messages_and_bytes_per_link():
    """With transfers that overlap, busy time is their union."""
    events = [
        Event(0, op("0F0"), 0.0, 1.0),
        Event(0, op("0F1"), 1.0, 2.0),
        Event(0, op("0F0"), 1.0, 4.0, 10, 1),
        Event(0, op("0F1"), 2.0, 6.0, 20, 1),
        Event(1, op("1F0"), 4.0, 5.0, wait_s=4.0),
        Event(1, op("1F1"), 6.0, 7.0, wait_s=1.0),
    ]
    timeline = Timeline.of(events, 2, 2, source="measured")
    (row,) = link_traffic(timeline)
    assert row == (0, 1, 2, 30, 5.0, 4.0)
    assert link_traffic(timeline, by_host=True) == ()
    hosts = dataclasses.replace(timeline, hosts=("a", "b"))
    assert link_traffic(hosts, by_host=True) == (("a", "b", 2, 30, 5.0, 4.0),)
    same = dataclasses.replace(timeline, hosts=("a", "a"))
    assert link_traffic(same, by_host=True) == ()


def test_ranks_of_a_host_are_summed_up_and_messages_within_it_left_out():
    """What the network card of a host sends to each other host; links are in order."""
    events = [
        Event(2, op("2F0"), 0.0, 1.0, wait_s=0.0),
        Event(0, op("0F0"), 0.0, 1.0),
        Event(2, op("2F0"), 1.0, 2.0, 5, 0),
        Event(0, op("0F0"), 1.0, 3.0, 10, 1),
        Event(0, op("1F0"), 1.0, 4.0, 20, 2),
        Event(1, op("1F0"), 3.0, 4.0, wait_s=3.0),
        Event(1, op("1F0"), 4.0, 6.0, 40, 2),
        Event(2, op("2F1"), 8.0, 9.0, wait_s=0.0),
    ]
    timeline = Timeline.of(events, 3, 3, source="measured")
    assert [row[:4] for row in link_traffic(timeline)] == [
        (0, 1, 1, 10),
        (0, 2, 1, 20),
        (1, 2, 1, 40),
        (2, 0, 1, 5),
    ]
    hosts = dataclasses.replace(timeline, hosts=("a", "a", "b"))
    rows = link_traffic(hosts, by_host=True)
    assert [row[:5] for row in rows] == [("a", "b", 2, 60, 5.0), ("b", "a", 1, 5, 1.0)]


def test_traffic_and_seconds_use_the_intervals_that_the_caller_has():
    """They are computed once for both."""
    timeline = two_ranks(2.0, 5.0, 5.0, None)
    assert link_traffic(timeline, [])[0].waited_s == 0.0
    assert link_traffic(timeline)[0].waited_s == 3.0
    assert idle_seconds(timeline, []) == (IdleSeconds(0.0, 0.0, 0.0),) * 2
    assert idle_seconds(timeline) == (IdleSeconds(0.0, 0.0, 4.0), IdleSeconds(2.0, 3.0, 0.0))


def test_gaps_of_rounding_errors_are_no_idle_time():
    """The simulator's sums differ in the last bits."""
    events = [Event(0, op("0F0"), 0.0, 1.0), Event(0, op("0F1"), 1.0 + 1e-12, 2.0)]
    assert idle_intervals(Timeline.of(events, 1, 1)) == ()
    events = [Event(0, op("0F0"), 0.0, 1.0), Event(0, op("0F1"), 1.0 + 1e-6, 2.0)]
    assert len(idle_intervals(Timeline.of(events, 1, 1))) == 1


def test_the_last_of_several_values_is_waited_for():
    """A backward may need activations that another rank holds, and a gradient."""
    events = [
        Event(1, op("1B0"), 0.0, 1.0),
        Event(1, op("1B0"), 1.0, 2.0, 1, 0),
        Event(2, op("0L0"), 0.0, 3.0),
        Event(2, op("0L0"), 3.0, 6.0, 1, 0),
        Event(0, op("0L0"), 6.0, 6.5),
        Event(0, op("0B0"), 6.5, 7.0),
    ]
    timeline = Timeline.of(events, 3, 2, source="measured")
    assert parts(timeline, 0) == [(0.0, 3.0, "n"), (3.0, 6.0, "l")]


def test_an_op_that_moves_activations_waits_for_them():
    """The receiver of an eviction runs the same op as the sender."""
    events = [
        Event(0, op("0E0"), 0.0, 1.0),
        Event(0, op("0E0"), 1.0, 3.0, 1, 1),
        Event(1, op("0E0"), 3.0, 4.0),
    ]
    timeline = Timeline.of(events, 2, 2, source="measured")
    assert parts(timeline, 1) == [(0.0, 1.0, "n"), (1.0, 3.0, "l")]


def test_links_are_in_the_order_of_the_ranks():
    """Rank 10 comes after rank 2, and hosts have the order of their first ranks."""
    events = []
    for rank in (10, 2, 0):
        events += [
            Event(rank, op(f"{rank}F0"), 0.0, 1.0),
            Event(rank, op(f"{rank}F0"), 1.0, 2.0, 1, 11),
        ]
        events.append(Event(rank, op(f"{rank}F1"), 1.0, 2.0, 1, 1))
    timeline = Timeline.of(events, 12, 12, source="measured")
    links = [(row.source, row.target) for row in link_traffic(timeline)]
    assert links == [(0, 1), (0, 11), (2, 1), (2, 11), (10, 1), (10, 11)]
    hosts = dataclasses.replace(timeline, hosts=("z", "z", "a", *"bbbbbbbbb"))
    rows = link_traffic(hosts, by_host=True)
    assert [(row.source, row.target) for row in rows] == [
        ("z", "b"),
        ("a", "z"),
        ("a", "b"),
        ("b", "z"),
    ]

"""PipeDream: its order, its time, its memory, and how stale its gradients are."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.stream_laws import (
    check_batches,
    check_stream,
    expected_gap,
    gaps,
    seconds_per_batch,
)

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.families.pipedream import enough_batches, falling
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: docs/literature/pipedream.md and 5: p - s forwards ahead, an update after every backward, no flush. p = 4, m =
#: 1.
ORDER = """\
0: F0 F1 F2 F3 B0 U1 F4 B1 U2 F5 B2 U3 B3 U4 B4 U5 B5 U6
1: F0 F1 F2 B0 U1 F3 B1 U2 F4 B2 U3 F5 B3 U4 B4 U5 B5 U6
2: F0 F1 B0 U1 F2 B1 U2 F3 B2 U3 F4 B3 U4 F5 B4 U5 B5 U6
3: F0 B0 U1 F1 B1 U2 F2 B2 U3 F3 B3 U4 F4 B4 U5 F5 B5 U6"""

#: The same with two micro-batches per batch.
ORDER_OF_TWO = """\
0: F0 F1 F2 F3 B0 F4 B1 U1 F5 B2 F6 B3 U2 F7 B4 B5 U3 B6 B7 U4
1: F0 F1 F2 B0 F3 B1 U1 F4 B2 F5 B3 U2 F6 B4 F7 B5 U3 B6 B7 U4
2: F0 F1 B0 F2 B1 U1 F3 B2 F4 B3 U2 F5 B4 F6 B5 U3 F7 B6 B7 U4
3: F0 B0 F1 B1 U1 F2 B2 F3 B3 U2 F4 B4 F5 B5 U3 F6 B6 F7 B7 U4"""


@pytest.mark.parametrize(("size", "batches", "order"), [(1, 6, ORDER), (2, 4, ORDER_OF_TWO)])
def test_pipedream_has_the_published_order(size, batches, order):
    """Narayanan et al. 2019, section 3.2, op by op."""
    for line, program in zip(
        order.splitlines(), schedule("pipedream", 4, size, batches=batches).programs, strict=True
    ):
        stage, _, ops = line.partition(":")
        assert [str(op) for op in program] == [f"{stage}{op}" for op in ops.split()]


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("size", range(1, 9))
def test_every_gradient_is_as_stale_as_the_literature_says(stages, size):
    """The one formula that all asynchronous rules build on, for every micro-batch of every stage."""
    pipedream = schedule("pipedream", stages, size)
    report = check_stream(pipedream)
    gap_of = gaps(pipedream)
    assert gap_of == {
        (stage, n): expected_gap(stages - stage, size, n) for stage, n in pipedream.placement
    }
    assert report.staleness_max == tuple(
        max(gap_of[stage, n] for n in range(pipedream.slices)) for stage in range(stages)
    )
    assert report.peak_in_flight == tuple(range(stages, 0, -1))
    if size == 1:
        assert report.staleness_max == tuple(stages - 1 - stage for stage in range(stages))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_there_is_no_bubble_once_it_is_full(stages, size, f, b):
    """What PipeDream is for: 1F1B with a flush takes (p - 1)(f + b) more for every batch."""
    assert seconds_per_batch(schedule("pipedream", stages, size), f, b) == pytest.approx(
        size * (f + b)
    )
    flushed = simulate_schedule(
        schedule("1f1b", stages, size), Costs(forward=f, backward=b)
    ).makespan
    assert flushed == pytest.approx((size + stages - 1) * (f + b))


def test_the_rows_of_a_stream_are_those_of_one_long_flushed_batch_without_its_updates():
    """Without updates the programs are those of 1F1B with the micro-batches of all batches."""
    stream, flushed = schedule("pipedream", 5, 3, batches=4), schedule("1f1b", 5, 12)
    assert [[op for op in row if op.kind is not Kind.U] for row in stream.programs] == [
        list(row[:-1]) for row in flushed.programs
    ]


#: Such a row works in bursts of as many as it runs ahead; with these numbers they are over after
#: the dozen batches that are counted.
FALLING = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=6).map(
    lambda numbers: sorted(numbers, reverse=True)
)


@given(FALLING, st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_a_row_of_stages_with_equal_warm_up_takes_turns(warm_up, size):
    """The law behind the defaults: of r neighbours that run equally far ahead only one works at a
    time, so all wait r times as long.
    """
    pipedream = schedule("pipedream", len(warm_up), size, warm_up=warm_up)
    row = max(len(list(equal)) for _, equal in groupby(warm_up))
    assert check_stream(pipedream).peak_in_flight == tuple(warm_up)
    assert gaps(pipedream) == {
        (stage, n): expected_gap(warm_up[stage], size, n) for stage, n in pipedream.placement
    }
    assert seconds_per_batch(pipedream) == pytest.approx(size * 3 * row)


@pytest.mark.parametrize("stages", range(1, 8))
def test_few_in_flight_are_spread_so_that_no_row_is_longer_than_it_must_be(stages):
    """With k numbers for p stages, some row has ceil(p / k)."""
    for most in range(1, stages + 2):
        ahead = falling(stages, most)
        assert ahead[0] == min(most, stages)
        assert max(len(list(equal)) for _, equal in groupby(ahead)) == -(
            -stages // min(most, stages)
        )
    assert falling(stages, stages + 3) == list(range(stages, 0, -1))


@pytest.mark.parametrize(("replicas", "warm_up", "bubble"), [
    ((1, 1, 1, 1), None, 0), ((3, 1), None, 0), ((2, 2), None, 0), ((4, 2), None, 0),
    ((1, 2), None, 3), ((1, 2), (4, 2), 0), ((2, 1, 1), None, 3), ((2, 1, 1), (5, 3, 1), 0),
])  # fmt: skip
def test_replicas_share_the_work_of_slower_stages(replicas, warm_up, bubble):
    """1F1B-RR where stage s takes as many times as long as it has ranks: no bubble, as PipeDream's
    planner assumes, but where copies come to their meeting one after the other, whom its start-up
    rule then keeps waiting; one more forward ahead hides that.
    """
    size = 12
    pipedream = schedule(
        "pipedream", len(replicas), size, replicas=replicas, warm_up=warm_up, batches=40
    )
    costs = Costs(forward=[float(k) for k in replicas], backward=[2.0 * k for k in replicas])
    ends = [
        e.end
        for e in simulate_schedule(pipedream, costs).compute
        if e.op.kind is Kind.U and e.op.stage == 0 and e.rank == 0
    ]
    check_stream(pipedream)
    assert (ends[30] - ends[18]) / 12 == pytest.approx(3 * size + bubble)


def test_a_warm_up_that_would_hang_is_refused_by_its_own_name():
    """As in 1f1b; a stream has no end, so no number is too large to matter."""
    with pytest.raises(
        ScheduleError,
        match="pipedream would deadlock: stage 2 needs 3 forwards before its first backward, but stage 1 "
        "passes on 2 before it waits",
    ):
        schedule("pipedream", 3, 1, warm_up=(4, 2, 3))
    with pytest.raises(
        ScheduleError,
        match="pipedream in 3 stages takes a warm_up of 3 numbers, one per stage, not 2",
    ):
        schedule("pipedream", 3, 1, warm_up=(4, 2))


@pytest.mark.parametrize("wrong", [0, -2, 1.0, "9", True])
def test_a_number_of_batches_that_counts_nothing_is_refused(wrong):
    """None is valid: the family then chooses the number."""
    with pytest.raises(ScheduleError, match=f"a stream's batches is 1 or more, not {wrong!r}"):
        schedule("pipedream", 3, 1, batches=wrong)


@pytest.mark.parametrize(
    ("in_flight", "micro_batches", "period", "batches"),
    [(4, 1, 1, 8), (4, 8, 1, 5), (4, 8, 2, 10), (9, 4, 1, 7), (8, 4, 1, 6), (5, 1, 3, 18)],
)
def test_programs_show_four_periods_beyond_the_batches_in_flight(
    in_flight, micro_batches, period, batches
):
    """A part of a batch or of a period in flight counts as a whole one."""
    assert enough_batches(in_flight, micro_batches, period) == batches
    if period == 1:
        assert schedule("pipedream", in_flight, micro_batches).batches == batches


def test_any_number_of_batches_is_a_part_of_the_same_programs():
    """By default they have four periods more than are in flight."""
    check_batches("pipedream", 4, 1, default_batches=8)
    check_batches("pipedream", 2, 3, default_batches=7, warm_up=(8, 1))
    check_batches("pipedream", 2, 4, default_batches=5, replicas=(2, 1))

"""Timeline: each figure from its definition, on hand-written timelines."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules

from penstock.event import Event, MemoryCurve, Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Op
from penstock.schedule.slicing import Slicing
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify


def line(*rows, ranks=2, stages=2):
    """A timeline from (rank, op text, start, end[, to_rank])."""
    return Timeline.of(
        [Event(rank, Op.parse(op), start, end, 0, *to) for rank, op, start, end, *to in rows],
        ranks,
        stages,
    )


def test_seconds_count_from_the_first_event():
    """Measured clocks start anywhere; drawings start at 0."""
    timeline = line((0, "0F0", 101.5, 102.5), (1, "1F0", 100.5, 101.0))
    assert [(e.rank, e.start, e.end) for e in timeline.events] == [(1, 0.0, 0.5), (0, 1.0, 2.0)]
    assert timeline.makespan == 2.0


def test_a_timeline_takes_events_and_plain_rows_alike():
    """Modules that this one imports have rows and no Events."""
    row = (0, Op.parse("0F0"), 1.0, 2.0, 0, None)
    assert Timeline.of([row], 1, 1) == Timeline.of([Event(*row)], 1, 1)
    assert Timeline.of([row], 1, 1).events == (Event(0, Op.parse("0F0"), 0.0, 1.0),)


def test_transfers_are_not_work_and_do_not_lengthen_the_step():
    """A transfer that ends after all compute does not lengthen the step."""
    timeline = line((0, "0F0", 0, 2), (0, "0F0", 2, 9, 1), (1, "1F0", 3, 4))
    assert timeline.compute == (timeline.events[0], timeline.events[2])
    assert timeline.busy == (2.0, 1.0)
    assert timeline.makespan == 4.0


def test_bubble_ratio_is_idle_over_all_ranks_times_makespan():
    """docs/design.md's word for it: 3 seconds of 8 are idle."""
    assert line((0, "0F0", 0, 4), (1, "1F0", 2, 3)).bubble_ratio == 3 / 8


def test_span_bubble_ratio_is_over_the_longest_span_of_a_rank():
    """docs/literature/notation.md: first op's start to last op's end of a rank, updates left out; spans 4 and 3,
    work 4 + 2.
    """
    timeline = line(
        (0, "0F0", 0, 2), (0, "0B0", 2, 4), (0, "0U1", 6, 9), (1, "1F0", 3, 4), (1, "1B0", 5, 6)
    )
    assert timeline.span_bubble_ratio == 1 - 6 / (2 * 4)
    assert timeline.bubble_ratio == 1 - 9 / (2 * 9)


def test_a_late_start_counts_in_the_makespan_and_not_in_the_span():
    """The two definitions differ where ranks work without a gap, one after the other."""
    timeline = line((0, "0F0", 0, 3), (1, "1F0", 3, 6))
    assert timeline.span_bubble_ratio == 0.0
    assert timeline.bubble_ratio == 0.5


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (8, 8)])
def test_the_two_bubble_ratios_agree_for_gpipe_and_one_f_one_b(name, p, m):
    """docs/literature/notation.md: some rank spans the whole makespan, and (cost - m(f+b)) / cost is the papers'
    own form.
    """
    timeline = simulate_schedule(schedule(name, p, m), Costs(forward=1, backward=2))
    assert timeline.span_bubble_ratio == pytest.approx(timeline.bubble_ratio)
    assert timeline.span_bubble_ratio == pytest.approx(
        (timeline.makespan - m * 3) / timeline.makespan
    )


def test_an_empty_timeline_has_no_figures():
    """Nothing ran: 0 everywhere, no division by it."""
    timeline = Timeline.of([], 2, 3)
    assert (
        timeline.makespan,
        timeline.busy,
        timeline.bubble_ratio,
        timeline.span_bubble_ratio,
    ) == (
        0.0,
        (0.0, 0.0),
        0.0,
        0.0,
    )
    assert timeline.peak_in_flight == (0, 0, 0)


def test_peak_in_flight_is_per_stage_the_most_that_one_of_its_ranks_holds():
    """Copies share the work, not the memory: 2 on rank 0 and 1 on rank 1 are 2."""
    timeline = line(
        (0, "0F0", 0, 1),
        (0, "0F1", 1, 2),
        (1, "0F2", 0, 1),
        (0, "0I0", 2, 3),
        (0, "0W0", 3, 4),
        (1, "0B2", 1, 3),
        stages=1,
    )
    assert timeline.peak_in_flight == (2,)


@given(custom_schedules())
@settings(deadline=None, max_examples=60)
def test_peak_in_flight_does_not_depend_on_how_long_ops_take(schedule):
    """It once did: where ops take no time, an end was counted before the start it belongs to."""
    for costs in (
        Costs(forward=0, backward=0),
        Costs(forward=1, backward=0),
        Costs(forward=0, backward=1),
    ):
        assert simulate_schedule(schedule, costs).peak_in_flight == verify(schedule).peak_in_flight


@given(custom_schedules(), st.floats(1e-9, 1e3), st.floats(1e-9, 1e3))
@settings(deadline=None, max_examples=60)
def test_bubble_ratios_lie_between_0_and_1(schedule, forward, backward):
    """Sums of floats may pass the whole by a rounding error; `-0.0 %` in a report looks like a bug."""
    timeline = simulate_schedule(schedule, Costs(forward=forward, backward=backward))
    assert 0 <= timeline.bubble_ratio < 1
    assert 0 <= timeline.span_bubble_ratio < 1
    assert timeline.ranks * timeline.makespan * (1 - timeline.bubble_ratio) == pytest.approx(
        sum(timeline.busy)
    )


def test_a_simulated_timeline_makes_its_events_when_they_are_asked_for():
    """Eight million tuples take a hundred times as long as the times themselves, and most callers
    want the makespan.
    """
    timeline = simulate_schedule(schedule("1f1b", 3, 4), Costs(transfer=0.5))
    assert (timeline.makespan, timeline.busy, timeline.peak_in_flight) == (
        22.0,
        (12.0,) * 3,
        (3, 2, 1),
    )
    assert "events" not in vars(timeline)
    assert timeline.events == tuple(
        sorted(timeline.events, key=lambda event: (event.start, event.end, event.rank))
    )
    assert timeline.events is timeline.events
    assert len(timeline.compute) == 3 * (2 * 4 + 1)


def test_a_simulated_timeline_equals_one_made_of_its_events():
    """One form, however it came about; figures are computed from either."""
    timeline = simulate_schedule(schedule("zb-h1", 3, 5), Costs(transfer=0.5, activation_bytes=3))
    copy = Timeline(timeline.events, 3, 3, timeline.peak_memory, title=timeline.title)
    assert copy == timeline
    assert hash(copy) == hash(timeline)
    for name in (
        "makespan",
        "busy",
        "bubble_ratio",
        "span_bubble_ratio",
        "peak_in_flight",
        "peak_on_rank",
    ):
        assert getattr(copy, name) == getattr(timeline, name)
    assert (copy.memory, copy.memory_holders) == (None, None)


def test_a_timeline_can_be_copied_changed_and_pickled():
    """Ranks send theirs to each other; drawings give theirs another title, and keep the memory's
    curves.
    """
    timeline = simulate_schedule(schedule("1f1b", 2, 3), Costs(activation_bytes=3))
    assert pickle.loads(pickle.dumps(timeline)) == timeline == copy.copy(timeline)
    renamed = replace(timeline, title="other")
    assert (renamed.title, renamed.events) == ("other", timeline.events)
    assert renamed.memory is timeline.memory
    with pytest.raises(AttributeError, match="a Timeline has no 'duration'"):
        timeline.duration  # noqa: B018


def test_ops_that_run_as_one_are_busy_once():
    """The two events of a pair have one span; a rank can't be busy for more than all the time."""
    timeline = line(
        (0, "0F0", 0, 1), (0, "0F1", 1, 4), (0, "0B0", 1, 4), (0, "0B1", 4, 6), ranks=1, stages=1
    )
    assert timeline.busy == (6.0,)
    assert (timeline.bubble_ratio, timeline.span_bubble_ratio) == (0.0, 0.0)


def test_evictions_are_not_in_the_span_nor_in_flight():
    """They compute nothing, and what is away is not held; the partner holds it, for a stage that is
    not its own.
    """
    timeline = line((0, "0F0", 0, 1), (0, "0E0", 1, 1), (0, "0F1", 1, 2), (0, "0B1", 2, 3), (0, "0L0", 5, 5), (0, "0B0", 5, 6),
                (1, "0E0", 2, 2), (1, "0L0", 9, 9), stages=1)  # fmt: skip
    assert timeline.peak_in_flight == (1,)
    assert timeline.peak_on_rank == (1, 1)
    assert timeline.span_bubble_ratio == 1 - 4 / (2 * 6)


def test_a_rank_of_two_stages_holds_both_s_micro_batches():
    """Per stage 1, on the rank 2: what memory follows is the rank's."""
    timeline = line((0, "0F0", 0, 1), (0, "1F0", 1, 2), (0, "1B0", 2, 3), (0, "0B0", 3, 4), ranks=1)
    assert timeline.peak_in_flight == (1, 1)
    assert timeline.peak_on_rank == (2,)


def test_slices_are_in_flight_as_the_shares_that_they_are():
    """Memory is counted in micro-batches, whatever they are cut into; a whole number prints as one."""
    timeline = line(
        (0, "0F0", 0, 1), (0, "0F1", 1, 2), (0, "0F2", 2, 3), (0, "0B1", 3, 4), ranks=1, stages=1
    )
    cut = replace(timeline, slicing=Slicing("samples", ((0.25, 0.75), (0.5, 0.5))))
    assert (timeline.peak_in_flight, cut.peak_in_flight) == ((3,), (1.5,))
    assert (
        str(replace(timeline, slicing=Slicing("samples", ((0.25, 0.25, 0.5),))).peak_on_rank)
        == "(1,)"
    )


def test_a_memory_curve_knows_its_peak():
    """The first of equal ones; nothing held is 0."""
    curve = MemoryCurve(np.array([0.0, 1.0, 2.0, 3.0]), np.array([5, 9, 3, 9]))
    assert (curve.peak, curve.peak_at) == (9, 1.0)
    assert (
        MemoryCurve(np.zeros(0), np.zeros(0, int)).peak,
        MemoryCurve(np.zeros(0), np.zeros(0, int)).peak_at,
    ) == (0, 0.0)

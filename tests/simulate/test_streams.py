"""Streams in the array simulator and in the graph, the gain by asynchrony, and waves by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_streams
from tests.simulate.slow import Slow

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import acyclic_dependencies_of
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.simulate.costs import Costs
from penstock.simulate.entry import simulate
from penstock.simulate.simulate import simulate_schedule

SECONDS = st.integers(0, 12).map(lambda quarters: quarters / 4)


@given(
    custom_streams()
    | st.builds(
        schedule,
        st.just("hetpipe"),
        st.integers(1, 3),
        st.integers(1, 2),
        virtual_workers=st.integers(1, 5),
        in_flight=st.integers(1, 4),
        distance=st.integers(0, 2),
        batches=st.integers(1, 17),
    ),
    st.data(),
)
@settings(deadline=None, max_examples=80)
def test_the_simulator_agrees_with_the_slow_one_on_every_start_and_end(made, data):
    """Which copy waits for whose U is written down twice, once here as a user reads it."""
    seconds = {
        kind: data.draw(st.lists(SECONDS, min_size=made.stages, max_size=made.stages))
        for kind in ("F", "B", "I", "W", "U")
    }
    costs = Costs(
        forward=seconds["F"],
        backward=seconds["B"],
        input_grad=seconds["I"],
        weight_grad=seconds["W"],
        update=seconds["U"],
        transfer=0.5,
    )
    line = simulate_schedule(made, costs)

    def seconds_of(rank, index):
        kind, stage, _ = made.programs[rank][index]
        return seconds[kind.value][stage]

    slow = Slow(made, seconds_of, lambda op: 0.5)
    expected = {
        (rank, made.programs[rank][index], *time) for (rank, index), time in slow.times.items()
    }
    assert {event[:4] for event in line.compute} == expected


@pytest.mark.parametrize(
    ("name", "stages", "size"),
    [("pipedream", 2, 1), ("pipedream", 4, 1), ("2bw", 4, 4), ("xpipe", 4, 2), ("wpipe", 8, 6)],
)
def test_a_stream_gains_the_whole_bubble_of_1f1b(name, stages, size):
    """(m + p - 1) / m: what judges the runtime's measurements, at small m most of all."""
    case_schedule = schedule(name, stages, size, batches=40)
    ranks, costs = (
        case_schedule.ranks,
        Costs(
            forward=1 / (stages // case_schedule.ranks),
            backward=2 / (stages // case_schedule.ranks),
        ),
    )
    ends = [
        event.end
        for event in simulate(case_schedule, costs).compute
        if str(event.op.kind) == "U" and (event.rank, event.op.stage) == (0, 0)
    ]
    flushed = simulate(schedule("1f1b", ranks, size), Costs(forward=1, backward=2)).makespan
    assert flushed * 12 / (ends[30] - ends[18]) == pytest.approx((size + ranks - 1) / size)


def waves(length, distance, text):
    """Two copies of one stage, one micro-batch per batch; the second is three times as slow."""
    case_schedule = replace(
        Schedule.parse(text),
        synchronous=False,
        stream=Stream(6, "hetpipe", waves=Waves(length, distance)),
    )
    line = simulate_schedule(
        case_schedule, Costs(forward=lambda _, m: 1.0 + 2 * (m % 2), backward=0, update=0.5)
    )
    return [
        [event.start for event in line.compute if event.op.kind is Kind.U and event.rank == rank]
        for rank in range(2)
    ]


@pytest.mark.parametrize(("length", "distance", "fast", "slow"), [
    (1, 0, [3, 6.5, 10], [3, 6.5, 10]), (1, 1, [1, 3.5, 7], [3, 6.5, 10]), (1, 2, [1, 2.5, 4], [3, 6.5, 10]),
    (3, 0, [1, 2.5, 10], [3, 6.5, 10]), (2, 0, [1, 6.5, 8], [3, 6.5, 10]), (2, 1, [1, 2.5, 4], [3, 6.5, 10]),
])  # fmt: skip
def test_a_fast_copy_runs_ahead_of_a_slow_one_by_as_many_waves_as_it_may(
    length, distance, fast, slow
):
    """By hand: batches of 1.5 and 3.5 s. With D = 0 the fast one waits for the slow one's same
    wave, else for the end of an earlier.
    """
    rows = "0F0 0B0 0U1 0F2 0B2 0U2 0F4 0B4 0U3\n0F1 0B1 0U1 0F3 0B3 0U2 0F5 0B5 0U3"
    assert waves(length, distance, rows) == [fast, slow]


def test_copies_that_wait_in_a_circle_are_found():
    """Each wave ends before gradients that the other one's end needs: a deadlock is reported."""
    rows = "0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 1U1 0U1"
    case_schedule = replace(
        Schedule.parse(rows), synchronous=False, stream=Stream(2, "hetpipe", waves=Waves(1))
    )
    with pytest.raises(
        ScheduleError, match="custom deadlocks: it stops with rank 0 at 0U1, rank 1 at 1U1"
    ):
        acyclic_dependencies_of(case_schedule)
    assert (
        acyclic_dependencies_of(
            replace(case_schedule, stream=Stream(2, "hetpipe", waves=Waves(1, 1)))
        ).ranks
        == 2
    )


@pytest.mark.parametrize("recompute", ["except_last", "always"])
def test_the_last_micro_batch_of_every_batch_is_the_last(recompute):
    """As at runtime: its backward may come right after its forward, where there is nothing to be
    saved.
    """
    case_schedule = schedule("pipedream", 1, 3, batches=4)
    line = simulate_schedule(case_schedule, Costs(forward=1, backward=2), recompute=recompute)
    lengths = [event.end - event.start for event in line.compute if event.op.kind is Kind.B]
    assert lengths == ([3, 3, 2] if recompute == "except_last" else [3, 3, 3]) * 4

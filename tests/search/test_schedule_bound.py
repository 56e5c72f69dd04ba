"""Lower bounds of placed schedules, which spare most candidates their simulation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.profile.profile import PHASES
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.op import Schedule
from penstock.search.schedule_bound import schedule_bound_s
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.steady_state import steady


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(list(schedules())), st.integers(1, 4), st.integers(1, 8))
def test_no_step_is_shorter_than_its_lower_bound(data, name, stages, micro_batches):
    """A bound that is too high would skip the winner. Of streams, that of a batch in the steady
    state.
    """
    try:
        result = schedule(name, stages, micro_batches)
    except ScheduleError:
        return
    row = st.lists(st.floats(0, 10), min_size=stages, max_size=stages)
    costs = Costs(*(data.draw(row) for _ in range(4)))
    assert schedule_bound_s(result, costs) <= steady(result, costs).seconds_per_batch * (1 + 1e-9)


def test_the_bound_of_a_stream_is_the_work_of_its_busiest_rank():
    """It never fills or drains: 2 (1 + 3) on stage 1. Of two virtual workers each has every other
    batch.
    """
    costs = Costs([1, 1], [2, 3], [1, 1], [1, 2])
    assert schedule_bound_s(schedule("pipedream", 2, 2), costs) == 8
    assert schedule_bound_s(schedule("hetpipe", 2, 2), costs) == 4


def test_the_bound_is_sharp_for_equal_stages():
    """(m + p - 1)(f + b): so sharp that most ways need no simulation."""
    costs = Costs(*([value] * 3 for value in (1.0, 2.0, 2.0, 0.0)))
    assert (
        schedule_bound_s(schedule("gpipe", 3, 4), costs)
        == 18
        == simulate_schedule(schedule("gpipe", 3, 4), costs).makespan
    )


def test_the_bound_of_split_backwards_lets_the_weights_part_run_beside_the_drain():
    """W after the last I delays no other op: adding the drain to it would be too much."""
    result = Schedule.parse("rank 0 | 0F0 0B0 0U1\nrank 1 | 1F0 1I0 1W0 1U1")
    costs = Costs([1, 1], [2, 2], [1, 1], [5, 5])
    assert schedule_bound_s(result, costs) == 8 == simulate_schedule(result, costs).makespan


def simulated_s(example: Schedule, costs: Costs) -> float:
    """Seconds per step, or per batch of a stream."""
    return steady(example, costs).seconds_per_batch


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "options"),
    [
        ("1f1b", 1, 3, {}),
        ("1f1b", 4, 8, {}),
        ("seq1f1b", 3, 4, {"slices": 2}),
        ("terapipe", 3, 4, {"slices": 4}),
        ("zb-h2", 4, 8, {}),
        ("pipedream", 4, 8, {}),
        ("1f1b", 2, 4, {"replicas": 2}),
    ],
)
def test_with_equal_stages_the_bound_is_the_step_itself(name, stages, micro_batches, options):
    """Filling, work and draining, in micro-batches or slices; of several pipelines each has its
    part.
    """
    result = schedule(name, stages, micro_batches, **options)
    halves = (1.0, 1.0) if result.splits_backward else (2.0, 0.0)
    costs = Costs(*([value] * stages for value in (1.0, 2.0, *halves)))
    assert schedule_bound_s(result, costs) == pytest.approx(simulated_s(result, costs))
    # Transfers and updates count as free.
    slower = Costs(*(getattr(costs, phase) for phase in PHASES), update=3.0, transfer=2.0)
    assert schedule_bound_s(result, slower) == schedule_bound_s(result, costs)


def test_each_rank_waits_for_the_stages_before_it_at_both_ends():
    """One micro-batch: the last stage starts after all forwards, and all backwards follow it, each
    at the faster of a whole backward and its first half.
    """
    costs = Costs([1, 2, 4], [8, 4, 32], [64, 3, 5], [1, 1, 1])
    whole = Schedule.parse("0F0 0B0\n1F0 1B0\n2F0 2B0")
    assert schedule_bound_s(whole, costs) == 1 + 2 + 4 + 32 + 3 + 8
    # The W of stage 2 may run beside the other backwards, or take longer than they do.
    split = Schedule.parse("0F0 0B0\n1F0 1B0\n2F0 2I0 2W0")
    assert schedule_bound_s(split, costs) == 1 + 2 + 4 + 5 + 3 + 8
    long_w = Costs(costs.forward, costs.backward, costs.input_grad, [1, 1, 100])
    assert schedule_bound_s(split, long_w) == 1 + 2 + 4 + 5 + 100


def test_a_rank_without_backwards_bounds_nothing():
    """Its forwards count where the other stages wait for them."""
    costs = Costs([1, 5], [2, 2], [1, 1], [1, 1])
    assert schedule_bound_s(Schedule.parse("0F0 0B0\n1F0 1B0"), costs) == 1 + 5 + 2 + 1
    assert schedule_bound_s(Schedule.parse("0F0\n1F0"), costs) == 0


def test_seconds_that_differ_by_micro_batch_count_for_their_micro_batch():
    """Uneven micro-batches, and replicas on unlike devices. Slices count the fastest."""
    result = schedule("gpipe", 2, 2)
    costs = Costs([[1, 4], [2, 8]], [[2, 8], [4, 16]], [[1, 4], [2, 8]], [[1, 4], [2, 8]])
    # Rank 0: all its ops. Rank 1: it waits for F of micro-batch 0, and the I of the last backward,
    # of micro-batch 1 or 0, returns through stage 0.
    last = result.programs[1][-2]
    drain = {0: 1, 1: 4}[last.micro_batch]
    assert schedule_bound_s(result, costs) == max(1 + 4 + 2 + 8, 1 + 2 + 8 + 4 + 16 + drain)
    sliced = schedule("seq1f1b", 2, 2, slices=2)
    rows = [[1, 4, 1, 4], [2, 8, 2, 8]]
    fast = Costs([1, 2], [1, 2], [1, 2], [1, 2])
    assert schedule_bound_s(sliced, Costs(rows, rows, rows, rows)) == schedule_bound_s(sliced, fast)


def test_one_number_of_seconds_stands_for_all_stages():
    """(m + p - 1) f and m b of stage 2, and twice the I after it."""
    result = schedule("1f1b", 3, 4)
    costs = Costs(forward=2.0, backward=4.0, input_grad=3.0, weight_grad=1.0)
    assert schedule_bound_s(result, costs) == 6 * 2 + 4 * 4 + 2 * 3

"""What bounds a timeline."""

import pytest

from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.search.bottleneck import describe_bottleneck
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.steady_state import steady


@pytest.mark.parametrize(
    ("example", "costs", "expected"),
    [
        (schedule("gpipe", 2, 16), Costs([1, 3]), "compute of stage 1, 98% of the step"),
        (schedule("gpipe", 4, 2), Costs(1), "bubble, 60% of the step"),
        (schedule("gpipe", 2, 8), Costs(1, transfer=9), "link 0→1, 96% of the step"),
        (schedule("naive", 1, 1), Costs(1), "compute of stage 0, 100% of the step"),
    ],
)
def test_the_dearest_thing_is_named(example, costs, expected):
    """Compute asks for a better cut, a link for another boundary, bubble for more micro-batches."""
    assert describe_bottleneck(simulate_schedule(example, costs)) == expected


def test_a_timeline_without_time_is_bound_by_nothing():
    """No division by zero."""
    assert describe_bottleneck(Timeline((), 1, 1)) == "nothing: it takes no time"


@pytest.mark.parametrize(
    ("example", "costs", "expected"),
    [
        (schedule("pipedream", 2, 1), Costs([1, 3]), "compute of stage 1, 100% of the step"),
        (
            schedule("pipedream", 2, 2),
            Costs(1, transfer=6),
            "link 0→1, 67% of the step in one direction",
        ),
        (schedule("pipedream", 2, 1, warm_up=(1, 1)), Costs(1), "bubble, 50% of the step"),
    ],
)
def test_of_a_stream_the_steady_state_is_looked_at(example, costs, expected):
    """Filling and draining are over once; both directions of a link may be busy at the same time."""
    steady_state = steady(example, costs)
    assert (
        describe_bottleneck(
            steady_state.timeline, steady_state.batches * steady_state.seconds_per_batch
        )
        == expected
    )


def test_of_several_stages_on_the_busiest_rank_the_one_with_most_work_is_named():
    """Stages 0 and 3 of a V are on rank 0, 1 and 2 on rank 1."""
    costs = Costs([1, 1, 1, 3], [2, 2, 2, 6], [1, 1, 1, 3], [1, 1, 1, 3])
    line = simulate_schedule(schedule("zb-v", 4, 16), costs)
    assert describe_bottleneck(line).startswith("compute of stage 3, ")
    costs = Costs([1, 2, 5, 1], [2, 4, 10, 2], [1, 2, 5, 1], [1, 2, 5, 1])
    line = simulate_schedule(schedule("zb-v", 4, 16), costs)
    assert describe_bottleneck(line).startswith("compute of stage 2, ")


def test_both_directions_of_a_link_count_together_and_the_busiest_link_is_named():
    """The second link of three ranks: 8 activations of 3 s and 8 gradients of 1 s."""
    costs = Costs(1, transfer=[1, 3], transfer_back=[1, 1])
    line = simulate_schedule(schedule("gpipe", 3, 8), costs)
    share = 8 * (3 + 1) / line.makespan
    assert describe_bottleneck(line) == f"link 1→2, {share:.0%} of the step"
    # Seconds of a step that is longer than its timeline.
    assert describe_bottleneck(line, 2 * line.makespan) == f"link 1→2, {share / 2:.0%} of the step"


@pytest.mark.parametrize(
    ("micro_batches", "expected"),
    [
        # Of 3 (m + 1) seconds both ranks work 3 m: two thirds with two micro-batches.
        (2, "compute of stage 0, 67% of the step"),
        (1, "bubble, 50% of the step"),
    ],
)
def test_a_rank_that_works_two_thirds_of_the_time_is_the_bottleneck(micro_batches, expected):
    """Below that, its waiting is."""
    line = simulate_schedule(schedule("gpipe", 2, micro_batches), Costs(1))
    assert describe_bottleneck(line) == expected


def test_a_link_as_busy_as_the_busiest_rank_is_not_the_bottleneck():
    """The rank is: a faster link alone would not help."""
    line = simulate_schedule(schedule("gpipe", 2, 8), Costs([1, 1], [2, 2], transfer=1.5))
    assert line.busy[0] == 8 * 3
    assert describe_bottleneck(line).startswith("compute of stage 0, ")

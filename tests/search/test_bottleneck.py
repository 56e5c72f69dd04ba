"""What bounds a timeline."""

import pytest

from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.search.bottleneck import describe_bottleneck
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.steady_state import steady


@pytest.mark.parametrize(
    ("made", "costs", "expected"),
    [
        (schedule("gpipe", 2, 16), Costs([1, 3]), "compute of stage 1, 98% of the step"),
        (schedule("gpipe", 4, 2), Costs(1), "bubble, 60% of the step"),
        (schedule("gpipe", 2, 8), Costs(1, transfer=9), "link 0→1, 96% of the step"),
        (schedule("naive", 1, 1), Costs(1), "compute of stage 0, 100% of the step"),
    ],
)
def test_the_dearest_thing_is_named(made, costs, expected):
    """Compute asks for a better cut, a link for another boundary, bubble for more micro-batches."""
    assert describe_bottleneck(simulate_schedule(made, costs)) == expected


def test_a_timeline_without_time_is_bound_by_nothing():
    """No division by zero."""
    assert describe_bottleneck(Timeline((), 1, 1)) == "nothing: it takes no time"


@pytest.mark.parametrize(
    ("made", "costs", "expected"),
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
def test_of_a_stream_the_steady_state_is_looked_at(made, costs, expected):
    """Filling and draining are over once; both directions of a link may be busy at the same time."""
    found = steady(made, costs)
    assert describe_bottleneck(found.timeline, found.batches * found.seconds_per_batch) == expected

"""DAPPLE's latency formula against its text, and against simulation where that is what it
describes.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.planners.dapple_latency import latency

from penstock.schedule.catalogue import schedule
from penstock.search.cut_search import dapple_kernel
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

seconds = st.floats(0.01, 10)
stages = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*(st.lists(seconds, min_size=n, max_size=n) for _ in range(3)))
)


@settings(max_examples=100, deadline=None)
@given(stages, st.integers(1, 40))
def test_the_parts_are_the_papers_formulas_at_the_pivot(rows, micro_batches):
    """T_w, T_s and T_e, written out once more for the pivot that is reported."""
    forward, backward, reduce = rows
    parts = latency(forward, backward, reduce, micro_batches)
    q = parts.pivot
    assert parts.warm_up_s == pytest.approx(sum(forward[: q + 1]))
    assert parts.steady_s == pytest.approx((micro_batches - 1) * (forward[q] + backward[q]))
    endings = [reduce[s] + sum(backward[s : q + 1]) for s in range(q + 1)]
    endings += [reduce[s] - sum(backward[q : s + 1]) for s in range(q + 1, len(reduce))]
    assert parts.ending_s == pytest.approx(max(endings))


@settings(max_examples=100, deadline=None)
@given(stages, st.integers(1, 40))
def test_the_kernel_of_the_search_gives_the_same(rows, micro_batches):
    """It takes sums as it walks, where the formula sums anew for every stage."""
    arrays = [np.array(row) for row in rows]
    seconds = dapple_kernel.latency(*arrays, len(rows[0]), micro_batches)
    assert seconds == pytest.approx(latency(*rows, micro_batches).seconds)


@settings(max_examples=100, deadline=None)
@given(stages, st.integers(2, 40))
def test_no_step_is_shorter_than_any_stage_busy_for_all_but_one_micro_batch_and_the_first_stage_once(
    rows, micro_batches
):
    """The bound by which the search leaves out what cannot win."""
    forward, backward, reduce = rows
    longest = max((micro_batches - 1) * (f + b) for f, b in zip(forward, backward, strict=True))
    assert (
        latency(*rows, micro_batches).seconds >= longest + forward[0] + backward[0] - 1e-9 * longest
    )
    assert len(reduce) == len(forward)


def test_the_pivot_is_the_last_stage_where_all_are_equal():
    """The walk begins at the end, and a stage before must be slower by all that stands between."""
    assert latency((1,) * 4, (2,) * 4, (0,) * 4, 8).pivot == 3


def test_a_slow_stage_is_the_pivot():
    """It has no bubbles once it has begun."""
    assert latency((1, 5, 1, 1), (1, 5, 1, 1), (0,) * 4, 8).pivot == 1


@pytest.mark.parametrize("count", [1, 2, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
def test_on_equal_stages_and_free_links_the_latency_is_the_makespan_of_1f1b(count, micro_batches):
    """(m + p - 1)(f + b): there the formula is no approximation."""
    parts = latency((1.0,) * count, (2.0,) * count, (0.0,) * count, micro_batches)
    timeline = simulate_schedule(
        schedule("1f1b", count, micro_batches), Costs(forward=1.0, backward=2.0)
    )
    assert parts.seconds == pytest.approx(timeline.makespan)

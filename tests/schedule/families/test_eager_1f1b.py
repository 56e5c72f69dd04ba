"""Eager 1F1B: more in flight than 1F1B, and links that cost next to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_laws, check_row

from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: docs/literature/simulated-values.md, rows eager-1f1b: p, m, makespan, bubble ratio, peaks. f = 1, b = 2.
ROWS = [
    (2, 2, 9, 0.3333, (2, 1)), (2, 4, 15, 0.2000, (3, 1)), (2, 8, 27, 0.1111, (3, 1)),
    (4, 4, 21, 0.4286, (4, 4, 3, 1)), (4, 8, 33, 0.2727, (7, 5, 3, 1)), (4, 16, 57, 0.1579, (7, 5, 3, 1)),
    (8, 8, 45, 0.4667, (8, 8, 8, 8, 7, 5, 3, 1)), (8, 16, 69, 0.3043, (15, 13, 11, 9, 7, 5, 3, 1)),
    (8, 32, 117, 0.1795, (15, 13, 11, 9, 7, 5, 3, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("p", "m", "makespan", "ratio", "peaks"), ROWS)
def test_eager_1f1b_agrees_with_the_table_of_the_literature(p, m, makespan, ratio, peaks):
    """Values of docs/literature/simulated-values.md, which another simulator computed."""
    check_row(schedule("eager-1f1b", p, m), 1, makespan, ratio, peaks)


@pytest.mark.parametrize("alias", ["dapple-b", "1f1b-so"])
def test_the_other_published_names_make_the_same_schedule(alias):
    """DAPPLE's policy B and BaPipe's 1F1B-SO are eager 1F1B (docs/literature/notation.md)."""
    assert schedule(alias, 3, 7) == schedule("eager-1f1b", 3, 7)


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_eager_1f1b_takes_1f1bs_time_on_free_links_with_up_to_twice_as_many_in_flight(p, m, f, b):
    """More micro-batches are in flight than with 1F1B."""
    eager_1f1b = schedule("eager-1f1b", p, m)
    assert check_laws(eager_1f1b).peak_in_flight == tuple(min(m, 2 * (p - s) - 1) for s in range(p))
    assert simulate_schedule(eager_1f1b, Costs(forward=f, backward=b)).makespan == (m + p - 1) * (
        f + b
    )


@pytest.mark.parametrize(("c", "makespan"), [(1, 63), (1.5, 66), (2, 75)])
def test_eager_1f1b_with_slow_hops_agrees_with_the_oracles(c, makespan):
    """docs/literature/simulated-values.md: p = 4, m = 16, f = 1, b = 2, c seconds each way. With c = 2 hops are too
    long to be hidden: not 69.
    """
    line = simulate_schedule(
        schedule("eager-1f1b", 4, 16), Costs(forward=1, backward=2, transfer=c)
    )
    assert line.makespan == makespan


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize(("f", "b", "c"), [(1, 2, 1.5), (3, 4, 2), (2, 1, 0.5)])
def test_eager_1f1b_pays_two_hops_per_stage_and_not_per_micro_batch(p, f, b, c):
    """The hop-hiding law of docs/literature/hop-latency.md for BaPipe's 1F1B-SO, on its whole range, while 2c <= f
    + b.
    """
    for m in range(1, 40):
        line = simulate_schedule(
            schedule("eager-1f1b", p, m), Costs(forward=f, backward=b, transfer=c)
        )
        assert line.makespan == (m + p - 1) * (f + b) + (p - 1) * 2 * c, m


@pytest.mark.parametrize("p", range(2, 7))
def test_one_more_forward_ahead_gains_nothing(p):
    """K_s = 2(p - s) takes the same time and holds one more (docs/literature/hop-latency.md)."""
    costs = Costs(forward=1, backward=2, transfer=1)
    for m in range(1, 20):
        more = schedule("1f1b", p, m, warm_up=[2 * (p - s) for s in range(p)])
        line = simulate_schedule(more, costs)
        assert line.makespan == simulate_schedule(schedule("eager-1f1b", p, m), costs).makespan
        assert line.peak_in_flight == tuple(min(m, 2 * (p - s)) for s in range(p))

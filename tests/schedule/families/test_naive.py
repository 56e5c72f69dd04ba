"""Plain model parallelism: the baseline of all pipelines."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_facts

from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


def test_naive_finishes_a_micro_batch_before_it_begins_the_next():
    """One stage works at a time: that is what makes it the baseline."""
    assert (
        str(schedule("naive", 2, 2)) == "rank 0 | 0F0 0B0 0F1 0B1 0U1\nrank 1 | 1F0 1B0 1F1 1B1 1U1"
    )


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_naive_takes_all_work_one_after_the_other_with_one_micro_batch_in_flight(p, m, f, b):
    """m p (f + b) seconds, 1 micro-batch: docs/literature/notation.md."""
    line = simulate_schedule(schedule("naive", p, m), Costs(forward=f, backward=b))
    assert line.makespan == m * p * (f + b)
    assert line.peak_in_flight == (1,) * p


def test_the_catalogues_facts_hold():
    """Planners choose by them."""
    check_facts(schedule("naive", 3, 4))

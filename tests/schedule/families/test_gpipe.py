"""GPipe: its order, its time, its memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_facts

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: docs/literature/simulated-values.md, rows gpipe: p, m, makespan, bubble ratio; m in flight on every stage. f = 1, b =
#: 2.
ROWS = [(2, 2, 9, 0.3333), (2, 4, 15, 0.2000), (2, 8, 27, 0.1111), (4, 4, 21, 0.4286), (4, 8, 33, 0.2727), (4, 16, 57, 0.1579),
        (8, 8, 45, 0.4667), (8, 16, 69, 0.3043), (8, 32, 117, 0.1795)]  # fmt: skip


def test_gpipe_runs_backwards_in_the_order_of_the_forwards():
    """Gradients add up in the order of plain accumulation, so they can agree with it to the bit."""
    assert (
        str(schedule("gpipe", 2, 3))
        == "rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2 0U1\nrank 1 | 1F0 1F1 1F2 1B0 1B1 1B2 1U1"
    )


def test_gpipe_in_reverse_runs_the_last_micro_batch_back_first():
    """torchgpipe's order, for those who compare with it (docs/literature/torchgpipe.md)."""
    gpipe = schedule("gpipe", 2, 3, backward_order="reverse")
    assert (
        str(gpipe) == "rank 0 | 0F0 0F1 0F2 0B2 0B1 0B0 0U1\nrank 1 | 1F0 1F1 1F2 1B2 1B1 1B0 1U1"
    )
    assert gpipe.options == (("backward_order", "reverse"),)


def test_gpipe_in_an_unknown_order_is_refused():
    """Only two orders exist."""
    with pytest.raises(
        ScheduleError, match="gpipe takes backward_order 'forward' or 'reverse', not 'sideways'"
    ):
        schedule("gpipe", 2, 3, backward_order="sideways")


@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_gpipe_agrees_with_the_table_of_the_literature(p, m, makespan, ratio, order):
    """Values of docs/literature/simulated-values.md, which another simulator computed."""
    line = simulate_schedule(
        schedule("gpipe", p, m, backward_order=order), Costs(forward=1, backward=2)
    )
    assert line.makespan == makespan
    assert line.bubble_ratio == pytest.approx(ratio, abs=5e-5)
    assert line.peak_in_flight == (m,) * p


@given(
    st.integers(1, 8),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["forward", "reverse"]),
)
@settings(deadline=None, max_examples=60)
def test_gpipe_takes_m_plus_p_minus_1_forwards_and_backwards(p, m, f, b, order):
    """The closed form of Huang et al. 2019, in either backward order."""
    line = simulate_schedule(
        schedule("gpipe", p, m, backward_order=order), Costs(forward=f, backward=b)
    )
    assert line.makespan == (m + p - 1) * (f + b)
    assert line.bubble_ratio == pytest.approx((p - 1) / (m + p - 1))
    assert line.peak_in_flight == (m,) * p


def test_the_catalogues_facts_hold():
    """Planners choose by them."""
    check_facts(schedule("gpipe", 3, 4))

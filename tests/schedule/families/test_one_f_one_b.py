"""1F1B: its order, its time, its memory, and what slow links do to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: LITERATURE 11.2, rows 1f1b: p, m, makespan, bubble ratio. f = 1, b = 2.
ROWS = [(2, 2, 9, 0.3333), (2, 4, 15, 0.2000), (2, 8, 27, 0.1111), (4, 4, 21, 0.4286), (4, 8, 33, 0.2727), (4, 16, 57, 0.1579),
        (8, 8, 45, 0.4667), (8, 16, 69, 0.3043), (8, 32, 117, 0.1795)]  # fmt: skip

#: LITERATURE 3.3, p = 4, m = 8.
ORDER = """\
0: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
1: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
2: F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"""


def test_one_f_one_b_has_the_published_order():
    """Narayanan et al. 2021, section 3.4, to the op."""
    made = schedule("1f1b", 4, 8)
    for line, program in zip(ORDER.splitlines(), made.programs, strict=True):
        stage, _, ops = line.partition(":")
        assert [str(op) for op in program] == [*(f"{stage}{op}" for op in ops.split()), f"{stage}U1"]


@pytest.mark.parametrize("alias", ["dapple", "pipedream-flush"])
def test_the_other_published_names_make_the_same_schedule(alias):
    """DAPPLE's policy A and PipeDream-Flush are 1F1B (LITERATURE 0.4)."""
    assert schedule(alias, 3, 5) == schedule("1f1b", 3, 5)


def test_one_f_one_b_with_fewer_micro_batches_than_stages_never_fills():
    """Legal, and then as GPipe: all forwards first on the early stages."""
    assert str(schedule("1f1b", 3, 1)) == "rank 0 | 0F0 0B0 0U1\nrank 1 | 1F0 1B0 1U1\nrank 2 | 2F0 2B0 2U1"


@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
def test_one_f_one_b_agrees_with_the_table_of_the_literature(p, m, makespan, ratio):
    """The oracle was made by another simulator."""
    line = simulate_schedule(schedule("1f1b", p, m), Costs(forward=1, backward=2))
    assert line.makespan == makespan
    assert line.bubble_ratio == pytest.approx(ratio, abs=5e-5)
    assert line.peak_in_flight == tuple(range(p, 0, -1))


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_one_f_one_b_takes_gpipes_time_with_at_most_p_minus_s_in_flight(p, m, f, b):
    """The promise of 1F1B: the bubble of GPipe for a fraction of its memory."""
    line = simulate_schedule(schedule("1f1b", p, m), Costs(forward=f, backward=b))
    assert line.makespan == (m + p - 1) * (f + b)
    assert line.peak_in_flight == tuple(min(m, p - s) for s in range(p))


@pytest.mark.parametrize(
    ("p", "m", "c", "makespan"), [(4, 8, 1, 49), (4, 8, 2, 65), (4, 8, 3, 81), (4, 16, 2, 113), (8, 20, 2, 173)]
)
def test_one_f_one_b_with_slow_hops_agrees_with_the_oracles(p, m, c, makespan):
    """LITERATURE 11.5: f = 1, b = 2, c seconds each way."""
    assert simulate_schedule(schedule("1f1b", p, m), Costs(forward=1, backward=2, transfer=c)).makespan == makespan


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize(("f", "b", "c"), [(1, 2, 1), (3, 4, 2), (1, 2, 3)])
def test_one_f_one_b_pays_two_hops_for_all_but_one_micro_batch_in_p(p, f, b, c):
    """The hop-hiding law of LITERATURE 4.1 for BaPipe's 1F1B-SNO, on its whole range."""
    for m in range(1, 40):
        expected = (m + p - 1) * (f + b) + (m + p - 2 - -(-(m - 1) // p)) * 2 * c
        assert simulate_schedule(schedule("1f1b", p, m), Costs(forward=f, backward=b, transfer=c)).makespan == expected, m

"""GEMS: one micro-batch at a time each way, its time, its memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_copies, rows_of, timeline_of

from penstock.schedule.catalogue import schedule


def test_gems_runs_every_micro_batch_forward_and_back_before_the_next():
    """docs/literature/gems.md: F0 B0 F1' B1' F2 B2 on every rank, even micro-batches down, odd ones up."""
    assert rows_of(schedule("gems", 3, 3)) == [
        "0F0 0B0 2F1 2B1 0F2 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
        "2F0 2B0 0F1 0B1 2F2 2B2",
    ]


@pytest.mark.parametrize(
    ("p", "m", "makespan"), [(4, 4, 39), (4, 8, 75), (8, 8, 143), (8, 32, 551)]
)
def test_gems_agrees_with_the_oracles(p, m, makespan):
    """docs/literature/gems.md, f = 1, b = 2."""
    assert timeline_of(schedule("gems", p, m)).makespan == makespan


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 5), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_gems_keeps_its_formula_and_holds_one_micro_batch(p, m, f, more):
    """Odd numbers of stages and of micro-batches too; the last micro-batch is then alone."""
    gems = schedule("gems", p, m)
    b = f + more
    assert timeline_of(gems, f, b).makespan == m * (f + p * b) + (p - 1) * f
    assert check_copies(gems).peak_on_rank == (1,) * p


def test_the_bubble_nears_the_published_ratio():
    """(D - 1)/(D + 1/2), for b = 2f (Guan et al. 2024, table 3)."""
    assert timeline_of(schedule("gems", 6, 400)).bubble_ratio == pytest.approx(5 / 6.5, abs=1e-3)


def test_with_one_micro_batch_nothing_goes_up():
    """There are no copies that synchronise: it is `naive`."""
    assert schedule("gems", 4, 1).programs == schedule("naive", 4, 1).programs


def test_the_middle_stage_of_an_odd_number_has_no_copy():
    """The middle rank has the same stage of both pipelines."""
    assert schedule("gems", 5, 4).ranks_of_stage == ((0, 4), (1, 3), (2,), (1, 3), (0, 4))

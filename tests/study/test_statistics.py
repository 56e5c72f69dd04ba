"""Few numbers, and what is made of them."""

from __future__ import annotations

import math

import pytest

from penstock.study.statistics import (
    Spread,
    batches_to_loss,
    final_loss,
    separation_probability,
    smooth,
    window_length,
)


def test_a_spread_has_mean_least_most_and_width():
    """All that three seeds can tell."""
    spread = Spread((3.0, 1.0, 2.0))
    assert (spread.mean, spread.low, spread.high, spread.width) == (2.0, 1.0, 3.0, 2.0)


@pytest.mark.parametrize(("seeds", "odds"), [(1, 1 / 2), (2, 1 / 6), (3, 1 / 20), (5, 1 / 252)])
def test_chance_of_parting_by_luck_is_one_in_all_orders(seeds, odds):
    """The permutation test's own number: it says how far three seeds can be trusted."""
    assert separation_probability(seeds, seeds) == pytest.approx(odds)


def test_an_arrival_counts_the_first_batch_whose_window_is_low_enough():
    """One lucky batch is no arrival, and a loss that comes back up has still been there."""
    losses = [4.0, 0.0, 4.0, 1.0, 1.0, 5.0]
    assert batches_to_loss(losses, 1.0, 2) == 5
    assert batches_to_loss(losses, 1.0, 1) == 2
    assert batches_to_loss(losses, 0.5, 2) is None


def test_curves_have_the_same_windows_for_runs_that_were_given_up():
    """Points of a short run stand at the same samples as those of a whole one."""
    assert smooth(range(7), 3) == smooth(range(11), 3)[:2]
    assert window_length(10) == 1
    assert window_length(712) == 15


def test_a_run_ends_at_the_mean_of_its_last_tenth():
    """Single batches are noisy."""
    assert final_loss([9.0] * 18 + [1.0, 3.0]) == 2.0
    assert math.isclose(final_loss([2.0]), 2.0)

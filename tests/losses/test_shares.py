"""Arithmetic of the weights of micro-batches in the loss of a batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.errors import SettingError
from penstock.losses.shares import (
    common_weights,
    mean_or_sum_weights,
    ones,
    rounded_to_shares,
    sum_weights,
    weights_by_term,
    weights_of,
)
from penstock.losses.terms import UnknownForm

SHARES = [0.5, 0.25, 0.25]


def test_counts_are_weights_by_their_part_of_the_total():
    """Of the given total, which need not be their sum; without any the samples count."""
    assert weights_of([1.0, 2.0, 1.0], 4.0, SHARES) == [0.25, 0.5, 0.25]
    assert weights_of([1.0, 2.0, 1.0], 8.0, SHARES) == [0.125, 0.25, 0.125]
    assert weights_of([0.0, 0.0, 0.0], 0.0, SHARES) == SHARES
    assert weights_of([0.0, 0.0, 0.0], 0.0, SHARES) is not SHARES


def test_weights_that_equal_the_shares_up_to_rounding_are_the_shares():
    """Then micro-batches of equal weight start from the same gradient."""
    close = [0.5 + 1e-12, 0.25, 0.25 - 1e-12]
    assert rounded_to_shares(close, SHARES) == SHARES
    other = [0.5 + 1e-6, 0.25, 0.25]
    assert rounded_to_shares(other, SHARES) == other
    last = [0.5, 0.25, 0.25 + 1e-6]
    assert rounded_to_shares(last, SHARES) == last


def test_a_sum_with_a_count_is_divided_by_all_counts():
    """Each micro-batch's sum by the same number; nothing to divide by is refused."""
    assert sum_weights([1.0, 0.0, 3.0]) == [0.25] * 3
    assert sum_weights([0.25, 0.25]) == [2.0] * 2
    for counts in ([0.0, 0.0], [1.0, -2.0], [float("nan")]):
        with pytest.raises(SettingError, match="must add up to more than 0"):
            sum_weights(counts)


def batch_of(rows, shares):
    """Return a batch whose micro-batches have slices of these numbers."""
    return SimpleNamespace(rows=lambda: rows, shares=shares, inputs=[None] * len(shares))


@pytest.mark.parametrize(
    ("adds_up", "weights"),
    [
        (("shares", "shares"), [0.5, 0.125, 0.375]),
        (("sums", "sums"), [1.0, 1.0, 1.0]),
        (("shares", "sums"), [0.5, 0.5, 0.5]),
        (("sums", "shares"), [1.0, 0.25, 0.75]),
    ],
)
def test_slices_weigh_by_their_samples_and_their_tokens(adds_up, weights):
    """A micro-batch of one slice, and one of two slices of one and three tokens."""
    batch = batch_of([[0], [1, 2]], [0.5, 0.125, 0.375])
    assert mean_or_sum_weights(batch, adds_up) == pytest.approx(weights)
    assert ones(batch) == [1.0] * 3


def terms(*divisors):
    """Return the terms of a loss with these divisors."""
    return [SimpleNamespace(divisor=divisor) for divisor in divisors]


def test_each_term_of_a_loss_has_its_own_weights():
    """By its own divisor in the loss of the batch; other terms in some micro-batch are refused."""
    rows = [terms(1.0, 4.0), terms(3.0, 4.0)]
    columns = weights_by_term(rows, terms(4.0, 16.0), [0.5, 0.5])
    assert columns == [[0.25, 0.75], [0.25, 0.25]]
    with pytest.raises(UnknownForm, match="come and go"):
        weights_by_term([terms(1.0, 4.0), terms(3.0)], terms(4.0, 16.0), [0.5, 0.5])
    with pytest.raises(UnknownForm, match="come and go"):
        weights_by_term(rows, terms(4.0), [0.5, 0.5])


def test_a_divisor_of_zero_needs_those_of_the_others_to_be_that_of_the_batch():
    """A micro-batch in which nothing counts may be left out. Otherwise a part of the batch is lost,
    as of a loss that compares neighbours, in micro-batches of one sample.
    """
    rows = [terms(0.0), terms(3.0), terms(1.0)]
    assert weights_by_term(rows, terms(4.0), SHARES) == [[0.0, 0.75, 0.25]]
    (column,) = weights_by_term(rows, terms(4.0001), SHARES)
    assert column == pytest.approx([0.0, 0.75, 0.25], rel=1e-4)
    with pytest.raises(SettingError, match=r"by 5, .* by 4 together; that of micro-batch 0 by 0"):
        weights_by_term(rows, terms(5.0), SHARES)
    above = [terms(1.0), terms(3.0), terms(1.0)]
    assert weights_by_term(above, terms(4.0), SHARES) == [[0.25, 0.75, 0.25]]


def test_all_terms_must_weigh_alike():
    """A backward starts with one gradient for the whole loss of a micro-batch."""
    assert common_weights([[0.25, 0.75]]) == [0.25, 0.75]
    assert common_weights([[0.25, 0.75], [0.25, 0.75]]) == [0.25, 0.75]
    for other in ([0.5, 0.75], [0.25, 0.5]):
        with pytest.raises(UnknownForm, match="count differently"):
            common_weights([[0.25, 0.75], [0.25, 0.75], other])

"""Slices: their numbers, their shares, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.slicing import Slicing, micro_batches_in

MIXED = Slicing("samples", ((0.5, 0.5), (1.0,), (0.25, 0.25, 0.5)))


def test_slices_are_counted_through():
    """An op has one number, so a slice needs one that says its micro-batch too."""
    assert MIXED.micro_batch_of == (0, 0, 1, 2, 2, 2)
    assert MIXED.share == (0.5, 0.5, 1.0, 0.25, 0.25, 0.5)
    assert MIXED.first_of == (0, 2, 3)


def test_a_label_names_micro_batch_and_slice_but_no_slice_of_a_whole():
    """The papers' way to write them."""
    assert [MIXED.label(number) for number in range(6)] == ["0.0", "0.1", "1", "2.0", "2.1", "2.2"]


def test_neighbours_are_slices_of_the_same_micro_batch():
    """A sequence depends on no other."""
    assert [MIXED.neighbour(number, 1) for number in range(6)] == [1, None, None, 4, 5, None]
    assert [MIXED.neighbour(number, -1) for number in range(6)] == [None, 0, None, None, 3, 4]
    assert MIXED.neighbour(3, 2) == 5


@given(st.integers(1, 40), st.integers(1, 5))
def test_equal_slices_add_up_to_whole_micro_batches(slices, micro_batches):
    """Thirds do not add up to 1 as floats; counts of micro-batches must."""
    slicing = Slicing.even("tokens", slices, micro_batches)
    assert len(slicing.share) == slices * micro_batches
    assert micro_batches_in(sum(slicing.share)) == micro_batches
    assert isinstance(micro_batches_in(sum(slicing.share)), int)


def test_whole_numbers_are_taken_for_shares():
    """A user writes 1 for a whole."""
    assert Slicing("tokens", ([1], [0.5, 0.5])).shares == ((1.0,), (0.5, 0.5))


@pytest.mark.parametrize("row", [(), (0.5, 0.6), (1.5, -0.5), (0.0, 1.0), (0.3, 0.3)])
def test_shares_that_do_not_make_a_whole_are_refused(row):
    """A step would weigh samples twice or not at all."""
    with pytest.raises(
        ScheduleError,
        match=r"the slices of micro-batch 1 have shares .*: shares must be above 0 and add up to 1",
    ):
        Slicing("tokens", ((1.0,), row))


def test_other_ways_to_cut_are_refused():
    """Each has rules of its own."""
    with pytest.raises(
        ScheduleError, match="slices are cut along tokens or samples, not 'channels'"
    ):
        Slicing("channels", ((1.0,),))


def test_shares_are_compared_and_summed_up_to_their_rounding():
    """A billionth is rounding; a millionth is a mistake."""
    assert Slicing("samples", ((0.5, 0.5 + 1e-10),)).share == (0.5, 0.5 + 1e-10)
    with pytest.raises(ScheduleError, match="the slices of micro-batch 0 have shares"):
        Slicing("samples", ((0.5, 0.5 + 1e-6),))
    assert [micro_batches_in(total) for total in (2.5, 1 / 3, 0.0)] == [2.5, 0.333333333, 0]
    assert micro_batches_in(3 - 1e-10) == 3
    assert micro_batches_in(3 - 1e-6) == 3 - 1e-6


def test_a_neighbour_is_no_slice_before_the_first_or_after_the_last():
    """Negative numbers count from the end of a tuple."""
    whole = Slicing("tokens", ((0.5, 0.5),))
    assert [whole.neighbour(number, offset) for number, offset in ((0, -1), (1, 1), (0, 0))] == [
        None,
        None,
        0,
    ]

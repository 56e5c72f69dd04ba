"""TeraPipe: slices of sequences through GPipe, their orders, time and memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_facts, rows_of, timeline_of

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.verify.verify import verify


def shares_of(numbers):
    """Shares in the ratio of these numbers."""
    return tuple(number / sum(numbers) for number in numbers)


def test_terapipe_runs_slices_forward_in_order_and_backward_in_reverse():
    """A token's gradient is made of those of all tokens that looked back to it."""
    terapipe = schedule("terapipe", 2, 2, slices=3)
    assert rows_of(terapipe)[0] == "0F0 0F1 0F2 0F3 0F4 0F5 0B2 0B1 0B0 0B5 0B4 0B3"
    assert terapipe.slicing.along == "tokens"
    assert (terapipe.micro_batches, terapipe.slices) == (2, 6)


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_terapipe_keeps_its_formula_for_any_shares(p, m, numbers, b):
    """Per direction the sum of all slices and p - 1 times the largest (Li et al. 2021, section
    3.3).
    """
    shares = shares_of(numbers)
    terapipe = schedule("terapipe", p, m, slice_shares=shares)
    assert timeline_of(terapipe, 1, b).makespan == pytest.approx(
        (m + (p - 1) * max(shares)) * (1 + b)
    )
    assert verify(terapipe).peak_on_rank == (m,) * p


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_equal_slices_divide_the_bubble_of_gpipe(p, m, k):
    """(p - 1)(f + b)/k."""
    terapipe = schedule("terapipe", p, m, slices=k)
    assert timeline_of(terapipe).makespan == pytest.approx(3 * m + 3 * (p - 1) / k)
    assert schedule("terapipe", p, m, slice_shares=[1 / k] * k).programs == terapipe.programs


@pytest.mark.parametrize("name", ["terapipe", "seq1f1b"])
def test_the_number_of_slices_may_be_given_beside_their_shares(name):
    """If both agree; a plan has all options of its schedule."""
    shares = [0.5, 0.25, 0.25]
    both = schedule(name, 2, 3, slices=3, slice_shares=shares)
    assert both.programs == schedule(name, 2, 3, slice_shares=shares).programs
    assert both.slicing.shares == (tuple(shares),) * 3


def test_one_slice_is_gpipe():
    """Micro-batches are whole then, and the programs those of GPipe."""
    assert schedule("terapipe", 3, 4, slices=1).programs == schedule("gpipe", 3, 4).programs


@pytest.mark.parametrize("name", ["terapipe", "seq1f1b"])
def test_slices_that_are_none_are_refused(name):
    """Both families take the same options."""
    for wrong in (0, -1, True, 2.0, "2"):
        with pytest.raises(
            ScheduleError, match=f"{name} needs at least 1 of slices and got {wrong!r}"
        ):
            schedule(name, 2, 2, slices=wrong)
    with pytest.raises(
        ScheduleError, match=rf"{name} got slices=3 and slice_shares for 2: one of them is enough"
    ):
        schedule(name, 2, 2, slices=3, slice_shares=[0.5, 0.5])
    with pytest.raises(
        ScheduleError,
        match=r"slices of micro-batch 0 have shares \(0.5, 0.6\): shares must be above 0 and add up to 1",
    ):
        schedule(name, 2, 2, slice_shares=[0.5, 0.6])


@pytest.mark.parametrize("name", ["terapipe", "seq1f1b"])
def test_the_catalogue_says_that_the_model_must_be_causal(name):
    """A planner must not offer it for a convolutional network."""
    assert schedules()[name].causal
    assert not schedules()["gpipe"].causal


@pytest.mark.parametrize("name", ["terapipe", "seq1f1b"])
def test_options_make_the_same_schedule_again(name):
    """A plan stores name, numbers and options, and no programs."""
    family_schedule = schedule(name, 3, 2, slice_shares=[0.5, 0.25, 0.25])
    assert (
        schedule(
            family_schedule.name,
            family_schedule.stages,
            family_schedule.micro_batches,
            **dict(family_schedule.options),
        )
        == family_schedule
    )


def test_sequences_are_cut_in_two_by_default_and_need_a_causal_model():
    """The facts of the catalogue hold."""
    terapipe = schedule("terapipe", 3, 4)
    check_facts(terapipe)
    assert terapipe.programs == schedule("terapipe", 3, 4, slices=2).programs
    assert terapipe.shares == (0.5,) * 8

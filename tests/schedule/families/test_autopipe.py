"""AutoPipe's slicer: half the start-up, how many micro-batches have to be cut for it, and the
memory of 1F1B.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_facts, timeline_of

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify


def test_the_first_micro_batches_run_as_two_halves():
    """1F1B's order, with both halves where the whole was."""
    autopipe = schedule("autopipe", 3, 3, sliced=1)
    assert autopipe.slicing.shares == ((0.5, 0.5), (1.0,), (1.0,))
    assert str(autopipe).splitlines() == [
        "rank 0 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U1",
        "rank 1 | 1F0 1F1 1F2 1B0 1B1 1F3 1B2 1B3 1U1",
        "rank 2 | 2F0 2F1 2B0 2B1 2F2 2B2 2F3 2B3 2U1",
    ]
    assert (autopipe.micro_batches, autopipe.slices) == (3, 4)


@pytest.mark.parametrize(
    ("p", "m", "sliced", "makespan"),
    [(4, 8, 1, 31.5), (8, 16, 2, 65.5), (4, 8, 0, 33), (8, 16, 0, 69)],
)
def test_autopipe_agrees_with_the_oracles(p, m, sliced, makespan):
    """docs/literature/autopipe.md, f = 1, b = 2: the start-up falls from (p - 1)f to (p - 1)f/2, and the
    makespan with it.
    """
    assert timeline_of(schedule("autopipe", p, m, sliced=sliced)).makespan == makespan


@pytest.mark.parametrize(
    ("p", "m", "sliced"), [(4, 8, 1), (8, 16, 2), (1, 4, 0), (9, 16, 2), (10, 16, 3), (8, 1, 1)]
)
def test_as_few_are_cut_as_suffice_for_backwards_of_twice_a_forward(p, m, sliced):
    """Every half costs a kernel launch and fills the device less."""
    autopipe = schedule("autopipe", p, m)
    assert autopipe.programs == schedule("autopipe", p, m, sliced=sliced).programs
    assert (autopipe.slicing is None) == (sliced == 0)


@given(st.integers(1, 8), st.integers(1, 32), st.integers(0, 8), st.integers(1, 4))
@settings(deadline=None, max_examples=80)
def test_autopipe_gains_half_the_start_up_exactly_from_the_number_it_says(p, m, sliced, b):
    """(p - 1)f/2b of them: the first whole micro-batch must be there when the last stage has
    finished with the halves.
    """
    sliced = min(sliced, m)
    autopipe = schedule("autopipe", p, m, sliced=sliced)
    plain = (m + p - 1) * (1 + b)
    makespan = timeline_of(autopipe, 1, b).makespan
    if sliced == m:
        assert makespan <= plain - (p - 1) / 2
        assert sliced < (p - 1) / (2 * b) or makespan == plain - (p - 1) * (1 + b) / 2
    elif sliced >= (p - 1) / (2 * b):
        assert makespan == plain - (p - 1) / 2
    else:
        assert plain - (p - 1) / 2 < makespan <= plain
    assert verify(autopipe).peak_on_rank == tuple(min(m, p - s) for s in range(p))


def test_with_none_cut_it_is_1f1b():
    """On one stage there is no start-up to shorten."""
    assert schedule("autopipe", 4, 8, sliced=0).programs == schedule("1f1b", 4, 8).programs
    assert schedule("autopipe", 1, 8).programs == schedule("1f1b", 1, 8).programs


@pytest.mark.parametrize("sliced", [-1, 9, True, 1.0, "1"])
def test_a_number_that_is_none_of_the_micro_batches_is_refused(sliced):
    """Only micro-batches that are there can be cut."""
    with pytest.raises(
        ScheduleError, match=r"autopipe cuts 0 to 8 of 8 micro-batches in two, not "
    ):
        schedule("autopipe", 4, 8, sliced=sliced)


def test_the_catalogues_facts_hold():
    """Slices of samples need no causal model."""
    check_facts(schedule("autopipe", 3, 4))

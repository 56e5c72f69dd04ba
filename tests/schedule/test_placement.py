"""Placement of stages on ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.placement import (
    bidirectional,
    linear,
    ranks_for,
    ring,
    stages_of,
    vee,
    zigzag,
)


def test_the_drawing_at_the_top_of_the_file_is_right():
    """Readers take stage indices from it."""
    assert [stages_of(linear(4), rank) for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [stages_of(ring(8, 4), rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [stages_of(vee(8, 4), rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    waves = [(0, 7, 8, 15), (1, 6, 9, 14), (2, 5, 10, 13), (3, 4, 11, 12)]
    assert [stages_of(zigzag(16, 4), rank) for rank in range(4)] == waves
    copies = [tuple(stages_of(way, rank)[0] for way in bidirectional(4)) for rank in range(4)]
    assert copies == [(0, 3), (1, 2), (2, 1), (3, 0)]


@given(st.integers(1, 9), st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_every_rank_holds_as_many_stages_and_a_step_goes_to_a_neighbour_or_nowhere(
    ranks, stages_per_rank
):
    """A ring also steps from the last rank to the first, a zigzag never: its turns are what saves
    the hops.
    """
    for placement, far in (
        (ring(ranks * stages_per_rank, ranks), {1, 1 - ranks}),
        (zigzag(ranks * stages_per_rank, ranks), {-1, 0, 1}),
    ):
        assert [len(stages_of(placement, rank)) for rank in range(ranks)] == [
            stages_per_rank
        ] * ranks
        assert {after - before for before, after in pairwise(placement)} <= far


def test_stages_that_cannot_be_dealt_out_evenly_are_refused_with_the_nearest_that_can():
    """The reader has to change one number, and may not know which."""
    assert ranks_for("mine", 12, "waves", 2, factor=2) == 3
    with pytest.raises(
        ScheduleError,
        match="mine with waves=2 has 4 stages on every rank, so it takes a multiple of 4 stages, "
        "not 6: use 4 or 8, or another value of waves",
    ):
        ranks_for("mine", 6, "waves", 2, factor=2)
    with pytest.raises(ScheduleError, match="not 2: use 3, or another value of chunks"):
        ranks_for("mine", 2, "chunks", 3)


@pytest.mark.parametrize("number", [0, -1, 1.0, "2", True, None])
def test_a_number_of_stages_per_rank_that_counts_nothing_is_refused(number):
    """A bool counts as an int in Python; as a number of stages it is a mistake."""
    with pytest.raises(ScheduleError, match="mine needs at least 1 of chunks and got"):
        ranks_for("mine", 4, "chunks", number)


@pytest.mark.parametrize(
    ("number", "factor", "ranks"), [(1, 1, 12), (3, 1, 4), (1, 2, 6), (2, 3, 2)]
)
def test_twelve_stages_need_their_number_over_those_of_a_rank(number, factor, ranks):
    """One stage to a rank is enough."""
    assert ranks_for("mine", 12, "chunks", number, factor=factor) == ranks

"""V shapes: number of ranks, and the stages on each."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.v_shape import ranks_of_v, stages_of_v


def test_a_rank_holds_a_stage_of_the_way_down_and_one_of_the_way_back():
    """The last rank's two follow each other."""
    assert [stages_of_v(rank, 3) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_half_a_stage_more_is_refused():
    """Both numbers that would do are named."""
    assert ranks_of_v("mine", 6) == 3
    with pytest.raises(
        ScheduleError, match=r"mine goes down the ranks and back up.* and got 7; use 6 or 8$"
    ):
        ranks_of_v("mine", 7)
    with pytest.raises(ScheduleError, match=r"got 1; use 2$"):
        ranks_of_v("mine", 1)
    with pytest.raises(ScheduleError, match=r"got 3; use 2 or 4$"):
        ranks_of_v("mine", 3)

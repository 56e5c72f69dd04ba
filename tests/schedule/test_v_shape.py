"""The pen of schedules on a V: it counts micro-batches, pairs W with its I, and leaves out what is not there."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.v_shape import VProgram, ranks_of_v


def written(*lines, micro_batches=9):
    """Rank 1 of three: stages 1 and 4."""
    pen = VProgram(rank=1, ranks=3)
    for times, moves in lines:
        pen.write(times, moves)
    return " ".join(map(str, pen.ops(micro_batches)))


def test_each_way_counts_its_own_micro_batches():
    """F, backwards and W of a stage come in the order of the micro-batches, so only the kinds are left to write."""
    assert written((2, "F0 F1"), (1, "I0")) == "1F0 4F0 1F1 4F1 1I0"


def test_a_backward_is_counted_whole_or_in_parts():
    """A micro-batch has a B, or an I and a W."""
    assert written((2, "F0"), (1, "B0 I0 W")) == "1F0 1F1 1B0 1I1 1W1 1U1"


def test_a_bare_w_is_of_the_oldest_i_of_either_way():
    """DualPipe's queue."""
    assert written((1, "F0 F1 I1 I0 W W")) == "1F0 4F0 4I0 1I0 4W0 4U1 1W0 1U1"


def test_what_is_not_there_is_left_out():
    """Closed forms are written for full pipelines; nothing is written a negative number of times."""
    assert written((3, "F0 B0"), (-2, "F1"), micro_batches=2) == "1F0 1B0 1F1 1B1 1U1"


def test_half_a_stage_more_is_refused():
    """Both numbers that would do are named."""
    assert ranks_of_v("mine", 6) == 3
    with pytest.raises(ScheduleError, match=r"mine goes down the ranks and back up.* and got 7; ask for 6 or 8$"):
        ranks_of_v("mine", 7)

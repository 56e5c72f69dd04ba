"""XPipe: the order of PipeDream, with other weights."""

from __future__ import annotations

import pytest
from tests.schedule.families.stream_laws import check_batches, check_stream, seconds_per_batch

from penstock.schedule.catalogue import schedule, schedules


@pytest.mark.parametrize(("stages", "size"), [(1, 1), (2, 1), (3, 2), (4, 4), (8, 3)])
def test_it_runs_in_pipedreams_order_and_time(stages, size):
    """Micro-batches of several batches are in flight, as in Guan et al. 2019; what differs is what
    they read.
    """
    xpipe = schedule("xpipe", stages, size)
    assert check_stream(xpipe).peak_in_flight == tuple(range(stages, 0, -1))
    assert xpipe.programs == schedule("pipedream", stages, size).programs
    assert seconds_per_batch(xpipe) == pytest.approx(3 * size)
    assert schedules()["xpipe"].weights == xpipe.stream.weights == "xpipe"


def test_any_number_of_batches_is_a_part_of_the_same_programs():
    """By default they have four periods more than are in flight."""
    check_batches("xpipe", 4, 1, default_batches=8)
    check_batches("xpipe", 3, 2, default_batches=6)

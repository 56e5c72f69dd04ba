"""AvgPipe: copies of the weights that take turns, each with its update before its next batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.stream_laws import check_batches, check_stream, gaps, seconds_per_batch

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.op import Kind, Op


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("size", range(1, 9))
def test_every_forward_comes_after_its_copys_last_update(stages, size):
    """Batch t reads what batch t - N has left, on every stage: no gradient is stale, and the copy
    needs no second version.
    """
    for pipelines in (2, 3, 4):
        avgpipe = schedule("avgpipe", stages, size, pipelines=pipelines)
        for stage, program in enumerate(avgpipe.programs):
            place = {op: i for i, op in enumerate(program)}
            for batch in range(pipelines, avgpipe.batches):
                update = Op(Kind.U, stage, batch - pipelines + 1)
                assert all(
                    place[update] < place[Op(Kind.F, stage, n)]
                    for n in range(batch * size, (batch + 1) * size)
                )


@given(st.integers(1, 8), st.integers(1, 8), st.integers(2, 4))
@settings(deadline=None, max_examples=15)
def test_there_is_no_bubble_where_the_other_copies_batches_fill_the_pipeline(
    stages, size, pipelines
):
    """With k = (N - 1)m + 1 in flight; with fewer than p the time is ceil(p / k) times as long,
    which is the best that k can do.
    """
    avgpipe = schedule("avgpipe", stages, size, pipelines=pipelines)
    most = (pipelines - 1) * size + 1
    peaks = check_stream(avgpipe).peak_in_flight
    if most >= stages:
        assert peaks == tuple(
            min(2 * (stages - stage) - 1, most - stage) for stage in range(stages)
        )
    else:
        assert peaks == tuple(-(-(stages - stage) * most // stages) for stage in range(stages))
    assert seconds_per_batch(avgpipe) == pytest.approx(3 * size * -(-stages // most))
    assert all(one >= other for one, other in pairwise(peaks))


def test_with_room_for_it_the_forwards_ahead_are_the_papers():
    """Advance forward propagation on four stages, from the paper's figure: 7, 5, 3, 1."""
    assert check_stream(schedule("avgpipe", 4, 6)).peak_in_flight == (7, 5, 3, 1)
    assert check_stream(schedule("avgpipe", 4, 3, pipelines=3)).peak_in_flight == (7, 5, 3, 1)


def test_between_1f1b_and_all_that_a_copy_may_the_forwards_ahead_are_free():
    """The paper tunes them by profiling."""
    avgpipe = schedule("avgpipe", 3, 4, warm_up=(3, 2, 1))
    assert check_stream(avgpipe).peak_in_flight == (3, 2, 1)
    assert set(gaps(avgpipe).values()) == {
        0,
        1,
    }  # updates of other copies, which are no concern of this one's
    with pytest.raises(
        ScheduleError,
        match="avgpipe with 2 pipelines and 4 micro-batches per batch runs at most 5 forwards ahead, not 6: "
        "one more would be of a copy's next batch, before its update; take more pipelines",
    ):
        schedule("avgpipe", 3, 4, warm_up=(6, 2, 1))
    with pytest.raises(ScheduleError, match="avgpipe would deadlock: stage 1 needs 2 forwards"):
        schedule("avgpipe", 2, 4, warm_up=(1, 2))


@pytest.mark.parametrize("wrong", [1, 0, -1, True, 2.0, "2", None])
def test_fewer_than_two_pipelines_are_refused(wrong):
    """An average of one is itself."""
    with pytest.raises(ScheduleError, match=f"avgpipe averages 2 or more pipelines, not {wrong!r}"):
        schedule("avgpipe", 2, 2, pipelines=wrong)


def test_its_batches_are_whole_rounds_of_its_copies():
    """So that the default ends with every copy as often updated as the others."""
    for pipelines in (2, 3, 5):
        avgpipe = schedule("avgpipe", 4, 3, pipelines=pipelines)
        assert avgpipe.batches % pipelines == 0
        assert avgpipe.stream.pipelines == pipelines
    assert schedules()["avgpipe"].weights == avgpipe.stream.weights == "avgpipe"


def test_any_number_of_batches_is_a_part_of_the_same_programs():
    """By default they have four periods more than are in flight."""
    check_batches("avgpipe", 3, 2, default_batches=10)
    check_batches("avgpipe", 3, 1, default_batches=15, pipelines=3)
    check_batches("avgpipe", 8, 1, default_batches=10)

"""PipeDream-2BW: batches large enough for a delay of one."""

from __future__ import annotations

import pytest
from tests.schedule.families.stream_laws import check_batches, check_stream, gaps, seconds_per_batch

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.verify.verify import verify


@pytest.mark.parametrize("stages", range(1, 9))
def test_no_forward_lacks_more_than_one_update(stages):
    """So two versions are enough (Narayanan et al. 2021, section 3.1); with one micro-batch less
    too, as its refusal says.
    """
    for size in range(stages, 10):
        two_bw = schedule("2bw", stages, size)
        report = check_stream(two_bw)
        assert set(gaps(two_bw).values()) <= {0, 1}
        assert report.peak_in_flight == tuple(range(stages, 0, -1))
        assert report.versions == (2,) * stages
        assert two_bw.programs == schedule("pipedream", stages, size).programs
    if stages > 2:
        assert set(gaps(schedule("pipedream", stages, stages - 1)).values()) == {0, 1}
        assert 2 in gaps(schedule("pipedream", stages, stages - 2)).values()


@pytest.mark.parametrize(("stages", "size"), [(1, 1), (2, 2), (4, 4), (4, 7), (8, 8)])
def test_there_is_no_bubble_once_it_is_full(stages, size):
    """As in PipeDream; what it saves is memory."""
    assert seconds_per_batch(schedule("2bw", stages, size)) == pytest.approx(3 * size)


def test_smaller_batches_are_refused_with_the_reason():
    """Two versions would not be enough; the message has the numbers that are."""
    with pytest.raises(
        ScheduleError,
        match=r"2bw in 4 stages keeps two versions of the weights, which is enough with 4 or more "
        r"micro-batches per batch \(in this order one less would still do, but no fewer\), not with 3: "
        r"take more of them, or pipedream",
    ):
        schedule("2bw", 4, 3)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "replicas", "message"),
    [
        (5, 6, (1, 1, 1, 1, 2), "stage 4 has 2 ranks, which leaves 3 of 6 for one .* Take 10 or"),
        (3, 6, (3, 2, 1), "stage 0 has 3 ranks, which leaves 2 of 6 for one .* Take 12 or more"),
    ],
)
def test_ranks_with_too_few_micro_batches_are_refused_where_the_schedule_is_made(
    stages, micro_batches, replicas, message
):
    """`verify` would refuse the schedule; with the number in the message it is sound."""
    with pytest.raises(ScheduleError, match=message) as caught:
        schedule("2bw", stages, micro_batches, replicas=replicas)
    enough = int(str(caught.value).partition("Take ")[2].split()[0])
    verify(schedule("2bw", stages, enough, replicas=replicas))


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (2, 2, 1), (1, 3, 2)])
def test_uneven_ranks_are_sound_as_soon_as_they_are_taken(replicas):
    """The least number that is taken passes `verify`, and no smaller one is taken."""
    stages = len(replicas)
    taken = []
    for micro_batches in range(1, 4 * stages * max(replicas)):
        try:
            two_bw = schedule("2bw", stages, micro_batches, replicas=replicas)
        except ScheduleError:
            continue
        verify(two_bw)
        taken.append(micro_batches)
    assert taken
    assert min(taken) // max(replicas) >= stages


def test_it_is_found_by_its_long_name():
    """The alias is the name in the paper."""
    assert schedule("pipedream-2bw", 3, 4) == schedule("2bw", 3, 4)
    assert schedules()["2bw"].weights == schedule("2bw", 3, 4).stream.weights == "double-buffer"


def test_any_number_of_batches_is_a_part_of_the_same_programs():
    """By default they have four periods more than are in flight."""
    check_batches("2bw", 3, 3, default_batches=5)
    check_batches("2bw", 2, 5, default_batches=5)

"""WPipe: its order, and the properties that make two versions enough."""

from __future__ import annotations

import pytest
from tests.schedule.families.stream_laws import check_batches, check_stream, gaps, seconds_per_batch

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.families.interleaved import in_groups
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streaming.streams import Stream
from penstock.schedule.updates import with_batch_updates

#: docs/literature/wpipe.md: rank r runs m + 2(p - 1 - r) forwards, then 1F1B; group 0 is stages 0 to 3, group
#: 1 stages 4 to 7. p = 4, m = 6.
ORDER = """\
0: 0F0 0F1 0F2 0F3 0F4 0F5 4F0 4F1 4F2 4F3 4F4 4F5 0F6 4B0 0F7 4B1 0F8 4B2 0F9 4B3 0F10 4B4 0F11 4B5 4U1 4F6 0B0 4F7 0B1 4F8 0B2 4F9 0B3 \
4F10 0B4 4F11 0B5 0U1 4B6 4B7 4B8 4B9 4B10 4B11 4U2 0B6 0B7 0B8 0B9 0B10 0B11 0U2
1: 1F0 1F1 1F2 1F3 1F4 1F5 5F0 5F1 5F2 5F3 5F4 5B0 5F5 5B1 1F6 5B2 1F7 5B3 1F8 5B4 1F9 5B5 5U1 1F10 1B0 1F11 1B1 5F6 1B2 5F7 1B3 5F8 1B4 \
5F9 1B5 1U1 5F10 5B6 5F11 5B7 5B8 5B9 5B10 5B11 5U2 1B6 1B7 1B8 1B9 1B10 1B11 1U2
2: 2F0 2F1 2F2 2F3 2F4 2F5 6F0 6F1 6F2 6B0 6F3 6B1 6F4 6B2 6F5 6B3 2F6 6B4 2F7 6B5 6U1 2F8 2B0 2F9 2B1 2F10 2B2 2F11 2B3 6F6 2B4 6F7 2B5 \
2U1 6F8 6B6 6F9 6B7 6F10 6B8 6F11 6B9 6B10 6B11 6U2 2B6 2B7 2B8 2B9 2B10 2B11 2U2
3: 3F0 3F1 3F2 3F3 3F4 3F5 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 7F4 7B4 7F5 7B5 7U1 3F6 3B0 3F7 3B1 3F8 3B2 3F9 3B3 3F10 3B4 3F11 3B5 3U1 7F6 7B6 \
7F7 7B7 7F8 7B8 7F9 7B9 7F10 7B10 7F11 7B11 7U2 3B6 3B7 3B8 3B9 3B10 3B11 3U2"""


def test_wpipe_has_the_order_of_the_literature():
    """Op by op, after the properties in the abstract: the paper's figure is not available."""
    for line, program in zip(
        ORDER.splitlines(), schedule("wpipe", 8, 6, batches=2).programs, strict=True
    ):
        assert " ".join(map(str, program)) == line.partition(": ")[2]


@pytest.mark.parametrize("ranks", range(1, 6))
def test_group_0_is_one_update_behind_and_group_1_none_in_every_batch(ranks):
    """Double-grouped weights: two versions in all; fresher than 2BW's."""
    for size in (max(1, 2 * (ranks - 1)), 2 * ranks - 1, 2 * ranks + 2):
        wpipe = schedule("wpipe", 2 * ranks, size)
        report = check_stream(wpipe)
        assert gaps(wpipe) == {
            (stage, n): int(stage < ranks and n >= size) for stage, n in wpipe.placement
        }
        assert report.peak_on_rank == tuple(
            size + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)
        )
        assert report.staleness_max == (1,) * ranks + (0,) * ranks
        assert report.versions == (2,) * ranks + (1,) * ranks
        assert seconds_per_batch(wpipe) == pytest.approx(3 * size)


@pytest.mark.parametrize("ranks", range(3, 7))
def test_with_one_micro_batch_less_gradients_would_be_two_updates_old(ranks):
    """The condition is sharp: the same order of smaller batches has longer delays in both groups,
    so they are refused.
    """
    size = 2 * (ranks - 1) - 1
    rows = tuple(with_batch_updates(row, size) for row in in_groups(ranks, 2, 6 * size, size))
    gap_of = gaps(Schedule(rows, synchronous=False, stream=Stream(6)))
    assert [
        max(gap for (stage, _), gap in gap_of.items() if stage // ranks == group)
        for group in (0, 1)
    ] == [2, 1]
    with pytest.raises(
        ScheduleError,
        match=f"wpipe on {ranks} ranks keeps two versions of the weights, which is enough with {size + 1} or "
        f"more micro-batches per batch; with {size} some gradients would be 2 updates old",
    ):
        schedule("wpipe", 2 * ranks, size)


def test_an_odd_number_of_stages_is_refused():
    """Every rank has one stage of each group."""
    with pytest.raises(
        ScheduleError,
        match="wpipe with groups=2 has 2 stages on every rank, so it takes a multiple of 2 stages, not 5",
    ):
        schedule("wpipe", 5, 8)


def test_it_is_interleaved_without_a_flush():
    """One batch of it is Megatron-LM's order with all micro-batches in one group."""
    wpipe, flushed = schedule("wpipe", 6, 5, batches=1), schedule("interleaved", 6, 5, group=5)
    assert [[op for op in row if op.kind is not Kind.U] for row in wpipe.programs] == [
        [op for op in row if op.kind is not Kind.U] for row in flushed.programs
    ]
    assert wpipe.programs[0][-1] == Op(Kind.U, 0, 1)
    assert schedules()["wpipe"].weights == wpipe.stream.weights == "wpipe"


def test_any_number_of_batches_is_a_part_of_the_same_programs():
    """By default they have four periods more than are in flight."""
    for stages, micro_batches in ((2, 1), (4, 3), (6, 4)):
        check_batches("wpipe", stages, micro_batches, default_batches=6)

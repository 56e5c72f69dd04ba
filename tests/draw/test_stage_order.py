"""Order and labels of the stages of a rank."""

from __future__ import annotations

from penstock.draw.draw import unit_timeline
from penstock.draw.stage_order import StageOrder
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule


def stage_order(name, stages, micro_batches):
    return StageOrder.of(unit_timeline(schedule(name, stages=stages, micro_batches=micro_batches)))


def test_a_plain_pipeline_needs_no_names():
    """There the rank is the stage; a second number would be noise."""
    order = stage_order("1f1b", 3, 4)
    assert order.rank_labels() == ["", "", ""]
    assert not order.has_shared_ranks
    assert not any(
        order.needs_stage_label(rank, rank) or order.is_second_shade(rank, rank)
        for rank in range(3)
    )


def test_stages_of_one_direction_have_alternating_shades():
    """On each interleaved rank, the second stage has the second shade."""
    order = stage_order("interleaved", 4, 4)
    assert order.rank_labels() == ["s0 s2", "s1 s3"]
    assert [
        order.is_second_shade(0, 0),
        order.is_second_shade(0, 2),
        order.is_second_shade(1, 1),
        order.is_second_shade(1, 3),
    ] == [
        False,
        True,
        False,
        True,
    ]
    assert order.arrows == {}


def test_two_directions_have_the_same_shade_and_arrow_on_every_rank():
    """Without shades, stage 0 of both directions would look the same."""
    order = stage_order("chimera", 4, 4)
    assert order.rank_labels() == ["s0↓ s3↑", "s1↓ s2↑", "s2↓ s1↑", "s3↓ s0↑"]
    assert [order.is_second_shade(rank, rank) for rank in range(4)] == [False] * 4
    assert [order.is_second_shade(rank, 3 - rank) for rank in range(4)] == [True] * 4


def test_replicas_of_a_pipeline_on_separate_ranks_have_one_shade():
    """Data parallelism repeats a pipeline; each rank still has a single stage."""
    both = Schedule.parse("0F0 0B0 0U1\n1F0 1B0 1U1\n0F1 0B1 0U1\n1F1 1B1 1U1")
    order = StageOrder.of(unit_timeline(both))
    assert order.rank_labels() == ["s0", "s1", "s0", "s1"]
    assert not order.has_shared_ranks


def test_who_keeps_activations_for_a_partner_holds_no_stage_by_that():
    """A rank of BPipe would seem to hold two stages, and all its boxes would carry names."""
    order = stage_order("bpipe", 4, 8)
    assert order.rank_labels() == ["", "", "", ""]
    assert order.needs_stage_label(3, 0)


def test_an_empty_timeline_has_ranks_without_stages():
    """A timeline without events is valid, as before the first step."""
    assert StageOrder.of(Timeline((), 2, 2)).rank_labels() == ["", ""]

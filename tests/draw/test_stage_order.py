"""What tells the stages of a rank apart."""

from __future__ import annotations

from penstock.draw.draw import unit_timeline
from penstock.draw.stage_order import Ways
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule


def ways(name, stages, micro_batches):
    return Ways.of(unit_timeline(schedule(name, stages=stages, micro_batches=micro_batches)))


def test_a_plain_pipeline_needs_no_names():
    """On it the rank is the stage; a second number would be noise."""
    found = ways("1f1b", 3, 4)
    assert found.names() == ["", "", ""]
    assert not found.several
    assert not any(found.named(rank, rank) or found.odd(rank, rank) for rank in range(3))


def test_stages_of_one_way_are_shaded_in_turn():
    """Of an interleaved rank the second stage is the odd one, on every rank."""
    found = ways("interleaved", 4, 4)
    assert found.names() == ["s0 s2", "s1 s3"]
    assert [found.odd(0, 0), found.odd(0, 2), found.odd(1, 1), found.odd(1, 3)] == [
        False,
        True,
        False,
        True,
    ]
    assert found.arrows == {}


def test_two_directions_are_told_by_shade_and_arrow_on_every_rank_alike():
    """By number alone, stage 0 of the way down and stage 0 of the way up would look the same."""
    found = ways("chimera", 4, 4)
    assert found.names() == ["s0↓ s3↑", "s1↓ s2↑", "s2↓ s1↑", "s3↓ s0↑"]
    assert [found.odd(rank, rank) for rank in range(4)] == [False] * 4
    assert [found.odd(rank, 3 - rank) for rank in range(4)] == [True] * 4


def test_copies_of_a_pipeline_that_share_no_rank_are_not_shaded():
    """Data parallelism repeats a pipeline; nothing on a rank has to be told apart."""
    both = Schedule.parse("0F0 0B0 0U1\n1F0 1B0 1U1\n0F1 0B1 0U1\n1F1 1B1 1U1")
    found = Ways.of(unit_timeline(both))
    assert found.names() == ["s0", "s1", "s0", "s1"]
    assert not found.several


def test_who_keeps_activations_for_a_partner_holds_no_stage_by_that():
    """A rank of BPipe would seem to hold two stages, and all its boxes would carry names."""
    found = ways("bpipe", 4, 8)
    assert found.names() == ["", "", "", ""]
    assert found.named(3, 0)


def test_an_empty_timeline_has_ranks_without_stages():
    """Before the first step there is nothing to show, and that is no error."""
    assert Ways.of(Timeline((), 2, 2)).names() == ["", ""]

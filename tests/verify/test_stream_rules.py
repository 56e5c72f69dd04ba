"""verify on streams: whole batches, each with one update on every copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.weights.slow import streams

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.streaming.streams import Stream, Waves
from penstock.verify.verify import verify


def stream(text, batches, **rest):
    """A stream of these programs."""
    return Schedule(
        Schedule.parse(text).programs, "mine", synchronous=False, stream=Stream(batches, **rest)
    )


def findings_of(schedule):
    """Rule, op and rank of each, and the message."""
    with pytest.raises(ScheduleError, match="is not sound") as caught:
        verify(schedule)
    return [(f.rule, f.op, f.rank) for f in caught.value.findings], str(caught.value)


@given(streams())
@settings(deadline=None, max_examples=60)
def test_any_stream_that_is_sound_by_construction_passes(schedule):
    """A verifier that refuses good programs is worked around."""
    assert verify(schedule).weights == "stash"


@given(streams(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_a_gradient_and_an_update_in_each_others_places_are_found(schedule, rng):
    """The gradient would be in another batch's update; by number of updates alone nothing is wrong."""
    places = [
        (rank, i)
        for rank, program in enumerate(schedule.programs)
        for i, op in enumerate(program[:-1])
        if op.kind in (Kind.B, Kind.W)
        and program[i + 1].kind is Kind.U
        and program[i + 1].stage == op.stage
    ]
    if not places:
        return
    rank, i = rng.choice(places)
    program = list(schedule.programs[rank])
    program[i], program[i + 1] = program[i + 1], program[i]
    findings, _ = findings_of(
        replace(
            schedule,
            programs=(*schedule.programs[:rank], tuple(program), *schedule.programs[rank + 1 :]),
        )
    )
    assert {rule for rule, _, _ in findings} <= {"update", "no cycle"}


@pytest.mark.parametrize(
    ("text", "batches", "finding", "message"),
    [
        (
            "0F0 0F1 0B0 0B1 0U1 0F2 0F3 0B2 0U2 0B3 0U3",
            2,
            ("update", "0B3", 0),
            r"0B3 on rank 0 comes after the U of stage 0 for its batch 1: a batch has one update",
        ),
        (
            "0F0 0F1 0F2 0F3 0B0 0B2 0U1 0B1 0B3 0U2",
            2,
            ("update", "0B2", 0),
            r"0B2 on rank 0 is of batch 1, but batch 0 has had no U of stage 0 yet: its update would include both",
        ),
        (
            "0F0 0B0 0F1 0B1 0U1",
            2,
            ("update", "0B1", 0),
            r"0B1 on rank 0 is of batch 1, but batch 0 has had no U",
        ),
        (
            "0F0 0B0 0U1 0U2 0F1 0B1 0U3",
            2,
            ("update", "0U2", 0),
            r"0U2 on rank 0 follows no gradient",
        ),
        (
            "0F0 0B0 0U1 0F1 0B1 0U2 0F2 0B2 0U3",
            2,
            ("stream", None, None),
            r"3 micro-batches are not 2 batches of equal size",
        ),
        (
            "0F0 0B0 0U1 0F1 0B1 0U2",
            3,
            ("stream", None, None),
            r"2 micro-batches are not 3 batches of equal size",
        ),
    ],
)
def test_a_batch_without_one_update_of_its_own_is_found_and_named(text, batches, finding, message):
    """An update that takes two batches, or half of one, is another training than what was asked
    for.
    """
    with pytest.raises(ScheduleError, match=message) as caught:
        verify(stream(text, batches))
    findings = [(f.rule, f.op, f.rank) for f in caught.value.findings]
    assert finding in findings
    # Programs that are no whole batches are not compared with them.
    assert finding[0] != "stream" or findings == [finding]


def test_findings_of_a_stream_end_at_a_thousand():
    """A run without its updates would have as many as it has batches."""
    count = 1500
    ops = [*(f"0F{n}" for n in range(count)), *(f"0B{n}" for n in range(count)), "0U1"]
    findings, _ = findings_of(stream(" ".join(ops), count))
    assert len(findings) == 1000
    assert {rule for rule, _, _ in findings} == {"update"}


def test_a_stream_is_neither_synchronous_nor_of_slices():
    """Both say of one batch what a stream says of many."""
    pipedream = schedule("pipedream", 1, 1, batches=1)
    _, text = findings_of(replace(pipedream, synchronous=True))
    assert (
        "a synchronous schedule describes one batch, and a stream continues without a flush" in text
    )
    _, text = findings_of(replace(pipedream, slicing=Slicing("samples", ((1.0,),))))
    assert "its micro-batches are cut into slices, which streams do not support" in text


def test_copies_with_waves_have_whole_batches_in_turn():
    """They never add up gradients, so half a batch would be an update of half a batch."""
    text = "0F0 0B0 0U1 0F3 0B3 0U2\n0F1 0B1 0U1 0F2 0B2 0U2"
    findings, message = findings_of(stream(text, 4, weights="hetpipe", waves=Waves(1)))
    assert ("stream", "0F2", 1) in findings
    assert (
        "0F2 of batch 2 is on rank 1: with waves, copies take whole batches in turn, this one rank 0"
        in message
    )


def test_with_waves_the_last_update_may_lack_on_some_copies_and_no_other():
    """A stream may end after any batch: virtual workers whose turn does not come again have one
    less.
    """
    for batches in (7, 8, 9, 10):
        assert (
            verify(schedule("hetpipe", 2, 1, virtual_workers=3, batches=batches)).weights
            == "hetpipe"
        )
    text = "0F0 0B0 0U1 0F2 0B2 0U2 0F4 0B4 0U3\n0F1 0B1 0F3 0B3 0U1"
    findings, message = findings_of(stream(text, 5, weights="hetpipe", waves=Waves(1)))
    assert findings == [("update", "0U2", 1)]
    assert "stage 0 has 3 U on rank 0, but 1 on rank 1: its copies take batches in turn" in message


@pytest.mark.parametrize("late", [0, 1, 2])
def test_any_gradient_of_a_batch_that_comes_after_its_update_is_named(late):
    """Whichever of three it is; its batch would be updated a second time."""
    before = " ".join(f"0B{number}" for number in range(3) if number != late)
    text = f"0F0 0F1 0F2 {before} 0U1 0B{late} 0U2 0F3 0F4 0F5 0B3 0B4 0B5 0U3"
    findings, message = findings_of(stream(text, 2))
    assert findings == [("update", f"0B{late}", 0)]
    assert (
        f"0B{late} on rank 0 comes after the U of stage 0 for its batch 0: a batch has" in message
    )


def test_copies_with_waves_take_whole_batches_of_several_micro_batches():
    """Micro-batches in turn would be half of each batch."""
    text = "0F0 0F1 0B0 0B1 0U1\n0F2 0F3 0B2 0B3 0U1"
    waves = {"weights": "hetpipe", "waves": Waves(1)}
    assert verify(stream(text, 2, **waves)).weights == "hetpipe"
    assert verify(schedule("hetpipe", 2, 3)).weights == "hetpipe"
    in_turn = "0F0 0F2 0B0 0U1 0B2 0U2\n0F1 0F3 0B1 0U1 0B3 0U2"
    findings, message = findings_of(stream(in_turn, 2, **waves))
    assert findings == [("stream", "0F1", 1), ("stream", "0F2", 0)]
    assert (
        "0F2 of batch 1 is on rank 0: with waves, copies take whole batches in turn, this one "
        "rank 1" in message
    )


def test_a_gradient_belongs_to_the_batch_of_the_last_one_before_its_update():
    """After two batches in one update each further gradient is held against the newest batch."""
    case = stream("0F0 0F1 0F2 0B0 0B1 0B2 0U1 0U2 0U3", 3)
    findings, _ = findings_of(case)
    assert [entry for entry in findings if entry[1].startswith("0B")] == [
        ("update", "0B1", 0),
        ("update", "0B2", 0),
    ]
    forwards = " ".join(f"0F{number}" for number in range(6))
    case = stream(f"{forwards} 0B0 0B1 0U1 0B2 0B3 0B4 0B5 0U2 0U3", 3)
    findings, message = findings_of(case)
    assert [entry[1] for entry in findings if entry[1].startswith("0B")] == ["0B4"]
    assert "0B4 on rank 0 is of batch 2, but batch 1 has had no U" in message


def test_a_gradient_of_an_earlier_batch_before_the_update_of_a_later_one_is_found():
    """Batches may be in any order on a rank, but one has its update before the next begins."""
    verify(stream("0F0 0F1 0B1 0U1 0B0 0U2", 2), weights="none")
    findings, message = findings_of(stream("0F0 0F1 0B1 0B0 0U1 0U2", 2))
    assert findings[0] == ("update", "0B0", 0)
    assert "0B0 on rank 0 is of batch 0, but batch 1 has had no U of stage 0 yet" in message

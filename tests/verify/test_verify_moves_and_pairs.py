"""verify: faults of evictions, pairs, slices and copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.verify.findings import findings_of

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Op, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.streaming.streams import Stream
from penstock.verify.verify import verify


def test_evictions_of_other_micro_batches_do_not_count():
    """F, E, L and backward must be in order for each micro-batch alone."""
    sound = verify(schedule("bpipe", 4, 8))
    assert max(sound.peak_on_rank) < 4


@pytest.mark.parametrize("shares", [((1.0,),), ((0.5, 0.5), (1.0,))])
def test_programs_must_number_as_many_slices_as_there_are_shares(shares):
    """One less and one more, of either kind."""
    sound = Schedule.parse("0F0 0F1 0B1 0B0 0U1")
    for along in ("samples", "tokens"):
        count = sum(map(len, shares))
        message = f"forwards number 2 slices, the micro-batches are cut into {count}"
        with pytest.raises(ScheduleError, match=message):
            verify(replace(sound, slicing=Slicing(along, shares)))
        verify(replace(sound, slicing=Slicing(along, ((0.5, 0.5),))))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 0E0 0L0 0B0 0U1\n0E0 0L0", None),
        ("0F0 0E0 0L0 0B0 0U1", r"0E0 is on ranks 0: it must be on two, that of 0F0 \(0\)"),
        ("0F0 0B0 0U1\n0E0 0L0", r"0E0 is on ranks 1: it must be on two, that of 0F0 \(0\)"),
        (
            "0F0 0E0 0L0 0B0 0U1\n0E0 0L0\n0E0 0L0",
            r"0E0 is on ranks 0, 1, 2: it must be on two, that of 0F0 \(0\) and a partner",
        ),
    ],
)
def test_an_eviction_is_on_the_rank_of_the_forward_and_one_partner(text, words):
    """Neither alone, nor on a third."""
    if words is None:
        assert verify(Schedule.parse(text)).peak_on_rank == (1, 1)
        return
    with pytest.raises(ScheduleError, match=words):
        verify(Schedule.parse(text))


@pytest.mark.parametrize(
    ("text", "finding", "message"),
    [
        # evictions
        ("0F0 0E0 0B0 0U1\n0E0", ("evict and load", "0E0", 0), "0E0 needs 0L0 on the same two"),
        ("0E0\n0F0 0E0 0B0 0U1", ("evict and load", "0E0", 1), "0E0 needs 0L0 on the same two"),
        (
            "0F0 0L0 0E0 0B0 0U1\n0E0 0L0",
            ("evict and load", "0E0", 0),
            "rank 0 runs 0F0 0L0 0E0 0B0: the order is 0F0 0E0 0L0 0B0",
        ),
        (
            "0F0 0E0 0I0 0L0 0W0 0U1\n0E0 0L0",
            ("evict and load", "0E0", 0),
            "rank 0 runs 0F0 0E0 0I0 0L0: the order is 0F0 0E0 0L0 0I0",
        ),
        (
            "0F0 0E0 0L0 0B0 0U1\n0L0 0E0",
            ("evict and load", "0L0", 1),
            "rank 1 runs 0L0, which returns the activations, before 0E0, which receives them",
        ),
        (
            "0F0 0E0 0E0 0L0 0B0 0U1\n0E0 0L0",
            ("evict and load", "0E0", 0),
            "0E0 occurs twice on rank 0",
        ),
        # pairs
        ("0F0&0B0 0U1", ("pair", "0B0", None), "0F0&0B0 cannot run as one: 0B0 needs 0F0"),
        (
            "0F0 0F1&0B0&0F2 0B1 0B2 0U1",
            ("pair", "0F1", None),
            "0F1&0B0: an op of compute runs with one other, no more",
        ),
        ("0F0 0B0&0U1", ("pair", "0B0", None), "0B0&0U1: an op of compute runs with one other"),
        (
            "0F0&0E0 0L0 0B0 0U1\n0E0 0L0",
            ("pair", "0F0", None),
            "0F0&0E0: an op of compute runs with one other",
        ),
        ("0F0 0F1 0F0&0B1 0B0 0U1", ("once", "0F0", 0), "0F0 occurs 2 times"),
        # updates of copies
        (
            "0F0 0B0 0U1\n0F1 0B1 0U1\n0F2 0B2 0U2",
            ("update", "0U2", 2),
            "0U2 on rank 2 is update 1 of stage 0: versions count 1, 2, 3",
        ),
        (
            "0F0 0B0 0U1\n0F1 0B1",
            ("update", "0U1", 1),
            "stage 0 has no U on rank 1: its weights would never change",
        ),
    ],
)
def test_faults_of_evictions_pairs_and_copies_are_named(text, finding, message):
    """More of them, and of slices, are in test_verify_forms.py."""
    findings, full = findings_of(text)
    assert findings == [finding]
    assert message in full


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0E0 0L0 0B0 0U1\n0E0\n0L0", "0L0 needs 0E0 on the same two ranks, 0 and 2"),
        (
            "0F0 0B0 0U1\n0E1 0L1",
            "0E1 is on ranks 1: it must be on two, that of 0F1 (none) and a partner",
        ),
    ],
)
def test_an_eviction_and_a_load_on_wrong_ranks_have_a_finding_each(text, message):
    """On different partners, or without a forward."""
    findings, full = findings_of(text)
    assert [rule for rule, _, _ in findings] == ["evict and load"] * 2
    assert [op[1] for _, op, _ in findings] == ["E", "L"]
    assert message in full


def test_pairs_must_be_adjacent_in_their_order():
    """An op that is elsewhere, or in the other order, cannot run as one with the other."""
    sound = Schedule.parse("0F0 0F1 0B0 0B1 0U1", "mine")
    one, two = Op.parse("0F1"), Op.parse("0B0")
    assert verify(replace(sound, pairs={(one, two)})).peak_on_rank == (2,)
    for pair in ((two, one), (one, Op.parse("0B1"))):
        with pytest.raises(ScheduleError) as caught:
            verify(replace(sound, pairs={pair}))
        (finding,) = caught.value.findings
        assert (finding.rule, finding.op, finding.rank) == ("pair", str(pair[0]), None)
        expected = f"{pair[0]}&{pair[1]} are not adjacent in that order on any rank"
        assert finding.message == expected


def test_slices_of_a_sequence_stay_on_one_rank_and_count_as_shares():
    """Slices of samples may go anywhere; a peak is counted in micro-batches."""
    spread = Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0U1", "mine")
    halves = ((0.5, 0.5),)
    assert verify(replace(spread, slicing=Slicing("samples", halves))).peak_on_rank == (0.5, 0.5)
    with pytest.raises(ScheduleError) as caught:
        verify(replace(spread, slicing=Slicing("tokens", halves)))
    (finding,) = caught.value.findings
    assert (finding.rule, finding.op, finding.rank) == ("slices", "0F1", 1)
    assert finding.message == (
        "0F1 is on rank 1, but 0F0, the slice before it of the same micro-batch, on rank 0"
    )
    thirds = replace(
        Schedule.parse("0F0 0F1 0F2 0B2 0B1 0B0 0U1"), slicing=Slicing("tokens", ((1 / 3,) * 3,))
    )
    assert verify(thirds, in_flight_limit=1).peak_on_rank == (1,)
    assert verify(thirds).channel_depth == 0


def test_copies_of_a_stream_without_waves_update_equally_often():
    """With waves, one may lack; two may not."""
    copies = schedule("pipedream", 1, 2, batches=2, replicas=2)
    short = tuple(copies.programs[1][:-1])
    with pytest.raises(ScheduleError, match="2 U on rank 0, but 1 on rank 1: its copies synch"):
        verify(replace(copies, programs=(copies.programs[0], short)))
    report = verify(schedule("hetpipe", 1, 1, virtual_workers=2, batches=3))
    assert report.staleness_across != ()
    assert verify(schedule("1f1b", 1, 1)).staleness_across == ()


@pytest.mark.parametrize("most", [0, 1, 2])
def test_updates_are_counted_against_the_copy_that_has_most(most):
    """Whichever rank it is on: all the others miss one."""
    rows = []
    for rank in range(3):
        rows.append(f"0F{rank} 0B{rank} 0U1" + (" 0U2" if rank == most else ""))
    findings, message = findings_of("\n".join(rows), synchronous=False)
    others = [rank for rank in range(3) if rank != most]
    assert [entry for entry in findings if entry[1] == "0U2"] == [
        ("update", "0U2", rank) for rank in others
    ]
    assert f"stage 0 has 2 U on rank {most}, but 1 on rank {others[0]}" in message


def test_an_op_is_in_one_pair_whether_it_is_first_or_second_there():
    """Of two pairs with an op in common, the second of them is reported."""
    text = "0F0 0F1 0F2 0B0 0B1 0B2 0U1"
    ops = {str(op): op for op in Schedule.parse(text).ops}
    pairs = frozenset({(ops["0F0"], ops["0F1"]), (ops["0F1"], ops["0F2"])})
    with pytest.raises(ScheduleError, match="0F1&0F2: an op of compute runs with one other"):
        verify(replace(Schedule.parse(text), pairs=pairs))


def test_findings_on_moves_slices_and_pairs_end_at_a_thousand():
    """A file of wrong ones would have as many as it has micro-batches."""
    evicted = " ".join(f"0F{number} 0E{number} 0B{number}" for number in range(1100))
    findings, _ = findings_of(f"{evicted} 0U1")
    assert findings == [("evict and load", f"0E{number}", 0) for number in range(1000)]
    rows = [" ".join(f"0F{n} 0B{n}" for n in range(first, 2200, 2)) for first in (0, 1)]
    apart = Schedule.parse(f"{rows[0]} 0U1\n{rows[1]} 0U1")
    with pytest.raises(ScheduleError) as caught:
        verify(replace(apart, slicing=Slicing.even("tokens", 2, 1100)))
    assert [finding.rule for finding in caught.value.findings] == ["slices"] * 1000
    paired = " ".join(f"0F{number}&0B{number}" for number in range(1100))
    findings, _ = findings_of(f"{paired} 0U1")
    assert [rule for rule, _, _ in findings] == ["pair"] * 1000


@pytest.mark.parametrize(
    ("text", "changes", "rule"),
    [
        ("0F0 0F0 0B0 0U1", {"slicing": Slicing.even("samples", 3, 1)}, "once"),
        ("0F0 0E0 0B0 0U1", {"slicing": Slicing.even("samples", 3, 1)}, "slices"),
        ("0F0&0B0 0F1 0E1 0B1 0U1", {}, "evict and load"),
        ("0F0&0B0 0B1 0F1 0U1", {}, "pair"),
        ("0B0 0F0", {}, "no cycle"),
        ("0F0 0B0 0F1 0B1 0F2 0B2", {"synchronous": False, "stream": Stream(2)}, "update"),
        ("0F0 0F1 0F2 0B0 0B1 0B2 0U1", {"synchronous": False, "stream": Stream(2)}, "stream"),
    ],
)
def test_of_several_faults_the_more_fundamental_one_is_reported_alone(text, changes, rule):
    """The others may only follow from it: all these programs break two rules or more."""
    with pytest.raises(ScheduleError) as caught:
        verify(replace(Schedule.parse(text), **changes), in_flight_limit=0)
    assert {finding.rule for finding in caught.value.findings} == {rule}

"""verify on copies, evictions and loads, pairs and slices: planted faults are reported."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.slicing import Slicing
from penstock.verify.verify import verify


def findings_of(schedule, limit=None):
    """The findings of an unsound schedule as (rule, op, rank), and the message."""
    with pytest.raises(ScheduleError, match="is not sound") as caught:
        verify(schedule, limit)
    return [(f.rule, f.op, f.rank) for f in caught.value.findings], str(caught.value)


# Copies of stages


def test_one_micro_batch_on_two_copies_of_a_stage_is_refused():
    """Its gradient would count twice."""
    findings, message = findings_of(Schedule.parse("0F0 0B0 0F1 0B1 0U1\n0F1 0B1 0U1"))
    assert ("once", "0F1", 1) in findings
    assert "0F1 occurs 2 times, on ranks 0, 1" in message


def test_a_backward_on_the_other_copy_is_refused():
    """The activations are where the forward was."""
    findings, _ = findings_of(Schedule.parse("0F0 0B1 0U1\n0F1 0B0 0U1"))
    assert findings == [("one rank", "0B0", 1), ("one rank", "0B1", 0)]


def test_a_copy_without_an_update_is_refused():
    """The other would wait for it for ever."""
    findings, message = findings_of(Schedule.parse("0F0 0B0 0U1\n0F1 0B1"))
    assert findings == [("update", "0U1", 1)]
    assert "stage 0 has no U on rank 1" in message


@given(
    st.sampled_from([("chimera", 4, 8), ("dualpipe", 4, 8), ("gems", 3, 4)]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=40)
def test_copies_that_update_two_stages_in_opposite_orders_are_refused_on_any_rank(numbers, rng):
    """On one rank of two that share two stages, the meetings are put the other way round, at the
    end of the program.
    """
    family_schedule = schedule(*numbers)
    shared = [
        rank
        for rank in range(family_schedule.ranks)
        if len(family_schedule.stages_of_rank[rank]) == 2
    ]
    rank = rng.choice(shared)
    first, second = (op for op in family_schedule.programs[rank] if op.kind is Kind.U)
    work = [op for op in family_schedule.programs[rank] if op.kind is not Kind.U]
    programs = [*family_schedule.programs]
    programs[rank] = (*work, second, first)
    findings, message = findings_of(replace(family_schedule, programs=tuple(programs)))
    assert {rule for rule, *_ in findings} == {"no cycle"}
    assert (
        f"rank {rank} cannot start {second}: it needs" in message
        or f"rank {rank} cannot start {first}" in message
    )


def test_an_update_that_is_too_early_on_one_rank_is_refused_as_a_cycle():
    """Rank 0 waits in the U of stage 0 before it computes a gradient that rank 1 needs first."""
    verify(Schedule.parse("0F0 1F1 0B0 1B1 0U1 1U1\n0F1 1F0 1B0 0B1 0U1 1U1"))
    findings, message = findings_of(
        Schedule.parse("0F0 1F1 0B0 0U1 1B1 1U1\n0F1 1F0 1B0 0B1 0U1 1U1")
    )
    assert findings == [("no cycle", "0U1", 0), ("no cycle", "0B1", 1)]
    assert "rank 0 cannot start 0U1: it needs 0B1 on rank 1" in message


# Evict and load

BPIPE = schedule("bpipe", 4, 6)


def bpipe_with(rank, old, new):
    """BPIPE with some ops of one rank's program replaced."""
    rows = [" ".join(map(str, program)) for program in BPIPE.programs]
    assert rows[rank].count(old) == 1
    rows[rank] = rows[rank].replace(old, new)
    return Schedule.parse("\n".join(rows))


def test_evictions_move_micro_batches_from_rank_to_rank():
    """What the partner takes in counts on its rank, not in its stage; the owner is relieved of it."""
    report = verify(
        Schedule.parse("0F0 0F1 0E1 0F2 0B0 0L1 0B1 0B2 0U1\n0E1 1F0 1B0 1F1 0L1 1B1 1F2 1B2 1U1")
    )
    assert report.peak_in_flight == (2, 1)
    assert report.peak_on_rank == (2, 2)
    assert verify(BPIPE, in_flight_limit=3)


def test_what_a_partner_takes_in_counts_against_its_limit():
    """Balancing moves memory to other ranks, and these have limits too."""
    text = "0F0 0F1 0E1 0B0 0L1 0B1 0U1\n1F0 0E1 1F1 1B0 0L1 1B1 1U1"
    findings, message = findings_of(Schedule.parse(text), limit=1)
    assert findings == [("in flight", "0E1", 1), ("in flight", "0F1", 0)]
    assert "rank 1 holds 3 micro-batches in flight" in message


@pytest.mark.parametrize(
    ("rank", "old", "new", "finding", "message"),
    [
        # a half too few
        (3, " 0E2", "", "0E2 0", r"0E2 is on ranks 0: it must be on two, that of 0F2 \(0\) and"),
        (0, " 0E2", "", "0E2 3", "0E2 is on ranks 3"),
        (3, " 0L5", "", "0L5 0", "0L5 is on ranks 0"),
        (0, " 0L5", "", "0L5 3", "0L5 is on ranks 3"),
        # a half too many
        (3, "0E2", "0E2 0E2", "0E2 3", "0E2 occurs twice on rank 3"),
        (1, "1F2", "1F2 0E2", "0E2 0", "0E2 is on ranks 0, 1, 3"),
        # of nothing that is there
        (1, "1F2", "1F2 0E9", "0E9 1", r"that of 0F9 \(none\) and a partner"),
        # out of turn on the owner
        (0, "0F2 0E2", "0E2 0F2", "0E2 0", "runs 0E2 0F2 0L2 0B2: the order is 0F2 0E2 0L2 0B2"),
        (0, "0L2 0B2", "0B2 0L2", "0E2 0", "rank 0 runs 0F2 0E2 0B2 0L2"),
        # out of turn on the partner
        (
            3,
            "0E2 3F1 3B1 3F2 3B2 3F3 0L2",
            "0L2 3F1 3B1 3F2 3B2 3F3 0E2",
            "0L2 3",
            "runs 0L2, which returns the activations, before 0E2",
        ),
    ],
)
def test_a_planted_fault_of_eviction_is_found_and_named(rank, old, new, finding, message):
    """Halves, order, partner: each fault would hang one rank or free what is still needed."""
    findings, text = findings_of(bpipe_with(rank, old, new))
    op, op_rank = finding.split()
    assert ("evict and load", op, int(op_rank)) in findings
    assert re.search(message, text)


def test_an_eviction_after_what_waits_for_it_is_refused():
    """A cycle: the partner's E comes after an op whose input needs it."""
    findings, message = findings_of(
        bpipe_with(
            3, "3F1 3B1 3F2 3B2 3F3 0L2 3B3 3F4 3B4 0E5", "0E5 3F1 3B1 3F2 3B2 3F3 0L2 3B3 3F4 3B4"
        )
    )
    assert ("no cycle", "0E5", 3) in findings
    assert "rank 3 cannot start 0E5: it needs 0E5 on rank 0" in message


def test_a_load_from_another_partner_is_refused():
    """It has nothing to give back."""
    findings, message = findings_of(Schedule.parse("0F0 0E0 0L0 0B0 0U1\n0E0 1F0 1B0 1U1\n0L0"))
    assert findings == [("evict and load", "0E0", 0), ("evict and load", "0L0", 0)]
    assert "0E0 needs 0L0 on the same two ranks, 0 and 1" in message


@pytest.mark.parametrize(("present", "missing"), [("E", "L"), ("L", "E")])
def test_an_eviction_without_its_load_is_refused(present, missing):
    """Both halves are missing, on either rank: activations would stay away, or come from nowhere."""
    op = f"0{present}0"
    findings, message = findings_of(Schedule.parse(f"0F0 {op} 0B0 0U1\n{op} 1F0 1B0 1U1"))
    assert findings == [("evict and load", op, 0)]
    assert f"{op} needs 0{missing}0 on the same two ranks, 0 and 1" in message


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_any_eviction_or_load_that_is_taken_out_is_missed(rng):
    """Whichever half of an eviction or load is missing."""
    bpipe = schedule("bpipe", 8, 16)
    rank, i = rng.choice(
        [
            (rank, i)
            for rank, row in enumerate(bpipe.programs)
            for i, op in enumerate(row)
            if op.kind in ACTIVATION_MOVES
        ]
    )
    programs = list(bpipe.programs)
    op = programs[rank][i]
    programs[rank] = programs[rank][:i] + programs[rank][i + 1 :]
    findings, _ = findings_of(replace(bpipe, programs=tuple(programs)))
    assert str(op) in [name for _, name, _ in findings]


# Pairs


@pytest.mark.parametrize(
    ("text", "op", "message"),
    [
        ("0F0 0F1&0B0 0B1 0U1\n1F0&1B0 1F1 1B1 1U1", "1B0", "1F0&1B0 cannot run as one: 1B0 needs"),
        ("0F0 0F1&0B0&0F2 0B1 0B2 0U1", "0F1", "an op of compute runs with one other, no more"),
        ("0F0 0F1 0B0&0F2&0B1 0B2 0U1", "0F2", "an op of compute runs with one other, no more"),
        ("0F0 0B0&0U1", "0B0", "0B0&0U1: an op of compute runs with one other, no more"),
        ("0F0&1F0 1B0 0B0 0U1 1U1", "1F0", "0F0&1F0 cannot run as one: 1F0 needs 0F0"),
    ],
)
def test_a_pair_that_cannot_run_as_one_is_refused(text, op, message):
    """A pair starts when the inputs of both ops are there."""
    findings, full_message = findings_of(Schedule.parse(text))
    assert ("pair", op, None) in findings
    assert message in full_message


def test_a_pair_of_ops_apart_is_refused():
    """Another op would run between its two ops."""
    schedule = Schedule.parse("0F0 0F1 0B0 0F2 0B1 0B2 0U1")
    separated_pair = replace(schedule, pairs=frozenset({(Op.parse("0F1"), Op.parse("0F2"))}))
    findings, message = findings_of(separated_pair)
    assert findings == [("pair", "0F1", None)]
    assert "0F1&0F2 are not adjacent in that order on any rank" in message
    findings, _ = findings_of(
        replace(schedule, pairs=frozenset({(Op.parse("0B0"), Op.parse("0F1"))}))
    )
    assert findings == [("pair", "0B0", None)]


def test_pairs_that_wait_for_each_other_are_refused_though_their_ops_one_by_one_would_run():
    """Rank 0's pair needs 1B0, rank 1's pair with it needs 0F1: as single ops they pass each other."""
    text = "0F0 0F1&0B0 0B1 0U1\n1F0 1B0&1F1 1B1 1U1"
    findings, message = findings_of(Schedule.parse(text))
    assert {rule for rule, *_ in findings} == {"no cycle"}
    assert "rank 0 cannot start 0F1: it needs 1B0 on rank 1" in message
    verify(Schedule.parse(text.replace("&", " ")))


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"),
    [("dualpipe", 4, 8), ("dualpipe-v", 8, 8), ("fbp-as", 4, 9)],
)
def test_what_is_sound_with_pairs_is_sound_without(name, stages, micro_batches):
    """The runtime runs a pair's ops one after the other, which waits for less."""
    family_schedule = schedule(name, stages, micro_batches)
    paired, single = verify(family_schedule), verify(replace(family_schedule, pairs=frozenset()))
    assert paired.peak_on_rank == single.peak_on_rank


# Slices


def test_the_peak_of_slices_is_counted_in_micro_batches():
    """Two and a half: the limit is of memory, not of ops."""
    seq1f1b = schedule("seq1f1b", 4, 8, slices=2)
    assert verify(seq1f1b, in_flight_limit=3).peak_on_rank == (2.5, 2, 1.5, 1)
    findings, message = findings_of(seq1f1b, limit=2)
    assert findings == [("in flight", "0F4", 0)]
    assert "rank 0 holds 2.5 micro-batches in flight, over the limit of 2" in message


def test_thirds_do_not_exceed_a_limit_by_rounding():
    """3 x 1/3 is 1."""
    assert verify(
        schedule("seq1f1b", 2, 9, slices=3), in_flight_limit=2
    ).peak_on_rank == pytest.approx((4 / 3, 1))
    assert verify(schedule("terapipe", 1, 7, slices=7), in_flight_limit=7).peak_on_rank == (7,)


def test_more_or_fewer_slices_than_the_programs_have_are_refused():
    """A slice without an op would be left out of the batch."""
    seq1f1b = schedule("seq1f1b", 2, 2, slices=2)
    for slices in (1, 3):
        findings, message = findings_of(replace(seq1f1b, slicing=Slicing.even("tokens", slices, 2)))
        assert findings == [("slices", None, None)]
        assert f"forwards number 4 slices, the micro-batches are cut into {2 * slices}" in message


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("0F1 0F0 0B1 0B0 0U1", ("no cycle", "0F1", 0)),
        ("0F0 0F1 0B0 0B1 0U1", ("no cycle", "0B0", 0)),
        ("0F0 0B0 0F1 0B1 0U1", ("no cycle", "0B0", 0)),
    ],
)
def test_slices_of_sequences_out_of_turn_are_refused(text, finding):
    """Forward needs the tokens before, backward the gradients of the tokens after; slices of
    samples need nothing.
    """
    schedule = Schedule.parse(text)
    findings, message = findings_of(replace(schedule, slicing=Slicing.even("tokens", 2, 1)))
    assert finding in findings
    assert "rank 0 cannot start" in message
    verify(replace(schedule, slicing=Slicing.even("samples", 2, 1)))
    verify(replace(schedule, slicing=Slicing.even("tokens", 1, 2)))


def test_slices_of_a_sequence_on_two_copies_of_a_stage_are_refused():
    """The keys and values of the tokens before are on the other rank."""
    schedule = Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0U1")
    findings, message = findings_of(replace(schedule, slicing=Slicing.even("tokens", 2, 1)))
    assert findings == [("slices", "0F1", 1)]
    assert (
        "0F1 is on rank 1, but 0F0, the slice before it of the same micro-batch, on rank 0"
        in message
    )
    verify(replace(schedule, slicing=Slicing.even("samples", 2, 1)))
    verify(replace(schedule, slicing=Slicing.even("tokens", 1, 2)))


@given(
    st.sampled_from(["terapipe", "seq1f1b"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(2, 4),
    st.randoms(),
)
@settings(deadline=None, max_examples=60)
def test_two_slices_of_a_sequence_exchanged_anywhere_are_refused(
    name, stages, micro_batches, slices, rng
):
    """Forwards or backwards, on any stage."""
    family_schedule = schedule(name, stages, micro_batches, slices=slices)
    stage, kind = rng.randrange(stages), rng.choice([Kind.F, Kind.B])
    first = rng.randrange(micro_batches) * slices + rng.randrange(slices - 1)
    one, other = Op(kind, stage, first), Op(kind, stage, first + 1)
    exchange = {one: other, other: one}
    programs = tuple(
        tuple(exchange.get(op, op) for op in program) for program in family_schedule.programs
    )
    findings, _ = findings_of(replace(family_schedule, programs=programs))
    assert {rule for rule, *_ in findings} == {"no cycle"}


@pytest.mark.parametrize("slices", [5, 9, 12])
def test_shares_that_add_up_to_the_limit_are_within_it(slices):
    """Nine ninths are more than 1 as floats; a share above it is refused."""
    count = 4 * slices
    ops = [Op(kind, 0, number) for kind in (Kind.F, Kind.B) for number in range(count)]
    programs = ((*ops, Op(Kind.U, 0, 1)),)
    sliced = Schedule(programs, slicing=Slicing.even("samples", slices, 4))
    assert verify(sliced, 4).peak_on_rank == (4,)
    findings, message = findings_of(sliced, 3)
    assert findings == [("in flight", f"0F{3 * slices}", 0)]
    assert "rank 0 holds 4 micro-batches in flight, over the limit of 3" in message


def test_an_op_of_two_pairs_is_refused_whatever_other_pairs_there_are():
    """Pairs of other ops may come between both in any order of them."""
    schedule = Schedule.parse("0F0 0F1&0B0&0F2 0B1&0F3 0B2 0B3 0U1")
    findings, message = findings_of(schedule)
    assert findings == [("pair", "0F1", None)]
    assert "0F1&0B0: an op of compute runs with one other, no more" in message


def test_activations_that_two_other_ranks_exchange_are_refused():
    """One of the two must be the rank of the forward."""
    findings, message = findings_of(Schedule.parse("0F0 0B0 0U1\n0E0 0L0\n0E0 0L0"))
    assert findings == [("evict and load", "0E0", 1), ("evict and load", "0L0", 1)]
    assert "0E0 is on ranks 1, 2: it must be on two, that of 0F0 (0) and a partner" in message


@pytest.mark.parametrize("kind", ["E", "L"])
def test_a_move_that_occurs_twice_on_a_rank_is_refused(kind):
    """Each activation leaves once and comes back once."""
    text = "0F0 0E0 0L0 0B0 0U1\n0E0 0L0".replace(f"0{kind}0", f"0{kind}0 0{kind}0", 1)
    findings, message = findings_of(Schedule.parse(text))
    assert findings == [("evict and load", f"0{kind}0", 0)]
    assert f"0{kind}0 occurs twice on rank 0" in message


def test_slices_of_a_sequence_are_no_pair():
    """The second needs the first; slices of samples do not."""
    schedule = Schedule.parse("0F0&0F1 0B1 0B0 0U1")
    verify(replace(schedule, slicing=Slicing.even("samples", 2, 1)))
    findings, message = findings_of(replace(schedule, slicing=Slicing.even("tokens", 2, 1)))
    assert findings == [("pair", "0F1", None)]
    assert "0F0&0F1 cannot run as one: 0F1 needs 0F0" in message


def test_a_rank_that_waits_for_several_ranks_has_a_finding_for_each():
    """Rank 0 updates stage 0 first, the two other copies stage 1."""
    rows = ["0F0 1F0 1B0 0B0 0U1 1U1", "0F1 1F1 1B1 0B1 1U1 0U1", "0F2 1F2 1B2 0B2 1U1 0U1"]
    findings, message = findings_of(Schedule.parse("\n".join(rows)))
    assert [finding for finding in findings if finding[2] == 0] == [("no cycle", "0U1", 0)] * 2
    for rank in (1, 2):
        assert f"rank 0 cannot start 0U1: it needs 1U1 on rank {rank}" in message


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_stage_without_any_update_is_refused(synchronous):
    """Its weights would never change, whether or not the pipeline drains."""
    findings, message = findings_of(Schedule.parse("0F0 0B0", synchronous=synchronous))
    assert findings == [("update", "0U1", 0)]
    assert "stage 0 has no U on rank 0: its weights would never change" in message

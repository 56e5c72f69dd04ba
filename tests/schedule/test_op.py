"""Op and Schedule: the text form, placement, and the schedules made from others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.lower import lower
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.streaming.period import with_batch_count
from penstock.schedule.streaming.streams import Stream
from penstock.verify.verify import verify

OPS = st.builds(Op, st.sampled_from(list(Kind)), st.integers(0, 10**9), st.integers(0, 10**9))


@given(st.lists(st.lists(OPS, max_size=8), max_size=6), st.booleans())
@settings(deadline=None, max_examples=100)
def test_reading_back_a_printed_schedule_gives_the_same_schedule(programs, synchronous):
    """Messages, golden files and the command line all use this one text; ranks without ops must
    survive it too.
    """
    schedule = Schedule(tuple(map(tuple, programs)), "any", synchronous)
    assert Schedule.parse(str(schedule), "any", synchronous) == schedule


@given(OPS)
@settings(deadline=None, max_examples=50)
def test_an_op_prints_as_torch_spells_it_and_reads_back(op):
    """The text of one op is the whole interface to torch's CSV and to people."""
    assert str(op) == f"{op.stage}{op.kind.value}{op.micro_batch}"
    assert Op.parse(f" {op} ") == op


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2X0",
        "2BW0",
        "0F0garbage",
        "2f0",
        "-1F0",
        "2F-1",
        "2 F0",
        "2.0F0",
        "\u0662F\u0660",
        "1SEND_F0",
        "(0F0;1B0)OVERLAP_F_B",
        f"0F{'9' * 5000}",
    ],
)
def test_text_that_is_no_op_is_refused_with_the_text_and_the_form(text):
    """Files come from outside: torch's pattern lets `2BW0` and trailing words pass, and int() has
    errors of its own.
    """
    with pytest.raises(
        ScheduleError,
        match=r"is not an op: write stage, one of F B I W U E L, micro-batch, such as '2F0'",
    ):
        Op.parse(text)


def test_numbers_have_at_most_18_digits():
    """So they fit into 64 bits."""
    longest = 10**18 - 1
    assert Op.parse(f"{longest}F{longest}") == Op(Kind.F, longest, longest)
    for text in (f"{longest + 1}F0", f"0F{longest + 1}"):
        with pytest.raises(ScheduleError, match="is not an op"):
            Op.parse(text)


def test_labels_may_lack_and_blank_lines_are_skipped():
    """Text may have blank lines, which must not become ranks without ops."""
    assert Schedule.parse("\n0F0 0B0\n\n  1F0 1B0\n") == Schedule.parse(
        "rank 0 | 0F0 0B0\nrank 1 | 1F0 1B0"
    )


@pytest.mark.parametrize(
    "text", ["rank 1 | 0F0\nrank 0 | 1F0", "rank 0 | 0F0\nrank 2 | 1F0", "| 0F0"]
)
def test_programs_out_of_order_are_refused(text):
    """The place in the text is the rank: a label that says otherwise was meant otherwise."""
    with pytest.raises(
        ScheduleError, match=r"labels the program of rank \d: write one line per rank, in order"
    ):
        Schedule.parse(text)


def test_a_label_is_read_with_all_its_digits():
    """From rank 10 on, the first digit alone is the number of another rank."""
    text = "\n".join(f"rank {rank} | 0F{rank} 0B{rank}" for rank in range(12))
    assert str(Schedule.parse(text)) == text
    for wrong in (1, 20, 11):
        with pytest.raises(ScheduleError, match=f"'rank {wrong}' labels the program of rank 10:"):
            Schedule.parse(text.replace("rank 10 ", f"rank {wrong} "))


def test_a_second_bar_in_a_line_is_refused():
    """Half a program must not vanish into a label."""
    with pytest.raises(ScheduleError, match=r"'\|' is not an op"):
        Schedule.parse("rank 0 | 0F0 | 0B0")


def test_facts_of_a_schedule_follow_from_where_ops_stand():
    """Placement is not written anywhere else: two copies of stage 0, stage 1 beside one of them."""
    schedule = Schedule.parse(
        "rank 0 | 0F0 1F0 1F1 1B0 1I1 1W1 0B0 1U1 0U1\nrank 1 | 0F1 0B1 0U1\nrank 2 |"
    )
    assert (schedule.ranks, schedule.stages, schedule.micro_batches, schedule.splits_backward) == (
        3,
        2,
        2,
        True,
    )
    assert schedule.placement == {(0, 0): 0, (1, 0): 0, (1, 1): 0, (0, 1): 1}
    assert schedule.stages_of_rank == ((0, 1), (0,), ())
    assert schedule.ranks_of_stage == ((0, 1), (0,))
    assert schedule.copies == 2
    # Of the stage that has the most, whichever it is.
    assert Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0\n1F1 1B1").copies == 2
    # Up to the highest one that is named, though stage 1 has no op.
    assert Schedule.parse("0F0 2F0").stages == 3
    assert not Schedule.parse("0F0 0B0 0U1").splits_backward


def test_the_ranks_of_a_boundary_are_those_of_the_two_forwards_of_each_micro_batch():
    """Micro-batch 1 is on the second copy of stage 0."""
    schedule = Schedule.parse("0F0 0F2 0B0 0B2\n0F1 0B1\n1F0 1F1 1F2 1B0 1B1 1B2")
    assert schedule.boundary_ranks(0) == [(0, 2), (1, 2), (0, 2)]
    cut = replace(
        Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"),
        slicing=Slicing("samples", ((0.5, 0.5),)),
    )
    assert cut.boundary_ranks(0) == [(0, 1), (0, 1)]


def test_a_schedule_without_ops_has_no_stages_and_no_micro_batches():
    """Empty is a value too: counting must not fail before verify can say what is wrong."""
    empty = Schedule(())
    assert (empty.ranks, empty.stages, empty.micro_batches, empty.ranks_of_stage, str(empty)) == (
        0,
        0,
        0,
        (),
        "",
    )
    assert Schedule.parse("") == empty
    assert (empty.copies, empty.slices, empty.splits_backward) == (1, 0, False)


def test_programs_given_as_lists_become_tuples():
    """Schedules are values: comparable and hashable whatever they were made from."""
    schedule = Schedule([[Op(Kind.F, 0, 0)]])
    assert schedule == Schedule.parse("0F0")
    assert hash(schedule) == hash(Schedule.parse("0F0"))
    ops = Op(Kind.F, 0, 1), Op(Kind.B, 0, 0)
    paired = Schedule([ops], pairs={ops})
    assert hash(paired) == hash(Schedule.parse("0F1&0B0"))


def test_taking_more_micro_batches_than_there_are_changes_nothing():
    """A full batch runs the schedule itself, without a copy."""
    one_f_one_b = schedule("1f1b", 2, 3)
    assert one_f_one_b.first_micro_batches(3) is one_f_one_b
    assert one_f_one_b.first_micro_batches(9) is one_f_one_b


def test_a_short_batch_keeps_the_order_and_the_update():
    """The last batch of an epoch updates the weights too."""
    short = schedule("1f1b", 3, 4).first_micro_batches(2)
    assert (
        str(short)
        == "rank 0 | 0F0 0F1 0B0 0B1 0U1\nrank 1 | 1F0 1F1 1B0 1B1 1U1\nrank 2 | 2F0 2B0 2F1 2B1 2U1"
    )


def schedule_or_none(name, stages, micro_batches):
    """The schedule, or None where its family refuses these numbers."""
    try:
        return schedule(name, stages, micro_batches)
    except ScheduleError:
        return None


@pytest.mark.parametrize("name", sorted(schedules()))
def test_every_prefix_of_every_schedule_is_sound(name):
    """A batch too small for all micro-batches still has to run to its end; where batches overlap,
    alone.
    """
    tried = 0
    for stages in (1, 2, 3, 4, 6):
        for micro_batches in (1, 2, 4, 8, 12):
            family_schedule = schedule_or_none(name, stages, micro_batches)
            if family_schedule is not None and family_schedule.stream is not None:
                family_schedule = replace(with_batch_count(family_schedule, 1), stream=None)
            for count in (
                {1, micro_batches // 2, micro_batches - 1, micro_batches} - {0}
                if family_schedule
                else ()
            ):
                short = family_schedule.first_micro_batches(count)
                verify(short)
                assert short.micro_batches == count
                tried += 1
    assert tried > 0


@pytest.mark.parametrize("name", sorted(schedules()))
def test_forwards_alone_of_every_schedule_run_to_their_end(name):
    """Evaluation runs the same programs without the backwards; nothing may wait for what was taken
    out.
    """
    tried = 0
    for stages in (1, 2, 3, 4, 6):
        for micro_batches in (1, 2, 4, 8):
            family_schedule = schedule_or_none(name, stages, micro_batches)
            if family_schedule:
                tried += 1
                _check_forwards(family_schedule)
    assert tried > 0


@given(custom_schedules(), st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_prefix_and_forwards_of_any_sound_schedule_are_sound(schedule, count):
    """No micro-batch waits for another, so taking one out cannot make a cycle."""
    verify(schedule.first_micro_batches(count))
    _check_forwards(schedule)


def _check_forwards(schedule):
    forwards = schedule.forward_only()
    assert {op.kind for op in forwards.ops} == {Kind.F}
    assert forwards.placement == schedule.placement
    assert dependencies_of(forwards).blocked.tolist() == []
    crossings = sum(
        schedule.placement[s, m] != schedule.placement[s + 1, m]
        for s, m in schedule.placement
        if s + 1 < schedule.stages
    )
    actions = [
        action
        for program in lower(forwards).programs
        for action in program
        if not isinstance(action, Op)
    ]
    assert len(actions) == 2 * crossings


def test_a_program_whose_last_ops_are_a_pair_is_written_and_read_back():
    """Alone, at either end, and beside ops of no pair."""
    for text in ("0F0&0B0", "0F0 0F1&0B0", "0F1&0B0 0B1", "0F0 0F1&0B0 0F2&0B1 0B2 0U1"):
        assert str(Schedule.parse(f"rank 0 | {text}")) == f"rank 0 | {text}"


def test_programs_move_to_the_ranks_that_are_given():
    """The program of rank r goes to rank `ranks[r]`, not the other way round."""
    turned = schedule("gpipe", 3, 1).on_ranks((1, 2, 0))
    assert str(turned) == ("rank 0 | 2F0 2B0 2U1\nrank 1 | 0F0 0B0 0U1\nrank 2 | 1F0 1B0 1U1")
    for ranks in ((0, 1), (0, 1, 1), (1, 2, 3)):
        with pytest.raises(ScheduleError) as caught:
            schedule("gpipe", 3, 1).on_ranks(ranks)
        expected = f"{list(ranks)} is not a permutation of the 3 ranks of gpipe"
        assert str(caught.value) == expected


def test_micro_batches_slices_and_batches_are_counted_each_by_its_own():
    """Slices of one micro-batch count as one; those of all batches of a stream add up."""
    programs = Schedule.parse("0F0 0F1 0F2 0B2 0B1 0B0 0U1")
    plain = programs
    assert (plain.micro_batches, plain.slices, plain.total_micro_batches) == (3, 3, 3)
    assert (plain.slices_per_micro_batch, plain.shares) == (1, (1.0, 1.0, 1.0))
    cut = replace(programs, slicing=Slicing("samples", ((0.25, 0.75), (1.0,))))
    assert (cut.micro_batches, cut.slices, cut.total_micro_batches) == (2, 3, 2)
    assert (cut.slices_per_micro_batch, cut.shares) == (1.5, (0.25, 0.75, 1.0))
    stream = schedule("pipedream", 2, 2, batches=3)
    assert (stream.batches, stream.micro_batches, stream.slices) == (3, 2, 6)
    assert (stream.total_micro_batches, stream.slices_per_micro_batch) == (6, 1)
    # A last batch that is not complete counts as one; `verify` refuses it.
    uneven = replace(schedule("pipedream", 1, 1, batches=5), stream=Stream(2))
    assert (uneven.slices, uneven.micro_batches) == (5, 3)
    # Only forwards are counted.
    assert Schedule.parse("0F0 0B5 0U9").slices == 1
    evicting = Schedule.parse("0F0 0E0 0L0 0B0 0U1\n0E0 0L0")
    assert (evicting.stages_of_rank, evicting.ranks_of_stage) == (((0,), ()), ((0,),))


def test_the_first_of_slices_are_whole_sequences_or_small_micro_batches():
    """Tokens stay together; slices of samples are micro-batches of their own. Pairs whose ops are
    not both there end.
    """
    programs = Schedule.parse("0F0 0F1 0F2 0B2&0F3 0B3 0B1 0B0 0U1")
    shares = ((0.5, 0.5), (0.25, 0.75))
    tokens = replace(programs, slicing=Slicing("tokens", shares))
    assert tokens.first_micro_batches(2) is tokens
    short = tokens.first_micro_batches(1)
    assert str(short) == "rank 0 | 0F0 0F1 0B1 0B0 0U1"
    assert short.slicing == Slicing("tokens", shares[:1])
    assert not short.pairs
    samples = replace(programs, slicing=Slicing("samples", shares))
    assert samples.first_micro_batches(4) is samples
    assert str(samples.first_micro_batches(3)) == "rank 0 | 0F0 0F1 0F2 0B2 0B1 0B0 0U1"
    assert samples.first_micro_batches(3).slicing is None
    forwards = programs.forward_only()
    assert (str(forwards), forwards.pairs) == ("rank 0 | 0F0 0F1 0F2 0F3", frozenset())

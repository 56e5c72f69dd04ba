"""CSV of torch.distributed.pipelining: writing, reading, and errors with row, column and cell."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.schedule.custom_schedules import custom_schedules

from penstock.errors import FileError, ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.torch_csv import files
from penstock.schedule.torch_csv.actions import unsupported_reason
from penstock.schedule.torch_csv.files import from_csv, load_csv, parse_csv, read_csv, to_csv
from penstock.verify.verify import verify


def without_updates(schedule):
    return tuple(
        tuple(op for op in program if op.kind is not Kind.U) for program in schedule.programs
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
def test_a_family_comes_back_from_csv_as_it_was(name):
    """Updates are left out and put back right after the last backward, where the families have
    them.
    """
    family_schedule = schedule(name, 3, 5)
    assert from_csv(to_csv(family_schedule), name) == family_schedule


@given(custom_schedules(synchronous=True))
@settings(deadline=None, max_examples=80)
def test_any_schedule_that_torch_can_say_comes_back_sound_from_csv(schedule):
    """Ranks without ops, several stages on a rank and split backwards all have to survive."""
    if unsupported_reason(schedule) is not None:
        with pytest.raises(
            ScheduleError,
            match=r"stage \d has copies on ranks .* on one rank|torch stores losses in the order",
        ):
            to_csv(schedule)
        return
    back = from_csv(to_csv(schedule))
    verify(back)
    assert without_updates(back) == without_updates(schedule)


@given(custom_schedules(synchronous=True))
@settings(deadline=None, max_examples=40)
def test_torch_reads_our_cells_as_we_mean_them(schedule):
    """The CSV is for torch, so torch's own parser decides."""
    from torch.distributed.pipelining.schedules import (
        _Action,
    )  # here: planning's other tests need no torch

    if unsupported_reason(schedule) is not None:
        return
    rows = [
        [_Action.from_str(cell) for cell in row]
        for row in csv.reader(io.StringIO(to_csv(schedule)))
    ]
    read = [
        [
            (a.computation_type.value, a.stage_index, a.microbatch_index)
            for a in row
            if a is not None
        ]
        for row in rows
    ]
    assert read == [[tuple(op) for op in program] for program in without_updates(schedule)]


def test_torchs_own_text_of_an_action_is_ours():
    """Both ways: what torch prints is what we read."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        action = _Action(2, _ComputationType.from_str(kind.value), 13)
        assert Op.parse(repr(action)) == Op(kind, 2, 13)


def test_a_pair_is_torchs_overlap_with_the_forward_first_and_comes_back_as_a_pair():
    """What a user registers for OVERLAP_F_B takes the first half for the forward; whichever stands
    first here, both start at once.
    """
    from torch.distributed.pipelining.schedules import OVERLAP_F_B, _Action

    schedule = Schedule.parse("0F0 0F1 0F2&0B0 0B1 0B2 0U1\n1F0 1B0&1F1 1F2&1I1 1W1 1B2 1U1", "csv")
    text = to_csv(schedule)
    assert (
        text
        == "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1I1)OVERLAP_F_B,1W1,1B2\n"
    )
    action = _Action.from_str("(0F2;0B0)OVERLAP_F_B")
    assert (action.computation_type, repr(action)) == (OVERLAP_F_B, "(0F2;0B0)OVERLAP_F_B")
    back = from_csv(text)
    verify(back)
    assert str(back) == str(schedule).replace("1B0&1F1", "1F1&1B0")
    assert to_csv(back) == text


def test_the_peer_of_a_transfer_is_the_rank_that_computes_its_stage_or_none():
    """A stage that no rank computes is on no rank, which is written -1."""
    _, lowered = parse_csv('0F0,0SEND_F0,0B0,5SEND_F0\n""\n1RECV_F0,1F0,1B0,7RECV_B0')
    peers = [
        [action.peer for action in row if not isinstance(action, Op)] for row in lowered.programs
    ]
    assert peers == [[2, -1], [], [0, -1]]


def test_idle_slots_and_spaces_are_skipped():
    """torch writes an empty cell for a slot in which a rank is idle."""
    schedule = from_csv("0F0, ,0F1,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,\r\n\r\n")
    assert str(schedule) == "rank 0 | 0F0 0F1 0B0 0B1 0U1\nrank 1 | 1F0 1B0 1F1 1B1 1U1"


def test_the_update_stands_after_the_last_weight_gradient():
    """With a split backward the last I is not the end of the gradients."""
    schedule = from_csv("0F0,0F1,0I0,0I1,0W1,0W0")
    assert str(schedule) == "rank 0 | 0F0 0F1 0I0 0I1 0W1 0W0 0U1"


def test_ranks_without_ops_keep_their_place():
    """A blank line at the end of a file is lost to every reader, so an idle rank is written as one
    idle slot.
    """
    schedule = Schedule.parse("rank 0 |\nrank 1 | 0F0 0B0 0U1\nrank 2 |")
    assert from_csv(to_csv(schedule), "custom") == schedule
    assert str(from_csv(" \n0F0,0B0\n \n")) == str(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,2BW0",
            r"row 1, column 2: '2BW0' is in the format of torch 2\.4, in which BW was the whole backward",
        ),
        (
            "0F0\n1F0,0F0garbage",
            r"row 2, column 2: '0F0garbage' is not an action of torch's: write stage, kind, micro-batch",
        ),
        ("0F0,0F", r"row 1, column 2: '0F' is not an action of torch's"),
        ("0F0,0SEND_F", r"row 1, column 2: '0SEND_F' is not an action of torch's"),
        ("0F0,0SEND_W0", r"row 1, column 2: '0SEND_W0' is not an action of torch's"),
        ("0F0,0UNSHARD0", r"row 1, column 2: '0UNSHARD0' is not an action of torch's"),
        ("0F0,0B0,0U1", r"row 1, column 3: '0U1' is not an action of torch's"),
        ("0F0,0E0", r"row 1, column 2: '0E0' is not an action of torch's"),
        ("0F0;0B0", r"row 1, column 1: '0F0;0B0' is not an action of torch's"),
        ("(0F0)OVERLAP_F_B", r"row 1, column 1: '\(0F0\)OVERLAP_F_B' is not an action"),
        (
            "(0F0;0F1)OVERLAP_F_B",
            r"row 1, column 1: '.*' does not overlap a forward with a backward: write \(0F3;1B2\)OVERLAP_F_B",
        ),
        ("(0F0;0B1;0W0)OVERLAP_F_B", r"row 1, column 1: .* is not an action"),
        (
            "(0F0;0SEND_F0)OVERLAP_F_B",
            r"row 1, column 1: .* does not overlap a forward with a backward",
        ),
        ("(0F1;0B0)", r"row 1, column 1: '\(0F1;0B0\)' is not an action"),
        ("\ufeff0F0", r"row 1, column 1: '\\ufeff0F0' is not an action"),
        (
            "0F0,0B0\n\n1F0,1B0",
            r"row 2 is blank: take it out, or write \"\" for a rank without ops",
        ),
        ('0F0,"0B0\n1F0"', r"row 1, column 2: '0B0\\n1F0' is not an action"),
        ("", "the CSV has no ops"),
        ("\n\n", "the CSV has no ops"),
        (" , ,\n,", "the CSV has no ops"),
        ("0UNSHARD,0SEND_F0", "the CSV has no ops"),
        ("0F0," + "9" * 200_000, "this is not CSV: field larger than field limit"),
        (f"0F{'9' * 5000}", r"row 1, column 1: '0F9+' … \(5002 characters\) is not an action"),
    ],
)
def test_what_is_no_action_is_refused_with_its_place(text, message):
    """torch's own reader takes `2BW0` for `2B` and ignores trailing words; the run then does
    something else.
    """
    with pytest.raises(FileError, match=message) as caught:
        from_csv(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "content",
    [
        "\x00\x01\x02,;'\"" * 1_300_000,
        "SELECT * FROM ranks;\n" * 480_000,
        "0F0 0F1 " * 1_250_000,
        "\n" * 10**7,
    ],
)
def test_ten_megabytes_of_nonsense_are_one_short_message(content):
    """A file of another kind, given by mistake: what is wrong must not fill the screen."""
    with pytest.raises(
        FileError, match=r"row 1, column 1|this is not CSV|the CSV has (no ops|.* cells)"
    ) as caught:
        from_csv(content)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("custom_schedule", "message"),
    [
        (
            Schedule.parse("0F0 0B0 0U1", "mine", synchronous=False),
            "mine is asynchronous: torch's CSV has no optimizer step and no weight versions",
        ),
        (
            schedule("pipedream", 2, 4),
            "pipedream is asynchronous: torch's CSV has no optimizer step and no weight versions, and describes one batch",
        ),
        (
            replace(schedule("pipedream", 2, 4), synchronous=True),
            "pipedream is asynchronous: torch's CSV has no optimizer step",
        ),
        (
            Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0U1", "copies"),
            "stage 0 has copies on ranks 0, 1: torch's CSV has each stage on one rank",
        ),
        (
            Schedule.parse("0F0 0E0 0L0 0B0 0U1\n0E0 0L0", "handing"),
            "0E0 on rank 0 hands activations to another rank: torch's CSV has no action for it",
        ),
        (
            Schedule(
                Schedule.parse("0F0 0F1 0B1 0B0 0U1").programs,
                "cut",
                slicing=Slicing("tokens", ((0.5, 0.5),)),
            ),
            "cut cuts micro-batches along tokens: torch's CSV has whole micro-batches, all of one size, and no order between parts",
        ),
        (
            Schedule(
                Schedule.parse("0F0 0F1 0B1 0B0 0U1").programs,
                "cut",
                slicing=Slicing("samples", ((0.5, 0.5),)),
            ),
            "cut cuts micro-batches along samples: torch's CSV has whole micro-batches",
        ),
        (
            Schedule.parse("0F0&0F1 0B0 0B1 0U1"),
            "0F0&0F1 run as one: torch's OVERLAP_F_B takes a forward and the backward",
        ),
        (
            Schedule.parse("0F0 0F1&0B0&0F2 0B1 0B2 0U1"),
            "share an op with another pair: torch's OVERLAP_F_B takes two ops",
        ),
        (
            Schedule.parse(
                "0F0 0F1 0B0 0B1 0U1\n1F0 1F1 1B0 1B1 1U1".replace("F1", "Fx")
                .replace("F0", "F1")
                .replace("Fx", "F0")
            ),
            "the last stage runs 1F1 before 1F0: torch stores losses in the order of these forwards",
        ),
        # The last stage is not on the last rank.
        (
            Schedule.parse("0F0 0F1 2F1 2F0 2B1 2B0 0B0 0B1 0U1 2U1\n1F0 1F1 1B0 1B1 1U1"),
            "the last stage runs 2F1 before 2F0",
        ),
    ],
)
@pytest.mark.parametrize("communication", [False, True])
def test_what_torch_cannot_say_is_refused_by_name(custom_schedule, message, communication):
    """An export that loads and means something else is worse than none."""
    with pytest.raises(ScheduleError, match=message):
        to_csv(custom_schedule, communication)


def test_a_file_is_named_after_its_name(tmp_path):
    """The name goes into drawings and messages."""
    path = tmp_path / "night shift.csv"
    path.write_text(to_csv(schedule("1f1b", 2, 3)))
    assert read_csv(path) == from_csv(path.read_text(), "night shift")
    loaded, lowered = load_csv(path)
    assert (loaded, lowered) == (read_csv(path), None)


def test_as_many_cells_as_are_allowed_are_read(monkeypatch):
    """Separators and lines count, so that a file of blank cells ends too."""
    monkeypatch.setattr(files, "_MAX_CELLS", 3)
    assert str(from_csv("0F0,0B0\n,")) == "rank 0 | 0F0 0B0 0U1\nrank 1 | "
    with pytest.raises(FileError, match="the CSV has 4 cells, more than the 3 allowed"):
        from_csv("0F0,0B0\n,,")


@pytest.mark.parametrize("content", [None, b"\xff\xfe0F0"])
def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path, content):
    """Missing, or not text at all."""
    path = tmp_path / "plan.csv"
    if content:
        path.write_bytes(content)
    with pytest.raises(FileError, match=r"cannot read the schedule .*plan\.csv"):
        read_csv(path)

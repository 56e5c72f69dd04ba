"""CSV of torch.distributed.pipelining: there, back, and refusals that name row, column and cell."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from tests.schedule.custom_schedules import custom_schedules

from penstock.errors import FileError, ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.csv import from_csv, read_csv, to_csv
from penstock.schedule.op import Kind, Op, Schedule
from penstock.verify.verify import verify


def without_updates(made):
    return tuple(tuple(op for op in program if op.kind is not Kind.U) for program in made.programs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
def test_a_family_comes_back_from_csv_as_it_was(name):
    """Updates are left out and put back right after the last backward, where the families have them."""
    made = schedule(name, 3, 5)
    assert from_csv(to_csv(made), name) == made


@given(custom_schedules(synchronous=True))
@settings(deadline=None, max_examples=80)
def test_any_schedule_without_copies_comes_back_sound_from_csv(made):
    """Ranks without ops, several stages on a rank and split backwards all have to survive."""
    if any(len(ranks) > 1 for ranks in made.ranks_of_stage):
        with pytest.raises(ScheduleError, match=r"stage \d has copies on ranks .*torch's CSV has each stage on one rank"):
            to_csv(made)
        return
    back = from_csv(to_csv(made))
    verify(back)
    assert without_updates(back) == without_updates(made)


@given(custom_schedules(synchronous=True))
@settings(deadline=None, max_examples=40)
def test_torch_reads_our_cells_as_we_mean_them(made):
    """The CSV is for torch; the words are its own, so its own parser is the judge."""
    from torch.distributed.pipelining.schedules import _Action  # here: planning's other tests need no torch

    if any(len(ranks) > 1 for ranks in made.ranks_of_stage):
        return
    rows = [[_Action.from_str(cell) for cell in row] for row in csv.reader(io.StringIO(to_csv(made)))]
    read = [[(a.computation_type.value, a.stage_index, a.microbatch_index) for a in row if a is not None] for row in rows]
    assert read == [[tuple(op) for op in program] for program in without_updates(made)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
def test_torchs_own_validator_passes_our_families(name):
    """The export is for its runtime, which checks order and placement by rules of its own."""
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    made = schedule(name, 4, 6)
    rows = [[_Action.from_str(cell) for cell in row] for row in csv.reader(io.StringIO(to_csv(made)))]
    assert _validate_schedule(dict(enumerate(rows)), 4, 4, 6) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_torchs_own_text_of_an_action_is_ours():
    """Both ways: what torch prints is what we read."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        action = _Action(2, _ComputationType.from_str(kind.value), 13)
        assert Op.parse(repr(action)) == Op(kind, 2, 13)


def test_idle_slots_and_spaces_are_skipped():
    """torch writes an empty cell for a slot in which a rank stands still."""
    made = from_csv("0F0, ,0F1,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,\r\n\r\n")
    assert str(made) == "rank 0 | 0F0 0F1 0B0 0B1 0U1\nrank 1 | 1F0 1B0 1F1 1B1 1U1"


def test_the_update_stands_after_the_last_weight_gradient():
    """With a split backward the last I is not the end of the gradients."""
    made = from_csv("0F0,0F1,0I0,0I1,0W1,0W0")
    assert str(made) == "rank 0 | 0F0 0F1 0I0 0I1 0W1 0W0 0U1"


def test_ranks_without_ops_keep_their_place():
    """A blank line at the end of a file is lost to every reader, so an idle rank is written as one idle slot."""
    made = Schedule.parse("rank 0 |\nrank 1 | 0F0 0B0 0U1\nrank 2 |")
    assert from_csv(to_csv(made), "custom") == made


@pytest.mark.parametrize(("text", "message"), [
    ("0F0,2BW0", r"row 1, column 2: '2BW0' is not an op"),
    ("0F0\n1F0,0F0garbage", r"row 2, column 2: '0F0garbage' is not an op"),
    ("0F0,0SEND_F0", r"row 1, column 2: '0SEND_F0' is not an op.*Communication cells and overlaps are not read"),
    ("0F0,0RECV_B0", r"row 1, column 2: '0RECV_B0' is not an op.*export the schedule as 'compute_only'"),
    ("(0F0;1B0)OVERLAP_F_B", r"row 1, column 1: .*overlaps are not read"),
    ("0UNSHARD", r"row 1, column 1: '0UNSHARD' is not an op"),
    ("0F0,0B0,0U1", r"row 1, column 3: '0U1' is not one of torch's kinds F B I W"),
    ("0F0;0B0", r"row 1, column 1: '0F0;0B0' is not an op"),
    ("\ufeff0F0", r"row 1, column 1: '\\ufeff0F0' is not an op"),
    ("0F0,0B0\n\n1F0,1B0", r"row 2 is blank: take it out, or write \"\" for a rank without ops"),
    ('0F0,"0B0\n1F0"', r"row 1, column 2: '0B0\\n1F0' is not an op"),
    ("", "the CSV has no ops"),
    ("\n\n", "the CSV has no ops"),
    (" , ,\n,", "the CSV has no ops"),
    ("0F0," + "9" * 200_000, "this is no CSV: field larger than field limit"),
    (f"0F{'9' * 5000}", "row 1, column 1: '0F9+' is not an op"),
])  # fmt: skip
def test_what_is_no_compute_op_is_refused_with_its_place(text, message):
    """torch's own reader takes `2BW0` for `2B` and forgives trailing words; the run then does something else."""
    with pytest.raises(FileError, match=message):
        from_csv(text)


def test_an_asynchronous_schedule_is_refused():
    """Without optimizer steps and versions it would be another schedule."""
    with pytest.raises(ScheduleError, match="mine is asynchronous: torch's CSV has no optimizer step and no weight versions"):
        to_csv(Schedule.parse("0F0 0B0 0U1", "mine", synchronous=False))


def test_a_file_is_named_after_its_name(tmp_path):
    """The name goes into drawings and messages."""
    path = tmp_path / "night shift.csv"
    path.write_text(to_csv(schedule("1f1b", 2, 3)))
    assert read_csv(path) == from_csv(path.read_text(), "night shift")


@pytest.mark.parametrize("content", [None, b"\xff\xfe0F0"])
def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path, content):
    """Missing, or not text at all."""
    path = tmp_path / "plan.csv"
    if content:
        path.write_bytes(content)
    with pytest.raises(FileError, match=r"cannot read the schedule .*plan\.csv"):
        read_csv(path)

"""The notebook: what is in it is never run again."""

from __future__ import annotations

import pytest

from penstock.errors import FileError
from penstock.study.convergence.experiment import Group
from penstock.study.convergence.records import Measured, RecordFile

TIMED = Measured(Group("digits", "sgd", "stash", 2, 1), 0.01)


def test_records_come_back_as_they_were(run, tmp_path):
    """Resuming is reading."""
    notebook = RecordFile(tmp_path / "new")
    first, second = run(seed=0), run(seed=1, given_up="loss no number at batch 10")
    for entry in (first, second, TIMED):
        notebook.add(entry)
    again = RecordFile(tmp_path / "new")
    assert again.of([second.case, first.case]) == [second, first]
    assert again.measured == {TIMED.group: 0.01}
    assert again.of([run(seed=2).case]) == []


def test_a_line_that_was_cut_off_is_dropped_and_written_over(run, tmp_path):
    """A power cut in the middle of a line costs that case alone."""
    RecordFile(tmp_path).add(run(seed=0))
    path = tmp_path / "records.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:100])
    notebook = RecordFile(tmp_path)
    assert len(notebook.records) == 1
    notebook.add(run(seed=1))
    assert len(RecordFile(tmp_path).records) == 2


@pytest.mark.parametrize(
    "line",
    ["not json", "[1]", '{"record":{"case":{}}}', '{"other":{}}', '{"measured":{"task":5}}', "{}"],
)
def test_a_foreign_line_is_named(tmp_path, line):
    """The error must name the line of a file that was edited."""
    (tmp_path / "records.jsonl").write_text(line + "\n")
    with pytest.raises(
        FileError,
        match=r"records.jsonl, line 1 is (no record of a study|not JSON).*remove the line$",
    ):
        RecordFile(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    """Not after the first case."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot store records in"):
        RecordFile(tmp_path / "file" / "study")


def test_losses_are_kept_to_four_digits(run):
    """A study has a hundred thousand of them."""
    assert run(losses=(1.23456789,)).losses == (1.2346,)

"""Records of cases: a case with a record is never run again."""

from __future__ import annotations

import pytest

from penstock.errors import FileError
from penstock.study.convergence.experiment import Group
from penstock.study.convergence.records import Measured, RecordFile

TIMED = Measured(Group("digits", "sgd", "stash", 2, 1), 0.01)


def test_records_come_back_as_they_were(run, tmp_path):
    """Resuming is reading."""
    records = RecordFile(tmp_path / "new")
    first, second = run(seed=0), run(seed=1, given_up="loss no number at batch 10")
    for entry in (first, second, TIMED):
        records.add(entry)
    again = RecordFile(tmp_path / "new")
    assert again.of([second.case, first.case]) == [second, first]
    assert again.measured == {TIMED.group: 0.01}
    assert again.of([run(seed=2).case]) == []


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


def test_losses_are_kept_to_four_digits(run):
    """A study has a hundred thousand of them."""
    assert run(losses=(1.23456789,)).losses == (1.2346,)

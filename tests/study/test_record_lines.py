"""The lines of a study's file of records: read back, and never continued in the middle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.errors import FileError
from penstock.study.record_lines import RecordLines


@dataclass(frozen=True)
class Line:
    """A line with one of two numbers."""

    first: int | None = None
    second: int | None = None


def test_an_incomplete_last_line_is_dropped_and_written_over(tmp_path):
    """A power cut in the middle of a line costs that record alone."""
    RecordLines(tmp_path, Line).append(Line(first=1))
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text() + '{"sec')
    opened = RecordLines(tmp_path, Line)
    assert opened.lines == [Line(first=1)]
    opened.append(Line(second=2))
    assert RecordLines(tmp_path, Line).lines == [Line(first=1), Line(second=2)]


def test_a_line_with_both_kinds_of_record_is_refused(tmp_path):
    """It was not written by this class, and either could be the wrong one."""
    (tmp_path / "records.jsonl").write_text('{"first": 1, "second": 2}\n')
    with pytest.raises(FileError, match=r"line 1 is no record .* must have 'first' or 'second'"):
        RecordLines(tmp_path, Line)


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    """Not after the first cell, which may take hours."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot store records in"):
        RecordLines(tmp_path / "file" / "study", Line)

"""CSV files with raw values."""

from __future__ import annotations

import csv

import pytest

from penstock.errors import FileError
from penstock.report.csv import chart_csv, table_csv, write_csv
from penstock.report.document import Column, Table


def read(text):
    return list(csv.reader(text.splitlines()))


def test_values_are_raw_and_units_stand_in_the_header(table):
    """A second program computes with the numbers: nothing is rounded or formatted."""
    rows = read(table_csv(table))
    assert rows[0][1:] == ["M", "step (s)", "memory (bytes)", "share (share)"]
    assert rows[2] == ["b", "", "0.002", "1000000000", "0.5"]
    assert rows[4] == ["c", "failed", "1e-06", "", ""]


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", '=HYPERLINK("x")']
)
def test_a_text_that_a_spreadsheet_would_run_has_an_apostrophe_before_it(text):
    """A name in a file of others must not become a formula on the reader's desk."""
    rows = read(table_csv(Table("t", "t", (Column(text), Column("n", "number")), ((text, -1.5),))))
    assert rows[0][0].startswith("'")
    assert rows[1][0].startswith("'")
    assert rows[1][1] == "-1.5"


def test_charts_have_one_row_per_point(charts):
    """Every number of a figure can be traced."""
    assert read(chart_csv(charts[1]))[1:] == [
        ["measured", "<script>document.title='changed'</script>", "1.5", "1.4", "1.6"],
        ["measured", "b", "2.0", "1.9", "2.1"],
    ]


def test_every_table_and_chart_has_a_file_of_its_own(report, tmp_path):
    """Tables of the same name on two pages do not overwrite each other."""
    paths = write_csv(report, tmp_path / "csv")
    names = [path.name for path in paths]
    assert names[:4] == ["libraries.csv", "loss.csv", "bars.csv", "points.csv"]
    assert names[4] == "libraries-2.csv"
    assert all(path.exists() for path in paths)


def test_a_folder_that_cannot_be_made_is_refused(report, tmp_path):
    """The message names the folder."""
    with pytest.raises(FileError, match="cannot create the folder"):
        write_csv(report, tmp_path / "missing" / "csv")

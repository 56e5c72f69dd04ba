"""Records: what is written is read back; what is not a record is refused."""

from __future__ import annotations

import json
import math

import pytest

from penstock.errors import FileError
from penstock.study.cell import Cell, options
from penstock.study.records import Outcome, Record, Records

MACHINE = {"device": "a machine", "cores": "2"}


def record(**more):
    """A record with something in every field."""
    cell = Cell("s", "torch", "1f1b", stages=2, model_options=options(width=8), repetition=1)
    outcome = Outcome((0.1, 0.2), (3.0, math.nan), (1, 2), "epoch", {"lengths": [1, 2]})
    return Record(cell, "ok", "", outcome, 1.5, **more)


def test_records_are_read_back_as_they_were_written(tmp_path):
    """All fields, losses that are no numbers included."""
    Records(tmp_path, "s", MACHINE).add(record())
    again = Records(tmp_path, "s", {"device": "another machine"})
    read = again.get(record().cell)
    assert read.outcome.extra == {"lengths": [1, 2]}
    assert math.isnan(read.outcome.losses[1])
    assert (read.cell, read.outcome.seconds, read.wall_s) == (record().cell, (0.1, 0.2), 1.5)
    assert again.machine == MACHINE, "the machine is that on which the study began"


def test_the_last_of_several_records_of_a_cell_counts(tmp_path):
    """A cell that failed and was run again has a result."""
    records = Records(tmp_path, "s", MACHINE)
    records.add(Record(record().cell, "failed", "once"))
    records.add(record())
    assert Records(tmp_path, "s", MACHINE).get(record().cell).status == "ok"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "is not JSON"),
        ("{}", "must have 'head' or 'record'"),
        ('{"record": {"cell": {"study": "s"}, "status": "fine"}}', "at record.status"),
        ('{"record": {"cell": {"study": "s", "x": 1}, "status": "ok"}}', "unknown key"),
        ('{"head": {"schema": 1, "study": "s", "machine": {}}}', "the first line has the machine"),
    ],
)
def test_a_line_that_is_no_record_is_refused_with_its_place(tmp_path, line, message):
    """Nothing is guessed from a file that something else wrote."""
    path = Records(tmp_path, "s", MACHINE).path
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(FileError, match=message) as caught:
        Records(tmp_path, "s", MACHINE)
    assert "line 2" in str(caught.value)


def test_records_of_another_study_are_refused(tmp_path):
    """A folder holds one study."""
    Records(tmp_path, "s", MACHINE)
    with pytest.raises(FileError, match="records of the study 's', not of 't'"):
        Records(tmp_path, "t", MACHINE)


def test_every_line_is_json_without_line_breaks(tmp_path):
    """Other programs read the file line by line."""
    records = Records(tmp_path, "s", MACHINE)
    records.add(Record(record().cell, "failed", "a\nreason with a line break"))
    lines = records.path.read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [["head"], ["record"]]

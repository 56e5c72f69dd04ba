"""Tables for a terminal."""

from __future__ import annotations

from penstock.report.document import Column, Table
from penstock.report.text import report_text, table_text


def test_numbers_are_aligned_to_the_right_and_emphasised_rows_are_marked():
    """A terminal has no bold that survives a pipe."""
    table = Table(
        "t",
        "Steps",
        (Column("library"), Column("step", "seconds")),
        (("a", 0.5), ("longer", 12.0)),
        caption="Lower is better.",
        emphasis=(0,),
    )
    assert table_text(table).splitlines() == [
        "Steps",
        "library      step",
        "a        500.0 ms  *",
        "longer     12.0 s",
        "Lower is better.",
    ]


def test_a_report_has_its_conclusions_and_tables_without_control_characters(report):
    """Escape sequences in a name would steer the terminal."""
    text = report_text(report)
    assert text.count("Lower is better") == 2
    assert "A sentence" in text
    assert text.isprintable() or set(filter(lambda c: not c.isprintable(), text)) == {"\n"}


def test_a_table_without_rows_has_its_header():
    """A study may fail in every case."""
    assert table_text(Table("t", "", (Column("a"), Column("b")), ())) == "a  b"

"""`penstock study memory`: training under a limit."""

from __future__ import annotations

from tests.study.studies.records import column, made_up, tables

from penstock.study.settings import Settings
from penstock.study.studies.memory import Memory


def test_every_system_has_a_cell_with_and_without_the_limit():
    """The one without says what the limit costs."""
    cells = Memory().cells(Settings())
    limited = [cell for cell in cells if cell.option("memory_limit")]
    assert len(cells) == 2 * len(limited)
    assert {cell.system_label for cell in limited} == {cell.system_label for cell in cells}


def test_the_table_says_who_trains_and_at_what_cost():
    """A failure under the limit is a result, with its reason."""
    cells = Memory().cells(Settings())

    def seconds(cell):
        """Plain training fails under the limit, all others take twice as long as without it."""
        limited = bool(cell.option("memory_limit"))
        if cell.system == "plain":
            return None if limited else 1.0
        return 4.0 if limited else 2.0

    report = Memory().report(
        Settings(), made_up(cells, seconds, peak_bytes=lambda cell: 100 + cell.stages)
    )
    table = tables(report)["memory"]
    rows = dict(zip(column(table, "system"), table.rows, strict=True))
    assert rows["plain"][1:] == (101, 1.0, "no", None, None, "failed: no memory")
    assert rows["penstock 1f1b"][1:] == (102, 2.0, "yes", 4.0, 4.0, "")
    assert report.pages[0].summary[1].startswith("Not under the limit: plain;")

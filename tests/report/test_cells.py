"""Cells and names."""

from __future__ import annotations

import pytest

from penstock.report.cells import Names, blocks_of, cell_text, without_empty_columns
from penstock.report.document import Column, Table


@pytest.mark.parametrize(
    ("value", "column", "text"),
    [
        (None, Column("x", "seconds"), ""),
        (float("nan"), Column("x", "number"), "not a number"),
        (float("inf"), Column("x", "seconds"), "infinite"),
        ("failed", Column("x", "seconds"), "failed"),
        ("two\nlines\x1b[31m", Column("x"), "two lines\N{REPLACEMENT CHARACTER}[31m"),
        (0.5, Column("x", "percent", 1), "50.0 %"),
        (-0.0004, Column("x", "percent", 1), "0.0 %"),
        (2**20, Column("x", "bytes"), "1.0 MiB"),
        (1234.567, Column("x", "number", 1), "1,234.6"),
        (1234, Column("x", "number", 1), "1,234"),
    ],
)
def test_a_cell_is_written_with_its_unit(value, column, text):
    """Readers see units and no control characters; values that do not exist are empty."""
    assert cell_text(value, column) == text


def test_columns_without_any_value_are_left_out():
    """A column of empty cells only makes a table wider."""
    table = Table(
        "t", "t", (Column("a"), Column("b"), Column("c")), ((1, None, 2), (None, None, 3))
    )
    reduced = without_empty_columns(table)
    assert [column.title for column in reduced.columns] == ["a", "c"]
    assert reduced.rows == ((1, 2), (None, 3))


def test_names_are_unique_and_safe_for_files():
    """Names come from files of others: none may leave the folder or overwrite another."""
    names = Names()
    unique_names = [
        names.unique(name) for name in ("../../etc", "ETC", "etc", "a" * 300, "\0", "ü")
    ]
    assert unique_names == ["etc", "ETC-2", "etc-3", "a" * 80, "unnamed", "unnamed-2"]


def test_blocks_come_in_the_order_of_the_report(report):
    """Figures are numbered in this order by all writers."""
    assert len(list(blocks_of(report))) == 2 * 10

"""Text of table cells, and names of files and anchors, the same in every format of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from penstock.draw.facts import clean
from penstock.report.document import Block, Column, Report, Table, Value
from penstock.units import format_bytes, format_seconds

#: Longest name of a file, without its suffix. File systems allow 255 bytes.
_MAX_NAME = 80
#: Control characters and lone surrogates, which HTML forbids and terminals obey; tabs and line
#: breaks stay.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")


def cell_text(value: Value, column: Column) -> str:
    """Return the text of a cell on one line; an empty cell is an empty text.

    >>> cell_text(0.0123, Column("step", "seconds")), cell_text(1234, Column("layers", "number"))
    ('12.3 ms', '1,234')
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value)
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if column.kind == "seconds":
        return format_seconds(value)
    if column.kind == "bytes":
        return format_bytes(value)
    if column.kind == "percent":
        return f"{_rounded(100 * value, column.digits)} %"
    if isinstance(value, int):
        return f"{value:,}"
    return _rounded(value, column.digits)


def _rounded(value: float, digits: int) -> str:
    """Return a number with some decimals; never "-0.0"."""
    # Adding 0 makes a negative zero positive.
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def relative_change(before: float, after: float) -> float | None:
    """Return the relative change; None from 0."""
    return after / before - 1 if before else None


def printable(text: str) -> str:
    """Return a text of several lines, such as code, without control characters."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def is_numeric(column: Column) -> bool:
    """Return whether the values of a column are numbers, which are aligned to the right."""
    return column.kind != "text"


def without_empty_columns(table: Table) -> Table:
    """Return a table without the columns that have no value in any row."""
    columns = range(len(table.columns))
    used = [column for column in columns if any(row[column] is not None for row in table.rows)]
    return replace(
        table,
        columns=tuple(table.columns[column] for column in used),
        rows=tuple(_select(row, used) for row in table.rows),
    )


def _select(row: tuple[Value, ...], columns: list[int]) -> tuple[Value, ...]:
    """Return the values of a row in some columns."""
    return tuple(row[column] for column in columns)


def blocks_of(report: Report) -> Iterator[Block]:
    """Yield all blocks of a report in order."""
    for page in report.pages:
        for section in page.sections:
            yield from section.blocks


class Names:
    """Unique names of files or anchors.

    Names of a report may come from a file, so that they need not be valid file names, nor unique.
    """

    def __init__(self) -> None:
        self._used: set[str] = set()

    def unique(self, name: str) -> str:
        """Return a name of letters, digits and hyphens that was not returned before.

        Names that differ in case only count as equal, as in some file systems.

        >>> names = Names()
        >>> names.unique("../a b"), names.unique("A-b"), names.unique("")
        ('a-b', 'A-b-2', 'unnamed')
        """
        base = _NOT_IN_NAMES.sub("-", name).strip("-")[:_MAX_NAME].strip("-") or "unnamed"
        candidate, number = base, 1
        while candidate.lower() in self._used:
            number += 1
            candidate = f"{base}-{number}"
        self._used.add(candidate.lower())
        return candidate

"""Tables and charts of a report as CSV, with raw values."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.draw.facts import clean
from penstock.errors import FileError
from penstock.report.cells import Names, blocks_of
from penstock.report.document import Chart, Column, Report, Table, Value
from penstock.store import write_file

#: Spreadsheets run a cell that begins with one of these as a formula.
#: Source: OWASP, "CSV Injection".
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
_UNITS = {"seconds": " (s)", "bytes": " (bytes)", "percent": " (share)"}


def write_csv(report: Report, folder: Path) -> list[Path]:
    """Write one CSV file per table and per chart of a report.

    Numbers are written in full, in seconds, bytes and shares from 0 to 1. A text that a spreadsheet
    would take for a formula has an apostrophe before it.

    Args:
        report: the report.
        folder: existing or new folder; its parent must exist.

    Returns:
        The files written.

    Raises:
        FileError: the folder or a file cannot be written.
    """
    make_folder(folder)
    names = Names()
    paths = []
    for block in blocks_of(report):
        if not isinstance(block, Table | Chart):
            continue
        path = folder / f"{names.unique(block.name)}.csv"
        content = table_csv(block) if isinstance(block, Table) else chart_csv(block)
        write_file(path, content, kind="table")
        paths.append(path)
    return paths


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists.

    Raises:
        FileError: it cannot be made.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot create the folder {folder}: {error.strerror}") from error


def table_csv(table: Table) -> str:
    """Return a table as CSV; units stand in the header."""
    header = [_header(column) for column in table.columns]
    return _csv_text(header, table.rows)


def chart_csv(chart: Chart) -> str:
    """Return the points of a chart as CSV, one row per point."""
    rows: list[tuple[Value, ...]] = []
    for series in chart.series:
        lows = series.low or (None,) * len(series.x)
        highs = series.high or (None,) * len(series.x)
        for x, y, low, high in zip(series.x, series.y, lows, highs, strict=True):
            position: Value = x
            if chart.kind == "bar" and chart.categories:
                position = chart.categories[int(x)]
            rows.append((series.name, position, y, low, high))
    return _csv_text(["series", chart.x_label, chart.y_label, "low", "high"], rows)


def _header(column: Column) -> str:
    """Return the title of a column with its unit."""
    return column.title + _UNITS.get(column.kind, "")


def _csv_text(header: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Return rows under a header as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_safe(title) for title in header])
    for row in rows:
        writer.writerow([_safe(value) for value in row])
    return buffer.getvalue()


def _safe(value: Value) -> Value:
    """Return a value that a spreadsheet shows as it is."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    # The original decides too: `clean` removes a leading tab or line break.
    if value.startswith(_FORMULA_STARTS) or text.startswith(_FORMULA_STARTS):
        return f"'{text}"
    return text

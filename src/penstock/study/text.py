"""Write a report as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.report.document import Block, Code, Column, Facts, Report, Table, Text, Value
from penstock.units import format_bytes, format_seconds


def report_text(report: Report) -> str:
    """Write the summaries, texts and tables of a report; charts are in the files."""
    lines = [report.title]
    for page in report.pages:
        if len(report.pages) > 1:
            lines += ["", f"== {page.title} =="]
        lines += [f"* {sentence}" for sentence in page.summary]
        for section in page.sections:
            for block in section.blocks:
                lines += _block_lines(block)
    return "\n".join(lines)


def _block_lines(block: Block) -> Iterator[str]:
    """Yield the lines of a block."""
    if isinstance(block, Table):
        yield ""
        yield block.title
        yield from table_lines(block.columns, block.rows)
        if block.caption:
            yield block.caption
    elif isinstance(block, Text | Code):
        yield block.text
    elif isinstance(block, Facts):
        yield from (f"{name}: {value}" for name, value in block.items)


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[Value]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns."""
    texts = [[column.title for column in columns]]
    for row in rows:
        texts.append(
            [value_text(value, column) for value, column in zip(row, columns, strict=True)]
        )
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row_texts in texts:
        cells = []
        for text, width, column in zip(row_texts, widths, columns, strict=True):
            cells.append(text.ljust(width) if column.kind == "text" else text.rjust(width))
        yield "  ".join(cells).rstrip()


def value_text(value: Value, column: Column) -> str:
    """Write a value of a column."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return str(value)
    if column.kind == "seconds":
        return format_seconds(value)
    if column.kind == "bytes":
        return format_bytes(value)
    if column.kind == "percent":
        return f"{value:.{column.digits}%}"
    return f"{value:.{column.digits}f}" if column.kind == "number" else str(value)

"""A report as text for a terminal."""

from __future__ import annotations

from penstock.draw.facts import clean
from penstock.report.cells import cell_text, is_numeric, printable
from penstock.report.document import Block, Code, Facts, Report, Table, Text
from penstock.text_table import aligned


def report_text(report: Report) -> str:
    """Return titles, conclusions, texts and tables of a report; figures are in the files."""
    parts = [clean(report.title)]
    if report.facts.items:
        parts.append(_facts_text(report.facts))
    for page in report.pages:
        if len(report.pages) > 1:
            parts.append(f"== {clean(page.title)} ==")
        if page.summary:
            parts.append("\n".join(f"* {clean(sentence)}" for sentence in page.summary))
        for section in page.sections:
            texts = [block_text(block) for block in section.blocks]
            parts += [text for text in texts if text]
    return "\n\n".join(parts)


def block_text(block: Block) -> str:
    """Return a block as text; empty for a figure."""
    if isinstance(block, Table):
        return table_text(block)
    if isinstance(block, Text):
        return clean(block.text)
    if isinstance(block, Facts):
        return _facts_text(block)
    if isinstance(block, Code):
        return "\n".join(f"    {line}" for line in printable(block.text).splitlines())
    return ""


def _facts_text(facts: Facts) -> str:
    """Return names and values, one pair per line."""
    return "\n".join(f"{clean(name)}: {clean(value)}" for name, value in facts.items)


def table_text(table: Table) -> str:
    """Return a table with aligned columns under its title, and its caption below.

    Emphasised rows have an asterisk after them.
    """
    header = [clean(column.title) for column in table.columns]
    body = []
    for row in table.rows:
        cells = []
        for value, column in zip(row, table.columns, strict=True):
            cells.append(cell_text(value, column))
        body.append(cells)
    right = [index for index, column in enumerate(table.columns) if is_numeric(column)]
    lines = [clean(table.title)] if table.title else []
    # From -1, the head, so that rows have the numbers that `emphasis` has.
    for index, line in enumerate(aligned([header, *body], right), start=-1):
        mark = "  *" if index in table.emphasis else ""
        lines.append((line + mark).rstrip())
    if table.caption:
        lines.append(clean(table.caption))
    return "\n".join(lines)

"""Made-up records of a study's cells."""

from __future__ import annotations

from penstock.study.records import Outcome, Record


def made_up(cells, seconds, peak_bytes=None, losses=None, extra=None):
    """A record per cell; `seconds(cell)` and the others give its values, None a failure."""
    records = []
    for cell in cells:
        value = seconds(cell)
        if value is None:
            records.append(Record(cell, "failed", "no memory"))
            continue
        outcome = Outcome(
            (value, value, value),
            (losses(cell),) * 10 if losses else (),
            (peak_bytes(cell),) if peak_bytes else (),
            extra=extra(cell) if extra else {},
        )
        records.append(Record(cell, "ok", outcome=outcome))
    return records


def tables(report):
    """All tables of a report, by name."""
    blocks = [block for page in report.pages for part in page.sections for block in part.blocks]
    return {block.name: block for block in blocks if hasattr(block, "columns")}


def column(table, title):
    """The values of a column."""
    index = [entry.title for entry in table.columns].index(title)
    return [row[index] for row in table.rows]

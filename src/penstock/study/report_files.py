"""Write the report of a study as files: HTML, Markdown with SVG, CSV."""

from __future__ import annotations

from pathlib import Path

from penstock.report.document import Report


def write_report(report: Report, folder: Path) -> None:
    """Write `report.html`, `report.md` with its SVG files, and `csv/` into a folder.

    Raises:
        FileError: a file cannot be written.
    """
    from penstock.report.csv import write_csv
    from penstock.report.html import write_html
    from penstock.report.markdown import write_markdown

    write_html(report, folder / "report.html")
    write_markdown(report, folder)
    write_csv(report, folder / "csv")

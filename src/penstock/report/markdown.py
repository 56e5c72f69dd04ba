"""A report as Markdown with its figures as SVG files, for code hosts and other programs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from penstock.draw.facts import clean
from penstock.report.cells import Names, blocks_of, cell_text, is_numeric, printable
from penstock.report.chart import chart_svg
from penstock.report.csv import make_folder
from penstock.report.document import (
    Block,
    Chart,
    Code,
    Facts,
    Page,
    Report,
    Table,
    TimelineFigure,
)
from penstock.report.timelines import timeline_svg
from penstock.store import write_file

#: Characters with a meaning in Markdown (CommonMark 0.31, and tables and strikethrough of GitHub).
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")
#: What begins a list, a quotation or an underlined heading at the start of a line.
_LINE_START = re.compile(r"^(\d{1,9}[.)]|[-+=])")
_FENCE = re.compile(r"`{3,}")


def write_markdown(report: Report, folder: Path) -> list[Path]:
    """Write `report.md`, and its figures as `figures/NAME.svg`, into a folder.

    Args:
        report: the report.
        folder: existing or new folder; its parent must exist.

    Returns:
        The files written.

    Raises:
        FileError: the folder or a file cannot be written.
    """
    figures = dict(_drawings(report))
    make_folder(folder)
    paths = []
    if figures:
        make_folder(folder / "figures")
    for name, drawing in figures.items():
        path = folder / "figures" / f"{name}.svg"
        write_file(path, drawing, kind="figure")
        paths.append(path)
    path = folder / "report.md"
    write_file(path, markdown_page(report), kind="report")
    return [*paths, path]


def _drawings(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the file name without suffix and the SVG of every figure, in order."""
    names = Names()
    for block in blocks_of(report):
        if isinstance(block, Chart):
            yield names.unique(block.name), chart_svg(block)
        elif isinstance(block, TimelineFigure):
            yield names.unique(block.name), timeline_svg(block)


def markdown_page(report: Report) -> str:
    """Return the Markdown of a report. Texts of the report are never markup."""
    writer = _Writer(Names())
    parts = [f"# {escape_markdown(report.title)}"]
    if report.facts.items:
        parts.append(writer.facts(report.facts))
    for page in report.pages:
        parts += _page_parts(page, writer)
    return "\n\n".join(parts) + "\n"


def _page_parts(page: Page, writer: _Writer) -> list[str]:
    """Return the blocks of a page as Markdown."""
    parts = [f"## {escape_markdown(page.title)}"]
    if page.summary:
        parts.append("\n".join(f"- {escape_markdown(line)}" for line in page.summary))
    if page.command:
        parts.append(fenced(page.command))
    for section in page.sections:
        parts.append(f"### {escape_markdown(section.title)}")
        parts += [writer.block(block) for block in section.blocks]
    return parts


@dataclass
class _Writer:
    """Writes blocks; figures get the names of their files in the order of the report."""

    names: Names

    def block(self, block: Block) -> str:
        """Return the Markdown of a block."""
        if isinstance(block, Table):
            return self.table(block)
        if isinstance(block, Chart | TimelineFigure):
            return self.figure(block)
        if isinstance(block, Facts):
            return self.facts(block)
        if isinstance(block, Code):
            return fenced(block.text)
        return escape_markdown(block.text)

    def table(self, table: Table) -> str:
        """Return a table under its heading; emphasised rows are bold."""
        titles = [escape_markdown(column.title) for column in table.columns]
        marks = ["--:" if is_numeric(column) else "---" for column in table.columns]
        lines = [f"| {' | '.join(titles)} |", f"| {' | '.join(marks)} |"]
        for index, row in enumerate(table.rows):
            cells = []
            for value, column in zip(row, table.columns, strict=True):
                text = escape_markdown(cell_text(value, column))
                cells.append(f"**{text}**" if text and index in table.emphasis else text)
            lines.append(f"| {' | '.join(cells)} |")
        parts = [f"#### {escape_markdown(table.title)}", "\n".join(lines)]
        if table.caption:
            parts.append(escape_markdown(table.caption))
        if table.source:
            parts.append(_sources(table.source))
        return "\n\n".join(parts)

    def figure(self, figure: Chart | TimelineFigure) -> str:
        """Return a figure under its heading."""
        title = escape_markdown(figure.title)
        parts = [f"#### {title}", f"![{title}](figures/{self.names.unique(figure.name)}.svg)"]
        if figure.caption:
            parts.append(escape_markdown(figure.caption))
        if isinstance(figure, Chart) and figure.source:
            parts.append(_sources(figure.source))
        return "\n\n".join(parts)

    def facts(self, facts: Facts) -> str:
        """Return facts as a list."""
        lines = []
        for name, value in facts.items:
            lines.append(f"- {escape_markdown(name)}: {escape_markdown(value)}")
        return "\n".join(lines)


def escape_markdown(text: str) -> str:
    r"""Return a text on one line that Markdown shows as it is.

    >>> print(escape_markdown("a_b <i>"), escape_markdown("- 1"))
    a\_b \<i\> \- 1
    """
    escaped = _MARKUP.sub(r"\\\1", clean(text))
    return _LINE_START.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", escaped)


def fenced(text: str) -> str:
    """Return a text as a code block, whose fence is longer than any in the text."""
    longest = max((len(match) for match in _FENCE.findall(text)), default=2)
    fence = "`" * max(3, longest + 1)
    lines = printable(text).splitlines()
    return "\n".join([f"{fence}text", *lines, fence])


def _sources(paths: tuple[str, ...]) -> str:
    """Return the line with the links to raw data."""
    return f"Raw data: {', '.join(map(_source_link, paths))}"


def _source_link(path: str) -> str:
    """Return a link to a file of raw data; an absolute path is plain text."""
    text = escape_markdown(path)
    parts = path.replace("\\", "/")
    return text if parts.startswith("/") else f"[{text}](./{quote(parts, errors='replace')})"

"""Content of a report, independent of its format.

A report has pages, a page has sections, a section has blocks. Writers of HTML, Markdown and CSV
read these values; studies and training runs make them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.event import Timeline

#: Value of a table cell. None is an empty cell: the value does not exist.
Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: text of the header.
        kind: "text", "number" (right-aligned, sorted by value), "seconds" or "bytes" (printed with
            a unit, sorted by value), "percent" (a share from 0 to 1).
        digits: decimals of a "number" or "percent".
        about: explanation of the header, shown on demand.
    """

    title: str
    kind: Literal["text", "number", "seconds", "bytes", "percent"] = "text"
    digits: int = 2
    about: str = ""


@dataclass(frozen=True)
class Table:
    """A table with typed columns, sortable in HTML and written as CSV.

    Attributes:
        name: name of the CSV file: letters, digits and hyphens.
        title: heading of the table.
        columns: one per value of a row.
        rows: values in the order of the columns.
        caption: what the reader should learn from the table.
        source: files of raw data that the values derive from, relative to the report.
        emphasis: indices of rows to emphasise.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""
    source: tuple[str, ...] = ()
    emphasis: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.name}: a row has {len(row)} values: {row}")


@dataclass(frozen=True)
class Series:
    """A named curve: points (x, y) in order of x. With `low` and `high`, an interval per point."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Curves, bars or points on common axes.

    Attributes:
        name: name of the SVG file: letters, digits and hyphens.
        title: heading of the chart.
        x_label, y_label: axis labels, with units.
        series: what to draw.
        kind: "line", "bar" (x counts the `categories`) or "scatter".
        categories: texts below the bars.
        log_x, log_y: logarithmic axes.
        caption: what the reader should learn from the chart.
        source: files of raw data that the values derive from, relative to the report.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: Literal["line", "bar", "scatter"] = "line"
    categories: tuple[str, ...] = ()
    log_x: bool = False
    log_y: bool = False
    caption: str = ""
    source: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimelineFigure:
    """Timelines one above the other: interactive in HTML, a static picture elsewhere.

    Attributes:
        name: name of the SVG file: letters, digits and hyphens.
        title: heading of the figure.
        timelines: simulated or measured, on a common time scale.
        caption: what the reader should learn from the figure.
    """

    name: str
    title: str
    timelines: tuple[Timeline, ...]
    caption: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text. Nothing in it is markup."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Names and values, such as the machine's facts or the settings of a run."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Code:
    """A command or program to copy."""

    text: str


Block = Table | Chart | TimelineFigure | Text | Facts | Code


@dataclass(frozen=True)
class Section:
    """A heading with blocks below it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Page:
    """One page of a report, such as one experiment.

    Attributes:
        name: of the page in links and file names: letters, digits and hyphens.
        title: heading of the page.
        sections: in order.
        command: the command that makes the page again.
        summary: conclusions, one sentence each, printed first.
    """

    name: str
    title: str
    sections: tuple[Section, ...]
    command: str = ""
    summary: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A report: what one HTML file, or one folder of Markdown, SVG and CSV files, holds."""

    title: str
    pages: tuple[Page, ...]
    facts: Facts = field(default_factory=lambda: Facts(()))

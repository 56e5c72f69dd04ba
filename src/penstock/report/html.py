"""A report as one HTML file that loads nothing from the network.

Pages follow each other in the file, with a contents list. Scripts only add to the static content:
sorting, filtering, copying, and timelines that zoom. A content security policy in the file forbids
all network access and every script other than the two of this package.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from penstock.draw.compare import differences
from penstock.draw.facts import clean
from penstock.draw.palette import dark_style
from penstock.draw.viewer import resource, viewer_script
from penstock.report.cells import Names, blocks_of, cell_text, is_numeric, printable
from penstock.report.chart import NARROW, WIDE, chart_svg
from penstock.report.chart_style import dark_chart_style
from penstock.report.document import (
    Block,
    Chart,
    Code,
    Facts,
    Page,
    Report,
    Table,
    Text,
    TimelineFigure,
    Value,
)
from penstock.report.timelines import timeline_html
from penstock.store import write_file

#: Tables with more rows have a box to filter them.
_FILTER_ROWS = 12

#: What a template gets about a block: its template, and values by name.
View = dict[str, Any]


def write_html(report: Report, path: Path) -> None:
    """Write a report as one HTML file, replaced atomically.

    Raises:
        FileError: the file cannot be written.
    """
    write_file(path, html_page(report), kind="report")


def html_page(report: Report) -> str:
    """Return the HTML file of a report.

    Texts of the report are never markup: names such as `<script>` are shown as they are.
    """
    environment = Environment(
        loader=PackageLoader("penstock.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    names = Names()
    pages = [_page_view(page, names) for page in report.pages]
    scripts = [_resource("report.js")]
    if any(isinstance(block, TimelineFigure) for block in blocks_of(report)):
        scripts.append(viewer_script())
    return environment.get_template("report.html").render(
        title=clean(report.title),
        facts=_facts(report.facts),
        pages=pages,
        style=Markup(_style_sheet()),  # noqa: S704 - files of this package
        scripts=[Markup(script) for script in scripts],  # noqa: S704 - likewise
        policy=_policy(scripts),
    )


def _printable(value: object) -> object:
    """Return a text without the characters that HTML forbids; other values as they are."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def _resource(name: str) -> str:
    """Return the text of a file of this package's templates."""
    folder = files("penstock.report").joinpath("templates")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _style_sheet() -> str:
    """Return the style sheet of the page, with light and dark colours and rules for print."""
    dark = resource("page_dark.css") + _resource("dark.css")
    dark += dark_style() + dark_chart_style()
    return (
        f"{resource('viewer.css')}{_resource('report.css')}"
        f"@media screen and (prefers-color-scheme:dark){{{dark}}}{_resource('print.css')}"
    )


def _policy(scripts: list[str]) -> str:
    """Return the content security policy: no network, and no script but these.

    Styles may stand in elements: widths and colours are set there.
    """
    hashes = []
    for script in scripts:
        digest = hashlib.sha256(script.encode()).digest()
        hashes.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _page_view(page: Page, names: Names) -> View:
    """Return what the template shows of a page."""
    page_id = names.unique(f"page-{page.name}")
    sections = []
    for section in page.sections:
        section_id = names.unique(f"{page_id}-{section.title}")
        blocks = [_block_view(block, names) for block in section.blocks]
        sections.append({"id": section_id, "title": clean(section.title), "blocks": blocks})
    return {
        "id": page_id,
        "title": clean(page.title),
        "command": page.command,
        "summary": [clean(line) for line in page.summary],
        "sections": sections,
    }


def _block_view(block: Block, names: Names) -> View:
    """Return what the template shows of a block."""
    make_view: Callable[[Any, Names], View] = _VIEWS[type(block)]
    return make_view(block, names)


def _table_view(table: Table, names: Names) -> View:
    """Return what the template shows of a table."""
    columns = []
    for column in table.columns:
        about = clean(column.about)
        columns.append(
            {"title": clean(column.title), "numeric": is_numeric(column), "about": about}
        )
    rows = []
    for index, row in enumerate(table.rows):
        cells = []
        for value, column in zip(row, table.columns, strict=True):
            cells.append(
                {
                    "text": cell_text(value, column),
                    "key": _sort_key(value),
                    "numeric": is_numeric(column),
                }
            )
        rows.append({"cells": cells, "emphasis": index in table.emphasis})
    return {
        "kind": "table",
        "id": names.unique(f"table-{table.name}"),
        "title": clean(table.title),
        "caption": clean(table.caption),
        "columns": columns,
        "rows": rows,
        "filter": len(rows) > _FILTER_ROWS,
        "sources": [_source(source) for source in table.source],
    }


def _sort_key(value: Value) -> str:
    """Return the number by which a cell is sorted; empty for texts and values without an order."""
    if value is None or isinstance(value, str) or math.isnan(value):
        return ""
    return repr(float(value))


def _source(path: str) -> dict[str, str]:
    """Return the text and the link of a file of raw data; absolute paths have no link.

    Quoting makes every path relative: the colon of an address such as `javascript:` is quoted.
    """
    parts = path.replace("\\", "/")
    link = "" if parts.startswith("/") else f"./{quote(parts, errors='replace')}"
    return {"text": clean(path), "link": link}


def _chart_view(chart: Chart, names: Names) -> View:
    """Return what the template shows of a chart: pictures for wide and for narrow screens."""
    return {
        "kind": "chart",
        "id": names.unique(f"chart-{chart.name}"),
        "title": clean(chart.title),
        "caption": clean(chart.caption),
        "sources": [_source(source) for source in chart.source],
        "wide": Markup(chart_svg(chart, WIDE)),  # noqa: S704 - escaped by chart_svg
        "narrow": Markup(chart_svg(chart, NARROW)),  # noqa: S704 - likewise
    }


def _timeline_view(figure: TimelineFigure, names: Names) -> View:
    """Return what the template shows of timelines."""
    figure_id = names.unique(f"timeline-{figure.name}")
    return {
        "kind": "timeline",
        "id": figure_id,
        "title": clean(figure.title),
        "caption": clean(figure.caption),
        "note": _sentence(differences(figure.timelines)),
        "figure": Markup(timeline_html(figure, figure_id)),  # noqa: S704 - escaped there
    }


def _sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop; an empty one as it is."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _text_view(text: Text, names: Names) -> View:
    """Return what the template shows of a paragraph."""
    del names
    return {"kind": "text", "text": clean(text.text)}


def _facts_view(facts: Facts, names: Names) -> View:
    """Return what the template shows of facts."""
    del names
    return {"kind": "facts", "items": _facts(facts)}


def _facts(facts: Facts) -> list[tuple[str, str]]:
    """Return names and values on one line each."""
    return [(clean(name), clean(value)) for name, value in facts.items]


def _code_view(code: Code, names: Names) -> View:
    """Return what the template shows of a command or program."""
    del names
    return {"kind": "code", "text": code.text}


_VIEWS: dict[type, Callable[[Any, Names], View]] = {
    Table: _table_view,
    Chart: _chart_view,
    TimelineFigure: _timeline_view,
    Text: _text_view,
    Facts: _facts_view,
    Code: _code_view,
}

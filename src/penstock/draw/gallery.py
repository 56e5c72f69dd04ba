"""Write a gallery: a folder with one SVG per schedule and two pages that show all of them.

The pages are `index.html`, and `README.md` for code hosts, which show Markdown but no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from penstock.draw.facts import clean
from penstock.draw.palette import dark_style
from penstock.draw.svg import svg
from penstock.draw.viewer import resource
from penstock.errors import FileError
from penstock.event import Timeline
from penstock.store import write_file


@dataclass(frozen=True)
class GalleryEntry:
    """One drawing of a gallery.

    Attributes:
        name: name of the schedule and of the file, without its suffix.
        about: a sentence on it.
        timeline: what to draw.
        cells: its row in the table, without the name.
        group: heading under which it stands in the table.
    """

    name: str
    about: str
    timeline: Timeline
    cells: tuple[str, ...]
    group: str


@dataclass(frozen=True)
class GalleryText:
    """Text around the drawings of a gallery.

    Attributes:
        title: title of the pages.
        introduction: paragraphs before the table.
        columns: names of the table's columns, without the first, which is the schedule.
        remarks: paragraphs after the table.
    """

    title: str
    introduction: tuple[str, ...]
    columns: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def write_gallery(folder: Path, text: GalleryText, entries: Sequence[GalleryEntry]) -> list[Path]:
    """Draw all entries into `folder` and write the pages that show them.

    The folder is created if its parent exists. Other files in it are left alone.

    Returns:
        The files written.

    Raises:
        FileError: the folder or a file cannot be written.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot create the folder {folder}: {error.strerror}") from error
    contents = {f"{entry.name}.svg": svg([entry.timeline]) for entry in entries}
    contents["index.html"] = _html_page(text, entries)
    contents["README.md"] = _markdown_page(text, entries)
    for name, content in contents.items():
        write_file(folder / name, content, kind="drawing")
    return [folder / name for name in contents]


def _html_page(text: GalleryText, entries: Sequence[GalleryEntry]) -> str:
    """Return one HTML file with all drawings. Clicking on a column's head sorts each group of the
    table, and a box filters schedules by their text.
    """
    style = resource("viewer.css") + resource("page.css") + resource("gallery.css")
    dark = resource("page_dark.css") + dark_style()
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>'
        for name in ("schedule", *text.columns)
    )
    bodies = "".join(
        _table_body(group, members, 1 + len(text.columns))
        for group, members in _groups(entries).items()
    )
    sections = "".join(_section(entry, text.columns) for entry in entries)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(text.title)}</title>\n"
        f"<style>{style}@media (prefers-color-scheme:dark){{{dark}}}</style>\n"
        "</head>\n<body>\n"
        f"<main>\n<h1>{escape(text.title)}</h1>\n{_paragraphs(text.introduction)}"
        '<p class="filter" hidden><label>Filter <input type="search" '
        'placeholder="name, paper or figure"></label></p>\n'
        f'<div class="wide"><table class="all"><thead><tr>{head}</tr></thead>'
        f"{bodies}</table></div>\n"
        f"{_paragraphs(text.remarks)}{sections}</main>\n"
        f"<script>{resource('gallery.js')}</script>\n</body>\n</html>\n"
    )


def _groups(entries: Sequence[GalleryEntry]) -> dict[str, list[GalleryEntry]]:
    """Return the entries of each group, in the order of their first entries."""
    groups: dict[str, list[GalleryEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    return groups


def _table_body(group: str, entries: Sequence[GalleryEntry], columns: int) -> str:
    """Return a group of the table: its heading and a row per entry."""
    rows = "".join(_table_row(entry) for entry in entries)
    return (
        f'<tbody><tr class="group"><th scope="rowgroup" colspan="{columns}">{escape(group)}</th>'
        f"</tr>{rows}</tbody>"
    )


def _table_row(entry: GalleryEntry) -> str:
    """Return an entry's row of the table, with a link to its drawing."""
    name = escape(entry.name)
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in entry.cells)
    return f'<tr data-section="{name}"><td><a href="#{name}">{name}</a></td>{cells}</tr>'


def _section(entry: GalleryEntry, columns: Sequence[str]) -> str:
    """Return an entry's heading, figures and drawing."""
    name = escape(entry.name)
    facts = " · ".join(
        f"{escape(column)} <b>{escape(cell)}</b>"
        for column, cell in zip(columns, entry.cells, strict=True)
    )
    return (
        f'<section id="{name}"><h2>{name}</h2><p>{escape(clean(entry.about))}</p>'
        f'<p class="facts">{facts}</p>'
        f'<figure class="still">{svg([entry.timeline], summary=False)}</figure></section>\n'
    )


def _paragraphs(texts: Sequence[str]) -> str:
    """Return texts as HTML paragraphs."""
    return "".join(f"<p>{escape(clean(text))}</p>\n" for text in texts)


def _markdown_page(text: GalleryText, entries: Sequence[GalleryEntry]) -> str:
    """Return the same page as Markdown, with links to the SVG files."""
    parts = [f"# {text.title}", *text.introduction]
    for group, members in _groups(entries).items():
        table = [
            f"| {group} | {' | '.join(text.columns)} |",
            "|---|" + "--:|" * len(text.columns),
        ]
        for entry in members:
            table.append(f"| [{entry.name}](#{entry.name}) | {' | '.join(entry.cells)} |")
        parts.append("\n".join(table))
    parts += text.remarks
    for entry in entries:
        image = f"![{entry.name}]({entry.name}.svg)"
        parts.append(f"## {entry.name}\n\n{clean(entry.about)}\n\n{image}")
    return "\n\n".join(parts) + "\n"

"""A folder of drawings: one SVG per schedule, and two pages that show them all, `index.html` and
`README.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from penstock.draw.facts import clean
from penstock.draw.output import write
from penstock.draw.palette import dark_style
from penstock.draw.svg import svg
from penstock.errors import FileError
from penstock.event import Timeline


@dataclass(frozen=True)
class Exhibit:
    """One drawing: its name, which is the file's too; what is said of it; its row in the table."""

    name: str
    about: str
    timeline: Timeline
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Show:
    """What stands around the drawings: a title, paragraphs before the table and after it, and the
    table's head.
    """

    title: str
    before: tuple[str, ...]
    head: tuple[str, ...]
    after: tuple[str, ...] = ()


def gallery(folder: Path, show: Show, exhibits: Sequence[Exhibit]) -> list[Path]:
    """Draw every exhibit into `folder`, which is made if its parent exists; other files there are
    left alone.

    Returns:
        The files written.

    Raises:
        FileError: the folder or a file cannot be written.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {folder}: {error.strerror}") from error
    drawings = {f"{each.name}.svg": svg([each.timeline]) for each in exhibits}
    for name, drawing in {
        **drawings,
        "index.html": _page(show, exhibits),
        "README.md": _markdown(show, exhibits),
    }.items():
        write(folder / name, drawing)
    return [folder / name for name in (*drawings, "index.html", "README.md")]


def _page(show: Show, exhibits: Sequence[Exhibit]) -> str:
    """One file with all drawings in it; heads of columns sort the table."""
    room = files("penstock.draw")
    style = "".join(
        room.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "gallery.css")
    )
    dark = room.joinpath("page_dark.css").read_text(encoding="utf-8") + dark_style("main")
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>'
        for name in ("schedule", *show.head)
    )
    rows = "".join(
        f'<tr><td><a href="#{escape(each.name)}">{escape(each.name)}</a></td>{"".join(f"<td>{escape(cell)}</td>" for cell in each.cells)}</tr>'
        for each in exhibits
    )
    sections = "".join(
        f'<section id="{escape(each.name)}"><h2>{escape(each.name)}</h2><p>{escape(clean(each.about))}</p><p class="facts">'
        + " · ".join(
            f"{escape(name)} <b>{escape(cell)}</b>"
            for name, cell in zip(show.head, each.cells, strict=True)
        )
        + f'</p><figure class="still">{svg([each.timeline], words=False)}</figure></section>\n'
        for each in exhibits
    )
    script = room.joinpath("gallery.js").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(show.title)}</title>\n<style>{style}@media (prefers-color-scheme:dark){{{dark}}}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{escape(show.title)}</h1>\n{_paragraphs(show.before)}"
        f'<div class="wide"><table class="all"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n'
        f"{_paragraphs(show.after)}{sections}</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _paragraphs(words: Sequence[str]) -> str:
    return "".join(f"<p>{escape(clean(each))}</p>\n" for each in words)


def _markdown(show: Show, exhibits: Sequence[Exhibit]) -> str:
    """The same for where pages of code hosts show Markdown and no HTML."""
    rows = [f"| [{each.name}](#{each.name}) | {' | '.join(each.cells)} |" for each in exhibits]
    parts = [
        f"# {show.title}",
        *show.before,
        "\n".join(
            [f"| schedule | {' | '.join(show.head)} |", "|---|" + "--:|" * len(show.head), *rows]
        ),
        *show.after,
        *(
            f"## {each.name}\n\n{clean(each.about)}\n\n![{each.name}]({each.name}.svg)"
            for each in exhibits
        ),
    ]
    return "\n\n".join(parts) + "\n"

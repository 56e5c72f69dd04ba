"""Drawings by format, and files written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.draw.html import html
from penstock.draw.perfetto import perfetto
from penstock.draw.png import png
from penstock.draw.svg import svg
from penstock.draw.terminal import text
from penstock.errors import FileError, SettingError
from penstock.event import Timeline

FORMATS = ("txt", "svg", "png", "html", "json")


@dataclass(frozen=True)
class Look:
    """How to draw: `format` None is by the path's suffix, or text without a path; `width` and
    `colour` are for text.
    """

    format: str | None = None
    width: int = 100
    colour: bool = False


def put(
    panels: Sequence[Timeline], path: str | Path | None, look: Look, note: str = ""
) -> str | bytes:
    """The drawing of `panels`, written to `path` if there is one.

    Raises:
        SettingError: the format, or the suffix that stands for it, is none of the five; the width
            is too small.
        MissingExtra: PNG needs Matplotlib.
        FileError: `path` cannot be written.
    """
    chosen = _format(path, look.format)
    drawing: str | bytes
    if chosen == "txt":
        drawing = text(panels, look.width, look.colour, note)
    elif chosen == "svg":
        drawing = svg(panels, note)
    elif chosen == "png":
        drawing = png(panels, note)
    elif chosen == "html":
        drawing = html(panels, note)
    else:
        drawing = perfetto(panels)
    if path is not None:
        write(Path(path), drawing)
    return drawing


def _format(path: str | Path | None, format: str | None) -> str:  # noqa: A002 - the public argument's name
    known = ".txt (terminal text), .svg, .png, .html and .json (Perfetto trace)"
    if format is not None:
        chosen = format.lower().removeprefix(".")
        if chosen not in FORMATS:
            raise SettingError(f"no drawing format is called {format!r}: there are {known}")
        return chosen
    if path is None:
        return "txt"
    chosen = Path(path).suffix.lower().removeprefix(".")
    if chosen not in FORMATS:
        what = f"the suffix {Path(path).suffix!r}" if chosen else "no suffix"
        raise SettingError(
            f"{path} has {what}, which is no drawing format: there are {known}. Rename it or give format="
        )
    return chosen


def write(path: Path, drawing: str | bytes) -> None:
    """Put a drawing into a file, whole or not at all.

    Raises:
        FileError: that cannot be done.
    """
    content = drawing if isinstance(drawing, bytes) else drawing.encode("utf-8")
    partial: Path | None = None
    try:
        target = path.resolve()
        if target.exists() and not target.is_file() and not target.is_dir():
            # A terminal or a pipe, such as /dev/stdout: nothing can take its place, so it is
            # written to.
            target.write_bytes(content)
            return
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        partial.write_bytes(content)
        partial.replace(target)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # the latter two: a NUL in the name, links in a circle
        if partial is not None:
            partial.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError):
            why = f"there is no folder {path.parent}; make it first"
        raise FileError(f"cannot write the drawing {path}: {why}") from error

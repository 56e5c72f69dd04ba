"""Render drawings by format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.draw.html import html
from penstock.draw.perfetto import perfetto
from penstock.draw.png import png
from penstock.draw.svg import svg
from penstock.draw.terminal import text
from penstock.errors import SettingError
from penstock.event import Timeline
from penstock.store import write_file

FORMATS = ("txt", "svg", "png", "html", "json")
_FORMAT_LIST = ".txt (terminal text), .svg, .png, .html and .json (Perfetto trace)"


@dataclass(frozen=True)
class DrawOptions:
    """How to draw.

    Attributes:
        format: name of the format. None selects it by the path's suffix, or text without a path.
        width: width of a text drawing in columns.
        colour: whether a text drawing has SGR colour codes.
    """

    format: str | None = None
    width: int = 100
    colour: bool = False


def render(
    panels: Sequence[Timeline], path: str | Path | None, options: DrawOptions, note: str = ""
) -> str | bytes:
    """Return the drawing of `panels`, and write it to `path` if there is one.

    Raises:
        SettingError: the format or the path's suffix is unknown, or the width is too small.
        MissingExtra: PNG needs Matplotlib.
        FileError: `path` cannot be written.
    """
    format_name = _select_format(path, options.format)
    drawing: str | bytes
    if format_name == "txt":
        drawing = text(panels, options.width, options.colour, note)
    elif format_name == "svg":
        drawing = svg(panels, note)
    elif format_name == "png":
        drawing = png(panels, note)
    elif format_name == "html":
        drawing = html(panels, note)
    else:
        drawing = perfetto(panels)
    if path is not None:
        write_file(path, drawing, kind="drawing")
    return drawing


def _select_format(path: str | Path | None, format_option: str | None) -> str:
    """Return the format that the option names, else the path's suffix, else text."""
    if format_option is not None:
        format_name = format_option.lower().removeprefix(".")
        if format_name not in FORMATS:
            raise SettingError(
                f"unknown drawing format {format_option!r}: the formats are {_FORMAT_LIST}"
            )
        return format_name
    if path is None:
        return "txt"
    suffix = Path(path).suffix
    format_name = suffix.lower().removeprefix(".")
    if format_name not in FORMATS:
        problem = f"the suffix {suffix!r}, which is no drawing format" if suffix else "no suffix"
        raise SettingError(
            f"{path} has {problem}: the formats are {_FORMAT_LIST}. Rename the file or pass format="
        )
    return format_name

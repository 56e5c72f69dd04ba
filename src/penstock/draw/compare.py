"""Draw timelines on one time scale: a prediction above its measurement, one schedule above another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

from penstock.draw.facts import clean, heading, percent
from penstock.draw.output import Look, put
from penstock.draw.scale import Clock
from penstock.event import Timeline


@overload
def draw_pair(
    first: Timeline,
    second: Timeline,
    path: None = None,
    *,
    format: Literal["txt", "svg", "html", "json"] | None = None,
    width: int = 100,
    colour: bool = False,
) -> str: ...
@overload
def draw_pair(
    first: Timeline,
    second: Timeline,
    path: str | Path | None = None,
    *,
    format: str | None = None,
    width: int = 100,
    colour: bool = False,
) -> str | bytes: ...
def draw_pair(
    first: Timeline,
    second: Timeline,
    path: str | Path | None = None,
    *,
    format: str | None = None,  # noqa: A002 - as draw
    width: int = 100,
    colour: bool = False,
) -> str | bytes:
    """Draw `first` above `second` on a common time scale, with a line that says how they differ.

    Args:
        first: what was predicted.
        second: what was measured, or any other timeline to hold against the first.
        path: where to write the drawing, whole or not at all; its suffix is the format: .txt .svg
            .png .html .json (Perfetto).
        format: "txt", "svg", "png", "html" or "json", whatever the suffix.
        width: columns of text, at least 20.
        colour: text with SGR codes.

    Returns:
        The drawing: what the file holds. Bytes if it is a PNG, else text.

    Raises:
        SettingError: the format is unknown, the width too small.
        MissingExtra: PNG needs Matplotlib.
        FileError: `path` cannot be written.
    """
    return put([first, second], path, Look(format, width, colour), difference(first, second))


def differences(panels: Sequence[Timeline]) -> str:
    """How each of the later timelines differs from the first, in one line; nothing where there is
    only one.
    """
    return "; ".join(difference(panels[0], other) for other in panels[1:])


def difference(first: Timeline, second: Timeline) -> str:
    """How the second timeline differs from the first, in one line.

    >>> difference(Timeline((), 1, 1), Timeline((), 1, 1, source="measured"))
    'measured takes 0 s where simulated takes 0 s; bubble ratio 0.0 % where it has 0.0 %'
    """
    clock = Clock.of((first, second))
    names = [panel.source for panel in (first, second)]
    if names[0] == names[1]:
        names = [clean(panel.title) or heading(panel) for panel in (first, second)]
    change = second.makespan / first.makespan - 1 if first.makespan else 0.0
    share = f" ({percent(abs(change))} {'longer' if change > 0 else 'shorter'})" if change else ""
    return (
        f"{names[1]} takes {clock.exact(second.makespan)}{share} where {names[0]} takes {clock.exact(first.makespan)}; "
        f"bubble ratio {percent(second.bubble_ratio)} where it has {percent(first.bubble_ratio)}"
    )

"""Draw two timelines on a common time scale, such as a prediction above its measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

from penstock.draw.facts import clean, heading, percent
from penstock.draw.output import DrawOptions, render
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
    format: str | None = None,  # noqa: A002 - as in draw
    width: int = 100,
    colour: bool = False,
) -> str | bytes:
    """Draw `first` above `second` on a common time scale, with a line on their differences.

    Args:
        first: the reference, such as a prediction.
        second: the timeline to compare with it, such as a measurement.
        path: file to write, replaced atomically. Its suffix selects the format: .txt, .svg, .png,
            .html or .json (Perfetto trace).
        format: "txt", "svg", "png", "html" or "json"; overrides the suffix.
        width: width of a text drawing in columns, at least 20.
        colour: add SGR colour codes to a text drawing.

    Returns:
        The content of the file: bytes for a PNG, otherwise text.

    Raises:
        SettingError: the format is unknown, or the width is too small.
        MissingExtra: PNG needs Matplotlib.
        FileError: `path` cannot be written.
    """
    options = DrawOptions(format, width, colour)
    return render([first, second], path, options, difference(first, second))


def differences(panels: Sequence[Timeline]) -> str:
    """Describe in one line how each later timeline differs from the first.

    Returns an empty string for a single timeline.
    """
    return "; ".join(difference(panels[0], later) for later in panels[1:])


def difference(first: Timeline, second: Timeline) -> str:
    """Describe in one line how the second timeline differs from the first.

    >>> difference(Timeline((), 1, 1), Timeline((), 1, 1, source="measured"))
    'measured takes 0 s, as long as simulated; bubble ratio 0.0 % instead of 0.0 %'
    """
    clock = Clock.of((first, second))
    first_name, second_name = first.source, second.source
    if first_name == second_name:
        first_name = clean(first.title) or heading(first)
        second_name = clean(second.title) or heading(second)
    change = second.makespan / first.makespan - 1 if first.makespan else 0.0
    if change:
        direction = "more" if change > 0 else "less"
        first_time = clock.exact(first.makespan)
        change_text = f"{percent(abs(change))} {direction} than {first_name} ({first_time})"
    else:
        change_text = f"as long as {first_name}"
    return (
        f"{second_name} takes {clock.exact(second.makespan)}, {change_text}; "
        f"bubble ratio {percent(second.bubble_ratio)} instead of {percent(first.bubble_ratio)}"
    )

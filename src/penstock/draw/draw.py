"""Draw timelines and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import numpy as np

from penstock.draw.compare import differences
from penstock.draw.output import DrawOptions, render
from penstock.errors import ScheduleError, SettingError
from penstock.event import EventArrays, Timeline, TransferArrays
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.unit_times import unit_times

#: Op lengths for a schedule drawn without costs, as in the figures of the pipeline papers: B takes
#: twice as long as F, and its halves I and W take half as long as B.
UNITS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0, Kind.U: 0.0, Kind.E: 0.0, Kind.L: 0.0}
#: A notebook does not draw values with more ops by itself.
_MAX_NOTEBOOK_OPS = 100_000

Drawable = Timeline | Schedule


@overload
def draw(
    what: Drawable | Sequence[Drawable],
    path: None = None,
    *,
    format: Literal["txt", "svg", "html", "json"] | None = None,
    width: int = 100,
    colour: bool = False,
) -> str: ...
@overload
def draw(
    what: Drawable | Sequence[Drawable],
    path: str | Path | None = None,
    *,
    format: Literal["png"],
    width: int = 100,
    colour: bool = False,
) -> bytes: ...
@overload
def draw(
    what: Drawable | Sequence[Drawable],
    path: str | Path | None = None,
    *,
    format: str | None = None,
    width: int = 100,
    colour: bool = False,
) -> str | bytes: ...
def draw(
    what: Drawable | Sequence[Drawable],
    path: str | Path | None = None,
    *,
    format: str | None = None,  # noqa: A002 - a public argument
    width: int = 100,
    colour: bool = False,
) -> str | bytes:
    """Draw timelines, or schedules with F = 1, B = 2, I = W = 1, U = 0 and free transfers.

    >>> from penstock.schedule.catalogue import schedule
    >>> print(draw(schedule("1f1b", stages=3, micro_batches=4), width=60))
    1f1b, simulated
    rank 0 |F0F1F2········B0▓▓F3B1▓▓··B2▓▓··B3▓▓|
    rank 1 |··F0F1····B0▓▓F2B1▓▓F3B2▓▓··B3▓▓····|
    rank 2 |····F0B0▓▓F1B1▓▓F2B2▓▓F3B3▓▓········|
    time    0   2   4   6   8   10  12  14  16
    makespan 18, bubble ratio 33.3 %, busy per rank 67 67 67 %
    peak in flight 3 2 1
    F░ forward   B▓ backward   · idle

    Args:
        what: a timeline, simulated or measured, or a schedule. A list of them is drawn one above
            the other on a common time scale, with a line on their differences.
        path: file to write, replaced atomically. Its suffix selects the format: .txt, .svg, .png,
            .html or .json (Perfetto trace).
        format: "txt", "svg", "png", "html" or "json"; overrides the suffix.
        width: width of a text drawing in columns, at least 20.
        colour: add SGR colour codes to a text drawing.

    Returns:
        The content of the file: bytes for a PNG, otherwise text.

    Raises:
        SettingError: `what` cannot be drawn, the format is unknown, or the width is too small.
        ScheduleError: a schedule deadlocks.
        MissingExtra: PNG needs Matplotlib.
        FileError: `path` cannot be written.
    """
    values = what if isinstance(what, (list, tuple)) else [what]
    panels = [_as_timeline(value) for value in values]
    if not panels:
        raise SettingError(
            "draw got an empty list: pass a Timeline or a Schedule, or a list of several"
        )
    options = DrawOptions(format, width, colour)
    return render(panels, path, options, differences(panels))


def _as_timeline(value: object) -> Timeline:
    """Return a timeline as it is, and a schedule as its timeline with unit lengths."""
    if isinstance(value, Timeline):
        return value
    if isinstance(value, Schedule):
        return unit_timeline(value)
    raise SettingError(
        f"draw takes a Timeline or a Schedule, or a list of them, not a {type(value).__name__}"
    )


def notebook_svg(value: Drawable) -> str | None:
    """Return the SVG that a notebook shows for a value.

    Returns None, so that the notebook shows text instead, if the value has more than 100,000 ops or
    is a schedule that deadlocks.
    """
    ops = len(value.log.start) if isinstance(value, Timeline) else len(value.ops)
    if ops > _MAX_NOTEBOOK_OPS:
        return None
    try:
        return draw(value, format="svg")
    except ScheduleError:
        # A notebook shows invalid schedules too; `verify` is there to report what is wrong.
        return None


def unit_timeline(schedule: Schedule) -> Timeline:
    """Return the timeline of a schedule with the op lengths of `UNITS` and free transfers.

    Raises:
        ScheduleError: ops wait for each other in a cycle, or a predecessor of an op is missing.
    """
    dependencies = dependencies_of(schedule)
    blocked = dependencies.blocked
    if len(blocked):
        rank, op = dependencies.ops.rank[blocked[0]], schedule.ops[blocked[0]]
        raise ScheduleError(
            f"{schedule.name} cannot be drawn: {len(blocked)} of {len(schedule.ops)} ops never "
            f"start, the first is {op} on rank {rank}. Run `verify` to see which ops wait for each "
            "other"
        )

    def units(op: Op) -> float:
        """Return the length of an op: its kind's, times the size of its micro-batch or slice."""
        share = 1.0 if op.kind is Kind.U else schedule.shares[op.micro_batch]
        return UNITS[op.kind] * share

    times = unit_times(schedule, units)
    link_of = dependencies.graph.link
    no_sizes = np.zeros(1)
    transfers = TransferArrays(
        link_of,
        dependencies.links[:, 1],
        times.sent,
        times.arrived,
        np.zeros(len(link_of), np.int32),
        no_sizes,
    )
    log = EventArrays(dependencies.ops, times.start, times.end, transfers)
    return Timeline.of_log(log, schedule.name)

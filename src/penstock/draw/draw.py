"""Draw timelines and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, overload

from penstock.draw.compare import differences
from penstock.draw.output import Look, put
from penstock.errors import ScheduleError, SettingError
from penstock.event import Timeline
from penstock.schedule.graph import build_graph
from penstock.schedule.op import Kind, Op, Schedule

#: Lengths of ops when a schedule is drawn without costs: the pipeline papers' habit of B = 2 F,
#: halved when split.
UNITS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0, Kind.U: 0.0, Kind.E: 0.0, Kind.L: 0.0}
#: A notebook shows nothing larger by itself.
_MOST_SHOWN = 100_000

Drawn = Timeline | Schedule


@overload
def draw(
    what: Drawn | Sequence[Drawn],
    path: None = None,
    *,
    format: Literal["txt", "svg", "html", "json"] | None = None,
    width: int = 100,
    colour: bool = False,
) -> str: ...
@overload
def draw(
    what: Drawn | Sequence[Drawn],
    path: str | Path | None = None,
    *,
    format: Literal["png"],
    width: int = 100,
    colour: bool = False,
) -> bytes: ...
@overload
def draw(
    what: Drawn | Sequence[Drawn],
    path: str | Path | None = None,
    *,
    format: str | None = None,
    width: int = 100,
    colour: bool = False,
) -> str | bytes: ...
def draw(
    what: Drawn | Sequence[Drawn],
    path: str | Path | None = None,
    *,
    format: str | None = None,  # noqa: A002 - contract
    width: int = 100,
    colour: bool = False,
) -> str | bytes:
    """Draw what happened, or what a schedule would do with F = 1, B = 2, I = W = 1, U = 0 and free
    transfers.

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
        what: a timeline, simulated or measured, or a schedule; or several, which are drawn one
            above the other on one time scale, with a line that says how they differ.
        path: where to write the drawing, whole or not at all; its suffix is the format: .txt .svg
            .png .html .json (Perfetto).
        format: "txt", "svg", "png", "html" or "json", whatever the suffix.
        width: columns of text, at least 20.
        colour: text with SGR codes.

    Returns:
        The drawing: what the file holds. Bytes if it is a PNG, else text.

    Raises:
        SettingError: `what` cannot be drawn, the format is unknown, the width too small.
        ScheduleError: a schedule never finishes.
        MissingExtra: PNG needs Matplotlib.
        FileError: `path` cannot be written.
    """
    panels = (
        [_panel(what)]
        if isinstance(what, (Timeline, Schedule)) or not isinstance(what, (list, tuple))
        else list(map(_panel, what))
    )
    if not panels:
        raise SettingError("draw got an empty list: give it a Timeline or a Schedule, or several")
    return put(panels, path, Look(format, width, colour), differences(panels))


def _panel(what: object) -> Timeline:
    if isinstance(what, Timeline):
        return what
    if isinstance(what, Schedule):
        return unit_timeline(what)
    raise SettingError(
        f"draw takes a Timeline or a Schedule, or a list of them, not a {type(what).__name__}"
    )


def picture(what: Drawn) -> str | None:
    """The SVG that a notebook shows of a value; None, for its text instead, if it is large or never
    finishes.
    """
    ops = len(what.log.start) if isinstance(what, Timeline) else len(what.ops)
    if ops > _MOST_SHOWN:
        return None
    try:
        return draw(what, format="svg")
    except (
        ScheduleError
    ):  # a notebook shows unsound schedules too, for `verify` to say what is wrong with them
        return None


def unit_timeline(schedule: Schedule) -> Timeline:
    """The schedule's timeline with the lengths of `UNITS` and free transfers.

    Raises:
        ScheduleError: ops wait for each other in a circle, or a value has no taker.
    """
    graph = build_graph(schedule)
    stuck = [graph.ops[node] for node in graph.order()[1] if node < len(graph.ops)]
    if stuck:
        rank, op = stuck[0]
        raise ScheduleError(
            f"{schedule.name} cannot be drawn: {len(stuck)} of {len(graph.ops)} ops never start, the first is "
            f"{op} on rank {rank}. `verify` says which wait for each other"
        )

    def op_seconds(_: int, op: Op) -> float:
        return UNITS[op.kind] * (1.0 if op.kind is Kind.U else schedule.shares[op.micro_batch])

    events = graph.events(op_seconds, lambda _link, _message: 0.0)
    return replace(
        Timeline.of(events, schedule.ranks, schedule.stages, title=schedule.name),
        slicing=schedule.slicing,
    )

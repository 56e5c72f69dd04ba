"""Timelines for the terminal: one row per rank, readable without colour."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from penstock.draw.facts import KIND_NAMES, clean, figures, heading, kinds, stages_of_rank
from penstock.draw.scale import Clock, common_unit, horizon
from penstock.errors import SettingError
from penstock.event import Event, Timeline
from penstock.schedule.op import Kind

NARROWEST = 20
IDLE = "·"
#: What fills a cell behind its letter and number: darker for more work, so that a whole B stands out from an F.
FILL = {Kind.F: "░", Kind.B: "▓", Kind.I: "▒", Kind.W: "═", Kind.U: "█"}
#: Background and foreground by kind, of the 256 colours: the families of the SVG.
_SGR = {Kind.F: "48;5;111;30", Kind.B: "48;5;29;97", Kind.I: "48;5;150;30", Kind.W: "48;5;214;30", Kind.U: "48;5;54;97"}
#: In a timeline of whole units the shortest op takes at most so many columns: more adds no information.
_WIDEST_SHORTEST = 8


@dataclass(frozen=True)
class _Columns:
    """Where times stand in a row: `count` columns of `seconds` each; `whole` if every op takes whole columns."""

    count: int
    seconds: float
    whole: bool

    @classmethod
    def of(cls, panels: Sequence[Timeline], room: int) -> _Columns:
        whole, unit = horizon(panels), common_unit(panels)
        if unit is not None and (units := round(whole / unit)) <= room:
            shortest = min(event.end - event.start for panel in panels for event in panel.compute if event.end > event.start)
            each = max(1, min(room // units, _WIDEST_SHORTEST // round(shortest / unit)))
            return cls(units * each, unit / each, True)
        return cls(room, whole / room or 1.0, False)


def text(panels: Sequence[Timeline], width: int = 100, colour: bool = False, note: str = "") -> str:
    """Draw timelines one above the other on a common time scale.

    Where all ops are small whole multiples of one length, it takes a whole number of columns, so that cells line up. Else a
    column shows what filled most of it, idle (`·`) included; where many ops share a column, kinds take turns from one column
    to the next in proportion to their time. A cell has its letter and micro-batch where there is room, with the stage first
    (`2F0`) on a rank that holds several; where every op takes whole columns, a lone digit in one is the micro-batch of an F.

    Args:
        panels: the timelines.
        width: columns in all, at least 20.
        colour: add SGR codes; cells then have a coloured ground in place of their shade.
        note: a last line.

    Raises:
        SettingError: `width` is below 20.
    """
    if width < NARROWEST:
        raise SettingError(f"a text drawing needs a width of {NARROWEST} columns or more and got {width}")
    digits = len(str(max((panel.ranks for panel in panels), default=1) - 1))
    gutter = len("rank  |") + digits
    clock, columns = Clock.of(panels), _Columns.of(panels, width - gutter - 1)
    lines: list[str] = []
    for panel in panels:
        lines += _wrapped([heading(panel)], width)
        several = [len(stages) > 1 for stages in stages_of_rank(panel)]
        of_rank: list[list[Event]] = [[] for _ in range(panel.ranks)]
        for event in panel.compute:
            of_rank[event.rank].append(event)
        for rank, events in enumerate(of_rank):
            lines.append(f"rank {rank:>{digits}} |{_row(events, columns, several[rank], colour)}|")
        lines.append("time".ljust(gutter) + _axis(clock, columns, horizon(panels)))
        lines += _wrapped(_flowing([(words, words) for words in figures(panel, clock)], ", ", width), width)
    legend = _legend(panels, colour)
    if not columns.whole and horizon(panels):
        legend.append((f"column = {clock.exact(columns.seconds)}",) * 2)
    lines += _flowing(legend, "   ", width)
    lines += _wrapped([clean(note)], width)
    return "\n".join(lines) + "\n"


def _flowing(entries: list[tuple[str, str]], between: str, width: int) -> list[str]:
    """Entries side by side, in as many lines as it takes. Each is given as it counts and as it is written."""
    lines: list[str] = []
    used = width
    for plain, entry in entries:
        if lines and used + len(between) + len(plain) <= width:
            lines[-1] += between + entry
            used += len(between) + len(plain)
        else:
            lines.append(entry)
            used = len(plain)
    return lines


def _wrapped(lines: list[str], width: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ")]


def _row(events: list[Event], columns: _Columns, several: bool, colour: bool) -> str:
    kinds_there = _filled(events, columns)
    cells = [IDLE if kind is None else " " if colour else FILL[kind] for kind in kinds_there]
    for event in events:
        # Both ends are rounded alike, so the end of one op is the start of the next.
        first, last = round(event.start / columns.seconds), min(columns.count, round(event.end / columns.seconds))
        for label in _labels(event, several, last - first, columns.whole):
            if all(kind is event.op.kind for kind in kinds_there[first : first + len(label)]):
                cells[first : first + len(label)] = label
                break
    if not colour:
        return "".join(cells)
    row = ""
    for kind, run in groupby(range(columns.count), key=kinds_there.__getitem__):
        row += _painted("".join(cells[column] for column in run), kind)
    return row


def _labels(event: Event, several: bool, room: int, whole: bool) -> list[str]:
    """What may stand in a cell of `room` columns, best first."""
    kind, _, micro_batch = event.op
    labels = [f"{kind}{micro_batch}"]
    if several:
        labels.insert(0, str(event.op))
    if kind is Kind.F and room == 1 and whole:
        # Two digits do not fit here and have no place elsewhere, so digits side by side are as many ops.
        labels.append(str(micro_batch))
    return [label for label in labels if len(label) <= room]


def _filled(events: list[Event], columns: _Columns) -> list[Kind | None]:
    """Per column the kind of op, or None for idle, that it shows."""
    work: list[dict[Kind | None, float]] = [{} for _ in range(columns.count)]
    longest = [0.0] * columns.count
    for event in events:
        first, last = event.start / columns.seconds, event.end / columns.seconds
        for column in range(int(first + 1e-6), min(columns.count, math.ceil(last - 1e-6))):
            share = min(last, column + 1) - max(first, column)
            work[column][event.op.kind] = work[column].get(event.op.kind, 0.0) + share
            longest[column] = max(longest[column], share)
    shown: list[Kind | None] = []
    owed: dict[Kind | None, float] = {}
    for there, most in zip(work, longest, strict=True):
        idle = 1.0 - sum(there.values())
        if max(most, idle) >= 0.5:
            shown.append(None if idle > 0.5 else max(there, key=there.__getitem__))
            continue
        # Many short ops in one column: the most frequent would hide all others from end to end, so they take turns.
        there[None] = idle
        for kind, share in there.items():
            owed[kind] = owed.get(kind, 0.0) + share
        shown.append(max(there, key=owed.__getitem__))
        owed[shown[-1]] -= 1.0
    return shown


def _axis(clock: Clock, columns: _Columns, whole: float) -> str:
    """Moments, each starting in its own column."""
    for step in clock.steps(columns.seconds):
        ticks = [(round(i * step / columns.seconds), clock.tick(i * step)) for i in range(int(whole / step + 1e-9) + 1)]
        if all(place + len(word) + 2 <= after for (place, word), (after, _) in pairwise(ticks)):
            break
    line = ""
    for place, word in ticks:
        if place + len(word) <= columns.count + 1:
            line = line.ljust(place) + word
    return line


def _legend(panels: Sequence[Timeline], colour: bool) -> list[tuple[str, str]]:
    """Sign and name of every kind, plain and as written; kinds that took no time are not to be seen and left out."""
    seen = {event.op.kind for panel in panels for event in panel.compute if event.end > event.start}
    entries = []
    for kind in kinds(panels):
        if kind in seen:
            sign = f"{kind}{' ' if colour else FILL[kind]}"
            entries.append((f"{sign} {KIND_NAMES[kind]}", f"{_painted(sign, kind) if colour else sign} {KIND_NAMES[kind]}"))
    return [*entries, (f"{IDLE} idle", f"{IDLE} idle")]


def _painted(part: str, kind: Kind | None) -> str:
    return part if kind is None else f"\x1b[{_SGR[kind]}m{part}\x1b[0m"

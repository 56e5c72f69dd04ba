"""Timelines for the terminal: one row per rank, readable without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from penstock.draw.columns import Spans, shares
from penstock.draw.facts import KIND_NAMES, clean, figures, heading, kinds, op_number
from penstock.draw.pairs import by_rank, side_by_side
from penstock.draw.scale import Clock, common_unit, horizon
from penstock.draw.stage_order import Ways
from penstock.errors import SettingError
from penstock.event import Event, Timeline
from penstock.schedule.op import Kind

NARROWEST = 20
IDLE = "·"
#: Before the second op of two that run as one: `F3░&B1▓` is one span, cut in the middle for want of
#: height.
JOIN = "&"
#: What fills a cell behind its letter and number: darker for more work, so that a whole B stands
#: out from an F.
FILL = {Kind.F: "░", Kind.B: "▓", Kind.I: "▒", Kind.W: "═", Kind.U: "█", Kind.E: "→", Kind.L: "←"}
#: Background and foreground by kind, of the 256 colours: the families of the SVG.
_SGR = {
    Kind.F: "48;5;111;30",
    Kind.B: "48;5;29;97",
    Kind.I: "48;5;150;30",
    Kind.W: "48;5;214;30",
    Kind.U: "48;5;54;97",
    Kind.E: "48;5;88;97",
    Kind.L: "48;5;217;30",
}
#: In a timeline of whole units the shortest op takes at most so many columns: more adds no
#: information.
_WIDEST_SHORTEST = 8
#: With more ops than this per column, none has room for its name.
_MOST_NAMED = 4


@dataclass(frozen=True)
class _Columns:
    """Where times stand in a row: `count` columns of `seconds` each; `whole` if every op takes
    whole columns.
    """

    count: int
    seconds: float
    whole: bool

    @classmethod
    def of(cls, panels: Sequence[Timeline], room: int) -> _Columns:
        whole, unit = horizon(panels), common_unit(panels)
        if unit is not None and (units := round(whole / unit)) <= room:
            lengths = np.concatenate([panel.log.end - panel.log.start for panel in panels])
            shortest = float(lengths[lengths > 0].min())
            each = max(1, min(room // units, _WIDEST_SHORTEST // round(shortest / unit)))
            return cls(units * each, unit / each, True)
        return cls(room, whole / room or 1.0, False)


def text(panels: Sequence[Timeline], width: int = 100, colour: bool = False, note: str = "") -> str:
    """Draw timelines one above the other on a common time scale.

    Where all ops are small whole multiples of one length, it takes a whole number of columns, so
    that cells line up. Else a column shows what filled most of it, idle (`·`) included; where many
    ops share a column, kinds take turns from one column to the next in proportion to their time. A
    cell has its letter and micro-batch where there is room, with the stage first (`2F0`) on a rank
    that holds several; where every op takes whole columns, a lone digit in one is the micro-batch
    of an F. Slices are written `F3.1`. Two ops that run as one have half of their span each, with
    `&` between: `F3░&B1▓`. Where a stage has several updates that take no time, the cells before
    them end in `█`, if there is room: `B1▓█`.

    Args:
        panels: the timelines.
        width: columns in all, at least 20.
        colour: add SGR codes; cells then have a coloured ground in place of their shade.
        note: a last line.

    Raises:
        SettingError: `width` is below 20.
    """
    if width < NARROWEST:
        raise SettingError(
            f"a text drawing needs a width of {NARROWEST} columns or more and got {width}"
        )
    digits = len(str(max((panel.ranks for panel in panels), default=1) - 1))
    gutter = len("rank  |") + digits
    clock, columns = Clock.of(panels), _Columns.of(panels, width - gutter - 1)
    lines: list[str] = []
    joined = marked = False
    for panel in panels:
        lines += _wrapped([heading(panel)], width)
        rows, pairs, updates = _rows(panel, columns, colour)
        lines += [f"rank {rank:>{digits}} |{row}|" for rank, row in enumerate(rows)]
        joined, marked = joined or pairs, marked or updates
        lines.append("time".ljust(gutter) + _axis(clock, columns, horizon(panels)))
        lines += _wrapped(
            _flowing([(words, words) for words in figures(panel, clock)], ", ", width), width
        )
    legend = _legend(panels, colour)
    if marked:
        legend.append((f"{FILL[Kind.U]} at its end, an update",) * 2)
    if joined:
        legend.append((f"{JOIN} with the op before, as one",) * 2)
    if not columns.whole and horizon(panels):
        legend.append((f"column = {clock.exact(columns.seconds)}",) * 2)
    lines += _flowing(legend, "   ", width)
    lines += _wrapped([clean(note)], width)
    return "\n".join(lines) + "\n"


def _flowing(entries: list[tuple[str, str]], between: str, width: int) -> list[str]:
    """Entries side by side, in as many lines as it takes. Each is given as it counts and as it is
    written.
    """
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


@dataclass(frozen=True)
class _Cell:
    """An op in a row: its letter and number, whether its stage has to be told, whether it is the
    second of a pair.
    """

    event: Event
    name: str
    staged: bool
    second: bool

    def labels(self, room: int, whole: bool) -> list[str]:
        """What may stand in a cell of `room` columns, best first."""
        labels = [self.name]
        if self.staged:
            labels.insert(0, f"{self.event.op.stage}{self.name}")
        if self.second:
            return [
                label for label in (*(JOIN + label for label in labels), JOIN) if len(label) <= room
            ]
        if self.event.op.kind is Kind.F and room == 1 and whole:
            # Two digits do not fit here and have no place elsewhere, so digits side by side are as
            # many ops.
            labels.append(self.name[1:])
        return [label for label in labels if len(label) <= room]


def _rows(panel: Timeline, columns: _Columns, colour: bool) -> tuple[list[str], bool, bool]:
    """A row per rank, whether any shows a pair, and whether any shows an update that took no time."""
    names = kinds([panel])
    shown = [
        _filled(Spans.of(panel, rank, columns.seconds), names, columns)
        for rank in range(panel.ranks)
    ]
    if len(panel.log.start) > _MOST_NAMED * columns.count * max(1, panel.ranks):
        return (
            [_joined([None] * columns.count, kinds_there, colour) for kinds_there in shown],
            False,
            False,
        )
    ways, rows, pairs, updates = Ways.of(panel), [], False, False
    for rank, (events, kinds_there) in enumerate(zip(by_rank(panel), shown, strict=True)):
        apart, second = side_by_side(events, columns.seconds)
        pairs |= bool(second)
        several = len(ways.stages[rank]) > 1
        cells = [
            _Cell(
                event,
                f"{event.op.kind}{op_number(panel, event.op)}",
                several and ways.named(rank, event.op.stage),
                place in second,
            )
            for place, event in enumerate(apart)
        ]
        letters = _letters(cells, kinds_there, columns)
        updates |= _mark_updates(events, letters, kinds_there, columns)
        rows.append(_joined(letters, kinds_there, colour))
    return rows, pairs, updates


def _mark_updates(
    events: Sequence[Event],
    letters: list[str | None],
    kinds_there: list[Kind | None],
    columns: _Columns,
) -> bool:
    """Put a sign where a batch ends with an update that took no time; whether there was any. One
    alone ends the program anyway.
    """
    updates = [event for event in events if event.op.kind is Kind.U and event.end <= event.start]
    if all(event.op.micro_batch == 1 for event in updates):
        return False
    places = [round(event.start / columns.seconds) - 1 for event in updates]
    places = [
        place
        for place in places
        if 0 <= place < columns.count
        and letters[place] is None
        and kinds_there[place] in (Kind.B, Kind.W)
    ]
    for place in places:
        letters[place] = FILL[Kind.U]
    return bool(places)


def _letters(
    cells: list[_Cell], kinds_there: list[Kind | None], columns: _Columns
) -> list[str | None]:
    """Per column the letter or digit of an op's name, if one stands there."""
    letters: list[str | None] = [None] * columns.count
    for cell in cells:
        # Both ends are rounded alike, so the end of one op is the start of the next.
        first = round(cell.event.start / columns.seconds)
        last = min(columns.count, round(cell.event.end / columns.seconds))
        for label in cell.labels(last - first, columns.whole):
            if all(kind is cell.event.op.kind for kind in kinds_there[first : first + len(label)]):
                letters[first : first + len(label)] = label
                break
    return letters


def _joined(letters: list[str | None], kinds_there: list[Kind | None], colour: bool) -> str:
    """A row of letters, and where there are none the shades of what is there."""
    row = [
        letter or (IDLE if kind is None else " " if colour else FILL[kind])
        for letter, kind in zip(letters, kinds_there, strict=True)
    ]
    if not colour:
        return "".join(row)
    painted = ""
    for kind, run in groupby(range(len(row)), key=kinds_there.__getitem__):
        painted += _painted("".join(row[column] for column in run), kind)
    return painted


def _filled(spans: Spans, names: list[Kind], columns: _Columns) -> list[Kind | None]:
    """Per column the kind of op, or None for idle, that it shows."""
    work, longest = shares(spans, names, columns.count, columns.seconds)
    done = (
        list(zip(*(column.tolist() for column in work.values()), strict=True))
        or [()] * columns.count
    )
    shown: list[Kind | None] = []
    owed: dict[Kind | None, float] = {}
    for most, each in zip(longest.tolist(), done, strict=True):
        there: dict[Kind | None, float] = {
            kind: share for kind, share in zip(work, each, strict=True) if share > 0
        }
        idle = 1.0 - sum(there.values())
        if max(most, idle) >= 0.5:
            shown.append(None if idle > 0.5 else max(there, key=there.__getitem__))
            continue
        # Many short ops in one column: the most frequent would hide all others from end to end, so
        # they take turns.
        there[None] = idle
        for kind, share in there.items():
            owed[kind] = owed.get(kind, 0.0) + share
        shown.append(max(there, key=owed.__getitem__))
        owed[shown[-1]] -= 1.0
    return shown


def _axis(clock: Clock, columns: _Columns, whole: float) -> str:
    """Moments, each starting in its own column."""
    for step in clock.steps(columns.seconds):
        ticks = [
            (round(i * step / columns.seconds), clock.tick(i * step))
            for i in range(int(whole / step + 1e-9) + 1)
        ]
        if all(place + len(word) + 2 <= after for (place, word), (after, _) in pairwise(ticks)):
            break
    line = ""
    for place, word in ticks:
        if place + len(word) <= columns.count + 1:
            line = line.ljust(place) + word
    return line


def _legend(panels: Sequence[Timeline], colour: bool) -> list[tuple[str, str]]:
    """Sign and name of every kind, plain and as written; kinds that took no time are not to be seen
    and left out.
    """
    logs = [panel.log for panel in panels]
    seen = {
        number for log in logs for number in np.unique(log.ops.kind[log.end > log.start]).tolist()
    }
    entries = []
    for kind in kinds(panels):
        if ord(kind.value) in seen:
            sign = f"{kind}{' ' if colour else FILL[kind]}"
            entries.append(
                (
                    f"{sign} {KIND_NAMES[kind]}",
                    f"{_painted(sign, kind) if colour else sign} {KIND_NAMES[kind]}",
                )
            )
    return [*entries, (f"{IDLE} idle", f"{IDLE} idle")]


def _painted(part: str, kind: Kind | None) -> str:
    return part if kind is None else f"\x1b[{_SGR[kind]}m{part}\x1b[0m"

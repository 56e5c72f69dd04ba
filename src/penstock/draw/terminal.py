"""Timelines for the terminal: one row per rank, readable without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from penstock.draw.columns import Spans, column_shares
from penstock.draw.facts import KIND_NAMES, clean, heading, kinds_in, op_number, summary_items
from penstock.draw.pairs import events_by_rank, split_pairs
from penstock.draw.scale import Clock, axis_seconds, common_unit
from penstock.draw.stage_order import StageOrder
from penstock.errors import SettingError
from penstock.event import Event, Timeline
from penstock.schedule.op import BACKWARD_ENDS, Kind

#: Smallest width of a drawing in columns.
NARROWEST = 20
IDLE = "·"
#: Before the second op of two that run as one. `F3░&B1▓` is one span, cut in the middle because
#: a row is only one line high.
JOIN = "&"
#: Fills a cell after its letter and number: darker for more work, so that B stands out from F.
FILL = {Kind.F: "░", Kind.B: "▓", Kind.I: "▒", Kind.W: "═", Kind.U: "█", Kind.E: "→", Kind.L: "←"}
#: Background and foreground by kind in the 256-colour palette, similar to the colours of the SVG.
_SGR = {
    Kind.F: "48;5;111;30",
    Kind.B: "48;5;29;97",
    Kind.I: "48;5;150;30",
    Kind.W: "48;5;214;30",
    Kind.U: "48;5;54;97",
    Kind.E: "48;5;88;97",
    Kind.L: "48;5;217;30",
}
#: Largest width of the shortest op, in columns, in a timeline of whole units: more columns would
#: add no information.
_MAX_SHORTEST_WIDTH = 8
#: With more ops per column than this, none has room for its name.
_MAX_NAMED_OPS = 4


@dataclass(frozen=True)
class _Columns:
    """Columns of a row.

    Attributes:
        count: number of columns.
        seconds: length of a column.
        whole: whether all ops take a whole number of columns.
    """

    count: int
    seconds: float
    whole: bool

    @classmethod
    def of(cls, panels: Sequence[Timeline], max_count: int) -> _Columns:
        """Return at most `max_count` columns, with whole columns per op if possible."""
        length, unit = axis_seconds(panels), common_unit(panels)
        if unit is not None and (units := round(length / unit)) <= max_count:
            lengths = np.concatenate([panel.log.end - panel.log.start for panel in panels])
            shortest = float(lengths[lengths > 0].min())
            widest = _MAX_SHORTEST_WIDTH // round(shortest / unit)
            columns_per_unit = max(1, min(max_count // units, widest))
            return cls(units * columns_per_unit, unit / columns_per_unit, True)
        return cls(max_count, length / max_count or 1.0, False)


@dataclass(frozen=True)
class _Entry:
    """An entry of a list, such as the legend.

    Attributes:
        plain: its text, which counts for the width of a line.
        written: the same with SGR codes.
    """

    plain: str
    written: str


def text(panels: Sequence[Timeline], width: int = 100, colour: bool = False, note: str = "") -> str:
    """Return timelines drawn one above the other on a common time scale.

    If all ops are small whole multiples of a common unit, the unit takes a whole number of columns,
    so that cells line up. Otherwise a column shows what filled most of it, including idle (`·`). If
    many ops share a column, kinds take turns from one column to the next in proportion to their
    time.

    A cell has its letter and micro-batch if there is room, after its stage (`2F0`) on a rank with
    several stages. Slices are written `F3.1`. If all ops take whole columns, a single digit in one
    column is the micro-batch of an F. Two ops that run as one have half of their span each, with
    `&` between them: `F3░&B1▓`. If a stage has several updates that take no time, the cells before
    them end in `█` if there is room: `B1▓█`.

    Args:
        panels: the timelines.
        width: total width in columns, at least 20.
        colour: add SGR colour codes; cells then have a background colour instead of a fill.
        note: a last line.

    Raises:
        SettingError: `width` is below 20.
    """
    if width < NARROWEST:
        raise SettingError(
            f"a text drawing needs a width of {NARROWEST} columns or more, but got {width}"
        )
    digits = len(str(max((panel.ranks for panel in panels), default=1) - 1))
    gutter = len("rank  |") + digits
    clock, columns = Clock.of(panels), _Columns.of(panels, width - gutter - 1)
    lines: list[str] = []
    any_pairs = any_updates = False
    for panel in panels:
        lines += _wrap([heading(panel)], width)
        rows, has_pairs, has_updates = _rows(panel, columns, colour)
        lines += [f"rank {rank:>{digits}} |{row}|" for rank, row in enumerate(rows)]
        any_pairs |= has_pairs
        any_updates |= has_updates
        lines.append("time".ljust(gutter) + _axis(clock, columns, axis_seconds(panels)))
        summary = _flow(_plain_entries(summary_items(panel, clock)), ", ", width)
        lines += _wrap(summary, width)
    remarks = []
    if any_updates:
        remarks.append(f"{FILL[Kind.U]} at its end, an update")
    if any_pairs:
        remarks.append(f"{JOIN} with the op before, as one")
    if not columns.whole and axis_seconds(panels):
        remarks.append(f"column = {clock.exact(columns.seconds)}")
    lines += _flow([*_kind_entries(panels, colour), *_plain_entries(remarks)], "   ", width)
    lines += _wrap([clean(note)], width)
    return "\n".join(lines) + "\n"


def _plain_entries(texts: list[str]) -> list[_Entry]:
    """Return texts without SGR codes as entries."""
    return [_Entry(text, text) for text in texts]


def _flow(entries: list[_Entry], separator: str, width: int) -> list[str]:
    """Return entries side by side, on as many lines of `width` columns as needed."""
    lines: list[str] = []
    used = width
    for entry in entries:
        if lines and used + len(separator) + len(entry.plain) <= width:
            lines[-1] += separator + entry.written
            used += len(separator) + len(entry.plain)
        else:
            lines.append(entry.written)
            used = len(entry.plain)
    return lines


def _wrap(lines: list[str], width: int) -> list[str]:
    """Break lines longer than `width` columns."""
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ")]


@dataclass(frozen=True)
class _Cell:
    """An op in a row.

    Attributes:
        event: the op with its times.
        name: its letter and number.
        staged: whether its stage has to be written.
        second: whether it is the second op of a pair.
    """

    event: Event
    name: str
    staged: bool
    second: bool

    def labels(self, columns: int, whole: bool) -> list[str]:
        """Return the texts that fit into the cell, best first.

        Args:
            columns: width of the cell.
            whole: whether all ops of the drawing take whole columns.
        """
        labels = [self.name]
        if self.staged:
            labels.insert(0, f"{self.event.op.stage}{self.name}")
        if self.second:
            labels = [*(JOIN + label for label in labels), JOIN]
        elif self.event.op.kind is Kind.F and columns == 1 and whole:
            # A number of two digits does not fit, so it is unambiguous that adjacent digits are
            # different ops.
            labels.append(self.name[1:])
        return [label for label in labels if len(label) <= columns]


def _rows(panel: Timeline, columns: _Columns, colour: bool) -> tuple[list[str], bool, bool]:
    """Return a row per rank, whether any has a pair, and whether any marks an update."""
    kinds = kinds_in([panel])
    column_kinds = [
        _column_kinds(Spans.of(panel, rank, columns.seconds), kinds, columns)
        for rank in range(panel.ranks)
    ]
    if len(panel.log.start) > _MAX_NAMED_OPS * columns.count * max(1, panel.ranks):
        no_letters: list[str | None] = [None] * columns.count
        return (
            [_row_text(no_letters, row_kinds, colour) for row_kinds in column_kinds],
            False,
            False,
        )
    stage_order = StageOrder.of(panel)
    rows, any_pairs, any_updates = [], False, False
    events_and_kinds = zip(events_by_rank(panel), column_kinds, strict=True)
    for rank, (events, row_kinds) in enumerate(events_and_kinds):
        split_events, seconds_of_pairs = split_pairs(events, columns.seconds)
        any_pairs |= bool(seconds_of_pairs)
        several_stages = len(stage_order.stages[rank]) > 1
        cells = []
        for index, event in enumerate(split_events):
            name = f"{event.op.kind}{op_number(panel, event.op)}"
            staged = several_stages and stage_order.needs_stage_label(rank, event.op.stage)
            cells.append(_Cell(event, name, staged, index in seconds_of_pairs))
        letters = _letters(cells, row_kinds, columns)
        any_updates |= _mark_updates(events, letters, row_kinds, columns)
        rows.append(_row_text(letters, row_kinds, colour))
    return rows, any_pairs, any_updates


def _mark_updates(
    events: Sequence[Event],
    letters: list[str | None],
    row_kinds: list[Kind | None],
    columns: _Columns,
) -> bool:
    """Mark the columns at which a batch ends with an update that took no time.

    A column is marked if it belongs to a backward and has no letter.

    Args:
        events: the events of a rank.
        letters: its letters, to which the marks are added.
        row_kinds: the kinds of its columns.
        columns: the columns.

    Returns:
        Whether there is any mark.
    """
    marked = [
        column
        for column in _columns_before_updates(events, columns)
        if letters[column] is None and row_kinds[column] in BACKWARD_ENDS
    ]
    for column in marked:
        letters[column] = FILL[Kind.U]
    return bool(marked)


def _columns_before_updates(events: Sequence[Event], columns: _Columns) -> list[int]:
    """Return the last columns before the updates of a rank that took no time.

    There are none if each stage has a single update, since that ends the program anyway.
    """
    updates = [event for event in events if event.op.kind is Kind.U and event.end <= event.start]
    if all(event.op.micro_batch == 1 for event in updates):
        return []
    before = [round(event.start / columns.seconds) - 1 for event in updates]
    return [column for column in before if 0 <= column < columns.count]


def _letters(
    cells: list[_Cell], row_kinds: list[Kind | None], columns: _Columns
) -> list[str | None]:
    """Return per column its letter or digit of an op's name, None if it has none."""
    letters: list[str | None] = [None] * columns.count
    for cell in cells:
        # Both ends are rounded in the same way, so the end of one op is the start of the next.
        first = round(cell.event.start / columns.seconds)
        last = min(columns.count, round(cell.event.end / columns.seconds))
        for label in cell.labels(last - first, columns.whole):
            label_kinds = row_kinds[first : first + len(label)]
            if all(kind is cell.event.op.kind for kind in label_kinds):
                letters[first : first + len(label)] = label
                break
    return letters


def _row_text(letters: list[str | None], row_kinds: list[Kind | None], colour: bool) -> str:
    """Return a row: its letters, and the fill of its kind in columns without one."""
    row = []
    for letter, kind in zip(letters, row_kinds, strict=True):
        fill = IDLE if kind is None else " " if colour else FILL[kind]
        row.append(letter or fill)
    if not colour:
        return "".join(row)
    coloured = ""
    for kind, run in groupby(range(len(row)), key=row_kinds.__getitem__):
        coloured += _coloured("".join(row[column] for column in run), kind)
    return coloured


def _column_kinds(spans: Spans, kinds: list[Kind], columns: _Columns) -> list[Kind | None]:
    """Return per column the kind of op that it shows, None for idle.

    A column in which one op, or idle time, takes at least half of the time shows what takes most of
    it. In other columns kinds take turns: each column adds the kinds' shares to a balance, and the
    kind with the highest balance is shown and pays 1. The most frequent kind alone would hide all
    others from one end to the other.
    """
    work, longest = column_shares(spans, kinds, columns.count, columns.seconds)
    shown_kinds: list[Kind | None] = []
    balance: dict[Kind | None, float] = {}
    work_lists = {kind: kind_work.tolist() for kind, kind_work in work.items()}
    for column, longest_share in enumerate(longest.tolist()):
        shares: dict[Kind | None, float] = {}
        for kind, kind_work in work_lists.items():
            if kind_work[column] > 0:
                shares[kind] = kind_work[column]
        idle = 1.0 - sum(shares.values())
        if max(longest_share, idle) >= 0.5:
            shown_kinds.append(None if idle > 0.5 else max(shares, key=shares.__getitem__))
            continue
        shares[None] = idle
        for share_kind, share in shares.items():
            balance[share_kind] = balance.get(share_kind, 0.0) + share
        shown_kind = max(shares, key=balance.__getitem__)
        shown_kinds.append(shown_kind)
        balance[shown_kind] -= 1.0
    return shown_kinds


def _axis(clock: Clock, columns: _Columns, length: float) -> str:
    """Return the line with the times of ticks, each starting in its own column."""
    for step in clock.steps(columns.seconds):
        ticks = []
        for i in range(int(length / step + 1e-9) + 1):
            ticks.append((round(i * step / columns.seconds), clock.tick(i * step)))
        if _labels_fit(ticks):
            break
    line = ""
    for column, label in ticks:
        if column + len(label) <= columns.count + 1:
            line = line.ljust(column) + label
    return line


def _labels_fit(ticks: list[tuple[int, str]]) -> bool:
    """Return whether at least two columns are free after each label but the last."""
    for (column, label), (next_column, _) in pairwise(ticks):
        if column + len(label) + 2 > next_column:
            return False
    return True


def _kind_entries(panels: Sequence[Timeline], colour: bool) -> list[_Entry]:
    """Return the legend's entries for idle time and the kinds of op that took time.

    Kinds that took no time are not visible and are left out.
    """
    visible: set[int] = set()
    for panel in panels:
        log = panel.log
        visible.update(np.unique(log.ops.kind[log.end > log.start]).tolist())
    entries = []
    for kind in kinds_in(panels):
        if ord(kind.value) in visible:
            sign = f"{kind}{' ' if colour else FILL[kind]}"
            written_sign = _coloured(sign, kind) if colour else sign
            name = KIND_NAMES[kind]
            entries.append(_Entry(f"{sign} {name}", f"{written_sign} {name}"))
    idle = f"{IDLE} idle"
    return [*entries, _Entry(idle, idle)]


def _coloured(text: str, kind: Kind | None) -> str:
    """Return text with the SGR codes of a kind; idle columns have none."""
    return text if kind is None else f"\x1b[{_SGR[kind]}m{text}\x1b[0m"

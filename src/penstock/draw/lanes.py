"""The lanes of a figure: per rank its boxes, the transfers between them, and what the rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import median
from typing import NamedTuple

import numpy as np

from penstock.draw.box_shades import Shades
from penstock.draw.columns import Spans, shares
from penstock.draw.facts import kinds, op_name, op_number
from penstock.draw.memory import steps, thinned, told
from penstock.draw.page import AROUND, NUMBERS, SMALL, TINY, Page, n
from penstock.draw.pairs import by_rank, halves
from penstock.draw.palette import DARK, FILLS, fill_class
from penstock.draw.stage_order import Ways
from penstock.draw.text_size import text_width
from penstock.event import Event, MemoryCurve, Timeline
from penstock.schedule.op import ACTIVATION_MOVES, Kind
from penstock.units import format_bytes

GAP, WIDE_GAP, LANE, TALL_LANE, PAIR_LANE, LOW_LANE, STRIP = 6.0, 18.0, 28.0, 36.0, 40.0, 10.0, 26.0
#: More transfers than this get no heads: they would blacken the figure.
_MANY_TRANSFERS = 400
#: More ops than this are not drawn one by one; nor are ops that are narrower than half a point.
MANY_OPS, _NARROWEST_OP = 20_000, 0.5
#: Columns of a lane whose ops are summed up, and of all such lanes together.
_COLUMNS, _ALL_COLUMNS = 800, 100_000
#: Ranks from which on lanes of summed ops are low.
_MANY_RANKS = 64


def too_many(panel: Timeline, plot: float, seconds: float) -> bool:
    """Whether a timeline has more ops than can be drawn one by one in `plot` points."""
    lengths = panel.log.end - panel.log.start
    return len(lengths) > MANY_OPS or (
        len(lengths) > 0 and float(np.median(lengths)) * plot < _NARROWEST_OP * seconds
    )


def draw_lanes(page: Page, panel: Timeline) -> None:
    """Add the lanes of all ranks to `page`."""
    ways, summed = Ways.of(panel), too_many(panel, page.plot, page.seconds)
    rows = [] if summed else by_rank(panel)
    transfers = (
        []
        if summed
        else [
            event for event in panel.events if event.to_rank is not None and event.end > event.start
        ]
    )
    joined = [halves(row) for row in rows]
    page.paired |= any(joined)
    page.summed |= summed
    height = PAIR_LANE if any(joined) else TALL_LANE if ways.several and not summed else LANE
    if summed and panel.ranks > _MANY_RANKS:
        height = LOW_LANE
    held = steps(panel)
    pitch = (
        height
        + (STRIP + 3 if held else 0)
        + (WIDE_GAP if transfers else GAP if height > LOW_LANE else 2)
    )
    lanes = _Lanes(
        page, panel, ways, height, [page.y + rank * pitch for rank in range(panel.ranks)]
    )
    lanes.grounds()
    if held:
        lanes.strips(held)
    lanes.transfers(transfers)
    if summed:
        lanes.sums()
    else:
        lanes.boxes(rows, joined)
    if lanes.tops:
        page.y = lanes.tops[-1] + height + (STRIP + 3 if held else 0)


@dataclass(frozen=True)
class _Lanes:
    """Where the lanes of one timeline stand on a page."""

    page: Page
    panel: Timeline
    ways: Ways
    height: float
    tops: list[float]

    def grounds(self) -> None:
        """Idle lanes, with the ranks' names before them."""
        page = self.page
        end = page.x(self.panel.makespan) if self.panel.makespan else page.left + page.plot
        for rank, (top, name) in enumerate(zip(self.tops, self.ways.names(), strict=True)):
            page.behind.append(
                f'<rect class="lane" x="{n(page.left)}" y="{n(top)}" '
                f'width="{n(end - page.left)}" height="{n(self.height)}"/>'
            )
            if self.height == LOW_LANE and rank % 8:
                continue
            named = name and self.height > LOW_LANE
            page.y = top + self.height / 2 + (-2 if named else 4)
            page.text(page.left - 8, f"rank {rank}", "l e")
            if named:
                page.y += 13
                page.text(page.left - 8, name, "s e")

    def strips(self, held: Sequence[MemoryCurve]) -> None:
        """Below every lane what the rank holds, all on one scale, that of every timeline of the
        page.
        """
        page, most = self.page, self.page.most_bytes or 1
        for rank, (curve, top) in enumerate(zip(held, self.tops, strict=True)):
            base = top + self.height + STRIP
            few = thinned(curve, int(page.plot), page.seconds)
            ends = [page.x(moment) for moment in (*few.seconds[1:].tolist(), self.panel.makespan)]
            outline = "".join(
                f"V{n(base - (STRIP - 2) * count / most)}H{n(end)}"
                for count, end in zip(few.bytes.tolist(), ends, strict=True)
            )
            if len(few.seconds):
                start, words = n(page.x(float(few.seconds[0]))), told(self.panel, rank)
                by = f": {words}" if words else ""
                page.parts.append(
                    f'<path class="held" d="M{start} {n(base)}{outline}V{n(base)}Z"><title>peak '
                    f"{format_bytes(curve.peak)} at {page.clock.exact(curve.peak_at)}{escape(by)}</title></path>"
                )
            page.y = base - STRIP / 2 + 4
            page.text(page.left - 8, format_bytes(curve.peak), "s e")

    def transfers(self, transfers: Sequence[Event]) -> None:
        """Arrows from lane to lane: activations, gradients, and activations handed to a partner and
        back.
        """
        many = len(transfers) > _MANY_TRANSFERS
        for way, classes in (("on", "t"), ("back", "t r"), ("pass", "t p")):
            lines = []
            for event in transfers:
                if _way(event) == way and event.to_rank is not None:
                    down = event.to_rank > event.rank
                    start, end = (
                        self.tops[event.rank] + down * self.height,
                        self.tops[event.to_rank] + (not down) * self.height,
                    )
                    x = self.page.x
                    lines.append(
                        f'<path d="M{n(x(event.start))} {n(start)}L{n(x(event.end))} {n(end)}">'
                        f"<title>{op_name(self.panel, event.op)} to rank {event.to_rank}: {self._span(event)}</title></path>"
                    )
            if lines:
                head = "" if many else f' marker-end="url(#penstock-{way})"'
                self.page.parts.append(
                    f'<g class="{classes}{" many" * many}"{head}>{"".join(lines)}</g>'
                )

    def boxes(self, rows: list[list[Event]], joined: list[dict[int, int]]) -> None:
        """A box for every op, with its number where it fits; the ops of a pair are half as high."""
        size, staged = self._number_sizes(), self._stages_fit()
        shades = Shades.of(self.panel, self.ways)
        fine = bool(self.panel.compute) and median(map(self._wide, self.panel.compute)) < 4
        for rank, row in enumerate(rows):
            parts: list[str] = []
            after: list[str] = []
            for place, event in enumerate(row):
                op, mark = event.op, event.end <= event.start
                odd = shades.odd(rank, op)
                x, width = (
                    (self.page.x(event.start) - 1, 2.0)
                    if mark
                    else (self.page.x(event.start), self._wide(event))
                )
                half = joined[rank].get(place)
                top, height = (
                    (0.0, self.height)
                    if half is None
                    else (half * self.height / 2, self.height / 2)
                )
                at = f' y="{n(top)}"' if top else ""
                (after if mark else parts).append(
                    f'<rect class="{fill_class(op.kind, odd)}{" z" * mark}" x="{n(x)}"{at} width="{n(width)}" height="{n(height)}">'
                    f"<title>{op_name(self.panel, op)}: {self._span(event)}</title></rect>"
                )
                stage = (
                    f"s{op.stage}" if op.kind in staged and self.ways.named(rank, op.stage) else ""
                )
                label = _label(
                    op_number(self.panel, op),
                    stage,
                    (x, top, width, height),
                    size[op.kind],
                    dark=FILLS[op.kind][odd] in DARK,
                )
                if label:
                    after += label
                    self.page.numbered.add(op.kind)
            if parts or after:
                self.page.parts.append(
                    f'<g class="box{" fine" * fine}" transform="translate(0 {n(self.tops[rank])})">'
                    f"{''.join(parts + after)}</g>"
                )

    def sums(self) -> None:
        """Where there are too many ops for boxes: per column, one kind on top of the other, as high
        as its share of the time.
        """
        count = max(1, min(_COLUMNS, _ALL_COLUMNS // len(self.tops)))
        seconds, names = self.page.seconds / count or 1.0, kinds([self.panel])
        for rank, top in enumerate(self.tops):
            base = top + self.height
            work, _ = shares(Spans.of(self.panel, rank), names, count, seconds)
            stacked = np.zeros(count)
            layers = []
            for kind, done in work.items():
                stacked = stacked + done
                steps, column = "", 0
                for place, run in groupby(
                    map(n, (base - self.height * np.minimum(stacked, 1.0)).tolist())
                ):
                    column += len(list(run))
                    steps += f"V{place}H{n(self.page.x(column * seconds))}"
                layers.append(
                    f'<path class="{fill_class(kind, odd=False)}" d="M{n(self.page.left)} {n(base)}{steps}V{n(base)}Z"/>'
                )
            self.page.parts += reversed(layers)  # each layer stands before the higher one behind it

    def _wide(self, event: Event) -> float:
        return self.page.x(event.end) - self.page.x(event.start)

    def _number_sizes(self) -> dict[Kind, _Number]:
        """By kind, how numbers are written: alike in all boxes, such that the longest fits the
        typical one.
        """
        sizes = {}
        for kind in kinds([self.panel]):
            events = [event for event in self.panel.compute if event.op.kind is kind]
            longest = max(
                (op_number(self.panel, event.op) for event in events),
                key=lambda words: text_width(words, SMALL),
            )
            room = median(map(self._wide, events)) - AROUND
            one = [(longest, _Number(*each, two=False)) for each in NUMBERS]
            two = (
                [(longest.partition(".")[0], _Number(*each, two=True)) for each in NUMBERS]
                if "." in longest
                else []
            )
            fitting = [
                number for words, number in one + two if text_width(words, number.points) <= room
            ]
            sizes[kind] = fitting[0] if fitting else _Number(*NUMBERS[-1], two=False)
        return sizes

    def _stages_fit(self) -> set[Kind]:
        """The kinds whose typical box has room for any stage: some boxes with and some without
        would look like a difference.
        """
        longest = text_width(f"s{self.panel.stages - 1}", TINY) + AROUND
        return {
            kind
            for kind in kinds([self.panel])
            if longest
            <= median(self._wide(event) for event in self.panel.compute if event.op.kind is kind)
        }

    def _span(self, event: Event) -> str:
        clock = self.page.clock
        return f"{clock.exact(event.end - event.start)} at {clock.exact(event.start)}"


def _way(event: Event) -> str:
    return (
        "pass" if event.op.kind in ACTIVATION_MOVES else "on" if event.op.kind is Kind.F else "back"
    )


class _Number(NamedTuple):
    """How the numbers of one kind are written: class, font size, and whether slices stand below
    their micro-batch.
    """

    letter: str
    points: float
    two: bool


def _label(
    words: str, stage: str, box: tuple[float, float, float, float], look: _Number, *, dark: bool
) -> list[str]:
    """The number in a box, and its stage below it, or beside it in half a box, where there is room;
    nothing where there is none.
    """
    x, top, width, height = box
    ink = "v" if dark else "k"
    middle, beside = x + width / 2, 0.0
    base = top + height / 2 + 0.36 * look.points
    whole, dot, part = words.partition(".")
    two = look.two and bool(dot) and height > 24
    if text_width(whole if two else words, look.points) + AROUND > width:
        return []
    label = []
    stage_wide = text_width(stage, TINY)
    if two:
        label.append(
            f'<text class="m {ink}" x="{n(middle)}" y="{n(top + height - 4)}">.{part}</text>'
        )
        words, base = whole, base - 5
    elif (
        stage and height <= 24 and text_width(words, look.points) + stage_wide + 3 * AROUND <= width
    ):
        beside = stage_wide + AROUND
        label.append(
            f'<text class="m {ink}" x="{n(x + width - AROUND - stage_wide / 2)}" y="{n(base)}">{stage}</text>'
        )
    elif stage and height > 24 and stage_wide + AROUND <= width:
        label.append(
            f'<text class="m {ink}" x="{n(middle)}" y="{n(top + height - 6)}">{stage}</text>'
        )
        base -= 6
    return [
        f'<text class="{look.letter} {ink}" x="{n(middle - beside / 2)}" y="{n(base)}">{words}</text>',
        *label,
    ]

"""Lanes of an SVG figure: the boxes of each rank, transfers between ranks, and memory per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import median
from typing import NamedTuple

import numpy as np

from penstock.draw.box_shades import BoxShades
from penstock.draw.columns import Spans, column_shares
from penstock.draw.facts import kinds_in, op_name, op_number, shown_idle
from penstock.draw.memory import downsample, holder_text, memory_steps
from penstock.draw.page import NUMBER_SIZES, PADDING, SMALL, TINY, Page, n
from penstock.draw.pairs import events_by_rank, pair_halves
from penstock.draw.palette import DARK_FILLS, FILLS, fill_class
from penstock.draw.stage_order import StageOrder
from penstock.draw.text_size import text_width
from penstock.draw.transfers import timed_transfers, transfer_direction
from penstock.event import Event, MemoryCurve, Timeline
from penstock.idle import IdleCause
from penstock.schedule.op import Kind, Op
from penstock.units import format_bytes

# Heights in points: gaps between lanes (the wide one has room for arrows), lanes (tall ones have
# room for a stage below the number), and the strip of a memory curve.
GAP, WIDE_GAP, LANE, TALL_LANE, PAIR_LANE, LOW_LANE, STRIP = 6.0, 18.0, 28.0, 36.0, 40.0, 10.0, 26.0
#: With more transfers than this, arrows have no heads: they would blacken the figure.
_MAX_ARROW_HEADS = 400
#: More ops than this are not drawn as boxes, and neither are ops narrower than half a point.
MAX_BOXES, _MIN_BOX_WIDTH = 20_000, 0.5
#: Columns per lane of summed ops, and columns of all these lanes together.
_COLUMNS, _ALL_COLUMNS = 800, 100_000
#: Idle intervals narrower than this many points are not drawn.
_MIN_IDLE_WIDTH = 0.5
#: With more ranks than this, lanes of summed ops are low.
_MANY_RANKS = 64
#: Lanes above this height have room for two lines of text.
_TWO_LINE_HEIGHT = 24

#: CSS classes of arrows by direction.
ARROW_CLASSES = {"on": "t", "back": "t r", "pass": "t p"}


def has_too_many_ops(panel: Timeline, plot: float, seconds: float) -> bool:
    """Return whether a timeline has too many ops to draw a box for each.

    Args:
        panel: the timeline.
        plot: width of the time axis in points.
        seconds: length of the time axis in seconds.
    """
    lengths = panel.log.end - panel.log.start
    if len(lengths) > MAX_BOXES:
        return True
    return len(lengths) > 0 and float(np.median(lengths)) * plot < _MIN_BOX_WIDTH * seconds


def draw_lanes(page: Page, panel: Timeline) -> None:
    """Add the lanes of all ranks to `page`."""
    stage_order = StageOrder.of(panel)
    summed = has_too_many_ops(panel, page.plot, page.seconds)
    rows = [] if summed else events_by_rank(panel)
    halves = [pair_halves(row) for row in rows]
    transfers = [] if summed else timed_transfers(panel)
    page.paired |= any(halves)
    page.summed |= summed
    height = _lane_height(panel, stage_order, summed, any(halves))
    curves = memory_steps(panel)
    strip = STRIP + 3 if curves else 0
    pitch = height + strip + _lane_gap(height, bool(transfers))
    tops = [page.y + rank * pitch for rank in range(panel.ranks)]
    # In the order in which they cover each other.
    lanes = _Lanes(page, panel, stage_order, height, tops)
    lanes.add_backgrounds()
    if not summed:
        lanes.add_idle()
    if curves:
        lanes.add_memory(curves)
    lanes.add_transfers(transfers)
    if summed:
        lanes.add_sums()
    else:
        lanes.add_boxes(rows, halves)
    if lanes.tops:
        page.y = lanes.tops[-1] + height + strip


def _lane_height(panel: Timeline, stage_order: StageOrder, summed: bool, paired: bool) -> float:
    """Return the height of a lane by what its boxes have to show."""
    if summed:
        return LOW_LANE if panel.ranks > _MANY_RANKS else LANE
    if paired:
        return PAIR_LANE
    return TALL_LANE if stage_order.has_shared_ranks else LANE


def _lane_gap(height: float, has_transfers: bool) -> float:
    """Return the gap below a lane of this height; arrows of transfers need a wide one."""
    if has_transfers:
        return WIDE_GAP
    return GAP if height > LOW_LANE else 2


class _NumberStyle(NamedTuple):
    """How the numbers of one kind are written.

    Attributes:
        css_class: CSS class of the font size.
        points: font size.
        two_lines: whether the slice is on a line of its own, below the micro-batch.
    """

    css_class: str
    points: float
    two_lines: bool


class _Box(NamedTuple):
    """Position and size of a box in points; `top` is relative to its lane."""

    x: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class _Lanes:
    """The lanes of one timeline on a page.

    Attributes:
        page: where to draw.
        panel: the timeline.
        stage_order: the stages of its ranks.
        height: height of a lane in points.
        tops: per rank, the y of its lane's top.
    """

    page: Page
    panel: Timeline
    stage_order: StageOrder
    height: float
    tops: list[float]

    def add_backgrounds(self) -> None:
        """Add the idle lanes, with the names of the ranks before them."""
        page = self.page
        end = page.x(self.panel.makespan) if self.panel.makespan else page.left + page.plot
        labels = self.stage_order.rank_labels()
        for rank, (top, stages) in enumerate(zip(self.tops, labels, strict=True)):
            page.behind.append(
                f'<rect class="lane" x="{n(page.left)}" y="{n(top)}" '
                f'width="{n(end - page.left)}" height="{n(self.height)}"/>'
            )
            # Of low lanes, only every eighth has the name of its rank.
            if self.height == LOW_LANE and rank % 8:
                continue
            has_stages = stages and self.height > LOW_LANE
            page.y = top + self.height / 2 + (-2 if has_stages else 4)
            page.text(page.left - 8, f"rank {rank}", "l e")
            if has_stages:
                page.y += 13
                page.text(page.left - 8, stages, "s e")

    def add_idle(self) -> None:
        """Add what ranks wait for: times of waiting for the link have a colour of their own."""
        page = self.page
        for interval in shown_idle(self.panel):
            x, width = page.x(interval.start), page.x(interval.end) - page.x(interval.start)
            if interval.transfer is None or width < _MIN_IDLE_WIDTH:
                continue
            top = self.tops[interval.rank]
            name = op_name(self.panel, interval.transfer.op)
            time = page.clock.exact(interval.end - interval.start)
            title = f"rank {interval.transfer.rank} still computes {name}: {time}"
            css_class = "lane"
            if interval.cause is IdleCause.LINK:
                title = f"{name} is on its way from rank {interval.transfer.rank}: {time}"
                css_class = "link"
                page.link_waits = True
            page.parts.append(
                f'<rect class="{css_class}" x="{n(x)}" y="{n(top)}" width="{n(width)}" '
                f'height="{n(self.height)}"><title>{title}</title></rect>'
            )

    def add_memory(self, curves: Sequence[MemoryCurve]) -> None:
        """Add each rank's memory curve below its lane, all on the common scale of the page."""
        page = self.page
        for rank, (curve, top) in enumerate(zip(curves, self.tops, strict=True)):
            base = top + self.height + STRIP
            if len(curve.seconds):
                peak_time = page.clock.exact(curve.peak_at)
                title = f"peak {format_bytes(curve.peak)} at {peak_time}"
                holders = holder_text(self.panel, rank)
                if holders:
                    title += f": {escape(holders)}"
                page.parts.append(
                    f'<path class="held" d="{self._memory_path(curve, base)}">'
                    f"<title>{title}</title></path>"
                )
            page.y = base - STRIP / 2 + 4
            page.text(page.left - 8, format_bytes(curve.peak), "s e")

    def _memory_path(self, curve: MemoryCurve, base: float) -> str:
        """Return the SVG path of a memory curve whose zero is at y = `base`."""
        page, most_bytes = self.page, self.page.most_bytes or 1
        steps = downsample(curve, int(page.plot), page.seconds)
        step_ends = [*steps.seconds[1:].tolist(), self.panel.makespan]
        outline = ""
        for size, end in zip(steps.bytes.tolist(), step_ends, strict=True):
            outline += f"V{n(base - (STRIP - 2) * size / most_bytes)}H{n(page.x(end))}"
        start = page.x(float(steps.seconds[0]))
        return f"M{n(start)} {n(base)}{outline}V{n(base)}Z"

    def add_transfers(self, transfers: Sequence[Event]) -> None:
        """Add arrows for activations, gradients, and activations stored on another rank."""
        many = len(transfers) > _MAX_ARROW_HEADS
        for direction, classes in ARROW_CLASSES.items():
            lines = [
                self._arrow(event, event.to_rank)
                for event in transfers
                if transfer_direction(event) == direction and event.to_rank is not None
            ]
            if lines:
                head = "" if many else f' marker-end="url(#penstock-{direction})"'
                self.page.parts.append(
                    f'<g class="{classes}{" many" * many}"{head}>{"".join(lines)}</g>'
                )

    def _arrow(self, event: Event, to_rank: int) -> str:
        """Return the line of a transfer between the nearest edges of two lanes."""
        down = to_rank > event.rank
        start = self.tops[event.rank] + down * self.height
        end = self.tops[to_rank] + (not down) * self.height
        x1, x2 = self.page.x(event.start), self.page.x(event.end)
        name = op_name(self.panel, event.op)
        return (
            f'<path d="M{n(x1)} {n(start)}L{n(x2)} {n(end)}">'
            f"<title>{name} to rank {to_rank}: {self._time_text(event)}</title></path>"
        )

    def add_boxes(self, rows: list[list[Event]], halves: list[dict[int, int]]) -> None:
        """Add a box for each op, with its number if it fits.

        Args:
            rows: per rank, its events.
            halves: per rank, the events that belong to a pair, whose boxes are half as high.
        """
        number_styles, stage_kinds = self._number_styles(), self._kinds_with_stage()
        shades = BoxShades.of(self.panel, self.stage_order)
        # Boxes have no outlines if the median box is narrower than 4 points.
        fine = bool(self.panel.compute) and median(map(self._width, self.panel.compute)) < 4
        for rank, row in enumerate(rows):
            boxes: list[str] = []
            # Drawn after all boxes of the rank, so that no box covers them.
            on_top: list[str] = []
            for index, event in enumerate(row):
                op = event.op
                takes_no_time = event.end <= event.start
                second_shade = shades.is_second(rank, op)
                box = self._box(event, halves[rank].get(index))
                rectangle = self._rectangle(event, box, fill_class(op.kind, second_shade))
                (on_top if takes_no_time else boxes).append(rectangle)
                label = _box_label(
                    op_number(self.panel, op),
                    self._stage_text(rank, op) if op.kind in stage_kinds else "",
                    box,
                    number_styles[op.kind],
                    ink="v" if FILLS[op.kind][second_shade] in DARK_FILLS else "k",
                )
                if label:
                    on_top += label
                    self.page.numbered.add(op.kind)
            if boxes or on_top:
                self.page.parts.append(
                    f'<g class="box{" fine" * fine}" '
                    f'transform="translate(0 {n(self.tops[rank])})">'
                    f"{''.join(boxes + on_top)}</g>"
                )

    def _stage_text(self, rank: int, op: Op) -> str:
        """Return the stage of an op as its box names it, empty if that is not necessary."""
        return f"s{op.stage}" if self.stage_order.needs_stage_label(rank, op.stage) else ""

    def _box(self, event: Event, half: int | None) -> _Box:
        """Return the box of an event; `half` is 0 or 1 for the ops of a pair, otherwise None."""
        if event.end <= event.start:
            # A mark of two points in place of a box without width.
            x, width = self.page.x(event.start) - 1, 2.0
        else:
            x, width = self.page.x(event.start), self._width(event)
        if half is None:
            return _Box(x, 0.0, width, self.height)
        return _Box(x, half * self.height / 2, width, self.height / 2)

    def _rectangle(self, event: Event, box: _Box, css_class: str) -> str:
        """Return the SVG rectangle of an event with its tooltip."""
        mark = " z" if event.end <= event.start else ""
        y = f' y="{n(box.top)}"' if box.top else ""
        return (
            f'<rect class="{css_class}{mark}" x="{n(box.x)}"{y} '
            f'width="{n(box.width)}" height="{n(box.height)}">'
            f"<title>{op_name(self.panel, event.op)}: {self._time_text(event)}</title></rect>"
        )

    def add_sums(self) -> None:
        """Add stacked time shares per column, where there are too many ops for boxes.

        In each column the kinds are on top of each other, each as high as its share of the time.
        """
        count = max(1, min(_COLUMNS, _ALL_COLUMNS // len(self.tops)))
        seconds = self.page.seconds / count or 1.0
        kinds = kinds_in([self.panel])
        for rank, top in enumerate(self.tops):
            base = top + self.height
            work, _ = column_shares(Spans.of(self.panel, rank), kinds, count, seconds)
            stacked = np.zeros(count)
            layers = []
            for kind, kind_work in work.items():
                stacked = stacked + kind_work
                heights = base - self.height * np.minimum(stacked, 1.0)
                outline = self._steps_path([n(y) for y in heights.tolist()], seconds)
                css_class = fill_class(kind, second_shade=False)
                layers.append(
                    f'<path class="{css_class}" '
                    f'd="M{n(self.page.left)} {n(base)}{outline}V{n(base)}Z"/>'
                )
            # Each layer reaches down to the base, so the highest is drawn first.
            self.page.parts += reversed(layers)

    def _steps_path(self, heights: list[str], seconds: float) -> str:
        """Return the path along the tops of columns; equal neighbours become one step."""
        path, column = "", 0
        for y, run in groupby(heights):
            column += len(list(run))
            path += f"V{y}H{n(self.page.x(column * seconds))}"
        return path

    def _width(self, event: Event) -> float:
        """Return the width of an event's box."""
        return self.page.x(event.end) - self.page.x(event.start)

    def _number_styles(self) -> dict[Kind, _NumberStyle]:
        """Return per kind how numbers are written.

        All numbers of a kind have one style: the largest in which the longest fits the median box.
        """
        styles = {}
        for kind in kinds_in([self.panel]):
            events = [event for event in self.panel.compute if event.op.kind is kind]
            numbers = [op_number(self.panel, event.op) for event in events]
            longest = max(numbers, key=lambda number: text_width(number, SMALL))
            max_width = median(map(self._width, events)) - PADDING
            candidates = [
                (longest, _NumberStyle(css_class, points, two_lines=False))
                for css_class, points in NUMBER_SIZES
            ]
            if "." in longest:
                micro_batch = longest.partition(".")[0]
                candidates += [
                    (micro_batch, _NumberStyle(css_class, points, two_lines=True))
                    for css_class, points in NUMBER_SIZES
                ]
            # If none fits, the smallest: single boxes may be wider than the median.
            styles[kind] = _NumberStyle(*NUMBER_SIZES[-1], two_lines=False)
            for line, style in candidates:
                if text_width(line, style.points) <= max_width:
                    styles[kind] = style
                    break
        return styles

    def _kinds_with_stage(self) -> set[Kind]:
        """Return the kinds whose median box has room for the longest stage.

        If only some boxes of a kind named their stage, that would look like a difference.
        """
        label_width = text_width(f"s{self.panel.stages - 1}", TINY) + PADDING
        kinds = set()
        for kind in kinds_in([self.panel]):
            widths = [self._width(event) for event in self.panel.compute if event.op.kind is kind]
            if label_width <= median(widths):
                kinds.add(kind)
        return kinds

    def _time_text(self, event: Event) -> str:
        """Return duration and start of an event: `2 ms at 3 ms`."""
        clock = self.page.clock
        return f"{clock.exact(event.end - event.start)} at {clock.exact(event.start)}"


def _box_label(number: str, stage: str, box: _Box, style: _NumberStyle, *, ink: str) -> list[str]:
    """Return the text elements of a box: its number, and its stage if there is room.

    The stage is below the number, or next to it in half a box. The list is empty if there is no
    room for the number.

    Args:
        number: the op's number.
        stage: text of its stage; empty to leave it out.
        box: position and size of the box.
        style: how the number is written.
        ink: CSS class of the text's colour.
    """
    middle, offset = box.x + box.width / 2, 0.0
    # Digits are about 0.72 of the font size high: half of that below the middle centres them.
    baseline = box.top + box.height / 2 + 0.36 * style.points
    micro_batch, dot, slice_index = number.partition(".")
    slice_below = style.two_lines and bool(dot) and box.height > _TWO_LINE_HEIGHT
    line = micro_batch if slice_below else number
    line_width = text_width(line, style.points)
    if line_width + PADDING > box.width:
        return []
    second_text: list[str] = []
    stage_width = text_width(stage, TINY)
    bottom = box.top + box.height
    if slice_below:
        second_text.append(_small_text(f".{slice_index}", ink, middle, bottom - 4))
        baseline -= 5
    elif stage and _stage_fits(stage_width, line_width, box):
        if box.height > _TWO_LINE_HEIGHT:
            second_text.append(_small_text(stage, ink, middle, bottom - 6))
            baseline -= 6
        else:
            offset = stage_width + PADDING
            x = box.x + box.width - PADDING - stage_width / 2
            second_text.append(_small_text(stage, ink, x, baseline))
    number_text = (
        f'<text class="{style.css_class} {ink}" x="{n(middle - offset / 2)}" '
        f'y="{n(baseline)}">{line}</text>'
    )
    return [number_text, *second_text]


def _stage_fits(stage_width: float, line_width: float, box: _Box) -> bool:
    """Return whether a stage fits below the number, or next to it in a low box."""
    if box.height > _TWO_LINE_HEIGHT:
        return stage_width + PADDING <= box.width
    return line_width + stage_width + 3 * PADDING <= box.width


def _small_text(text: str, ink: str, x: float, y: float) -> str:
    """Return a text element in the smallest font size."""
    return f'<text class="m {ink}" x="{n(x)}" y="{n(y)}">{text}</text>'

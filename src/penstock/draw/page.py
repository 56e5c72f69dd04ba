"""Page of an SVG figure: positions, headings, time axis, legend and the frame around the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from penstock.draw.facts import op_number
from penstock.draw.palette import light_style
from penstock.draw.scale import Clock, axis_seconds, format_number, op_lengths
from penstock.draw.stage_order import StageOrder
from penstock.draw.text_size import flow_lines, text_width, wrap_text
from penstock.event import Timeline
from penstock.schedule.op import Kind
from penstock.units import format_bytes

# Lengths are in points: margins, limits of the plot's width, and font sizes.
MARGIN, RIGHT = 16.0, 28.0
NARROWEST, WIDEST = 520.0, 1600.0
TITLE, LABEL, SMALL, FINE, TINY = 15.0, 12.0, 11.0, 9.5, 8.0
#: Free points around a number in its box.
PADDING = 1.6
#: Desired width of a short op's box: two digits fit.
_SHORT_OP_WIDTH = 16.0
#: Style rules that do not depend on colours. CSS classes of text: h heading, l label, s small text,
#: n, o, m numbers in boxes from large to small, c centred, e right-aligned, k black, v white.
#: CSS classes of shapes: lane idle lane, box group of a rank's boxes (fine: without outlines), z op
#: that took no time, held memory curve, t arrow (r: gradient, p: activations that another rank
#: stores, many: thin), bg background. A box has the letter of its kind as its class, with 2 after
#: it for the second shade.
_STYLE = (
    ".penstock text{font-family:sans-serif;pointer-events:none}"
    f".penstock .h{{font-size:{TITLE:g}px;font-weight:600}}"
    f".penstock .l{{font-size:{LABEL:g}px}}"
    f".penstock .s,.penstock .n{{font-size:{SMALL:g}px}}"
    f".penstock .o{{font-size:{FINE:g}px}}"
    f".penstock .m{{font-size:{TINY:g}px}}"
    ".penstock .n,.penstock .o,.penstock .m,.penstock .c{text-anchor:middle}"
    ".penstock .e{text-anchor:end}"
    ".penstock .grid{stroke-width:.6}"
    ".penstock .axis,.penstock .t{stroke-width:1}.penstock .t,.penstock .axis{fill:none}"
    ".penstock .many{stroke-width:.5;stroke-opacity:.5}"
    ".penstock .box rect{stroke-width:.8}.penstock .held{stroke-width:.6}"
    ".penstock .box.fine rect,.penstock .box .z{stroke:none}"
)
#: CSS class and font size of numbers in boxes, largest first.
NUMBER_SIZES = (("n", SMALL), ("o", FINE), ("m", TINY))


def n(value: float) -> str:
    """Format a coordinate or length as it is written into the SVG: with at most two decimals.

    The name is short because f-strings with SVG markup call it many times.
    """
    return format_number(value, 2)


@dataclass
class Page:
    """An SVG page that is filled from top to bottom. Lengths are in points.

    Attributes:
        clock: how times are written.
        seconds: length of the time axis.
        left: x of the start of the time axis.
        plot: width of the time axis.
        most_bytes: the highest memory peak of all panels, which is the scale of memory curves.
        y: where the next element goes.
        behind: elements drawn below all others.
        parts: elements drawn above them.
        numbered: kinds of op with a number in at least one box.
        paired: whether two ops run as one in any panel.
        summed: whether any panel shows time shares instead of boxes.
        link_waits: whether any panel shows times of waiting for a link.
    """

    clock: Clock
    seconds: float
    left: float
    plot: float
    most_bytes: int = 0
    y: float = MARGIN
    behind: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    numbered: set[Kind] = field(default_factory=set)
    paired: bool = False
    summed: bool = False
    link_waits: bool = False

    @classmethod
    def of(cls, panels: Sequence[Timeline]) -> Page:
        """Return an empty page, wide enough for the numbers in most boxes if that is possible."""
        seconds, clock = axis_seconds(panels), Clock.of(panels)
        lengths = op_lengths(panels)
        # Three quarters of the boxes are wider than this.
        short = float(np.quantile(lengths, 0.25)) if len(lengths) else seconds
        longest = max((_longest_number(panel) for panel in panels), key=len, default="")
        box_width = max(_SHORT_OP_WIDTH, text_width(longest, SMALL) + PADDING)
        plot = NARROWEST
        if short > 0:
            plot = min(WIDEST, max(NARROWEST, box_width * seconds / short))
        label_widths = [text_width(axis_title(clock), SMALL)]
        for panel in panels:
            label_widths.append(text_width(f"rank {panel.ranks - 1}", LABEL))
            for label in StageOrder.of(panel).rank_labels():
                label_widths.append(text_width(label, SMALL))
        peaks = [curve.peak for panel in panels for curve in panel.memory or ()]
        label_widths += [text_width(format_bytes(peak), SMALL) for peak in peaks]
        left = MARGIN + max(label_widths) + 10
        return cls(clock, seconds, left, plot, max(peaks, default=0))

    @property
    def width(self) -> float:
        """Width of the whole figure."""
        return self.left + self.plot + RIGHT

    def x(self, seconds: float) -> float:
        """Return the x of a moment; moments after the end of the axis are drawn at its end."""
        return self.left + (self.plot * min(1.0, seconds / self.seconds) if self.seconds else 0.0)

    def text(self, x: float, text: str, classes: str) -> None:
        """Add text with its baseline at `y`."""
        self.parts.append(
            f'<text class="{classes}" x="{n(x)}" y="{n(self.y)}">{escape(text)}</text>'
        )

    def paragraph(self, items: list[str], classes: str, size: float) -> None:
        """Add a comma-separated list from the left margin, broken between items if possible.

        Args:
            items: texts.
            classes: CSS classes.
            size: font size.
        """
        max_width = self.width - 2 * MARGIN
        # Headings are bold, and bold letters are wider.
        measured_size = 1.12 * size if classes == "h" else size
        gap = text_width(", ", measured_size)
        widths = [text_width(item, measured_size) for item in items]
        for indices in flow_lines(widths, gap, max_width):
            line = ", ".join(items[index] for index in indices)
            for part in wrap_text(line, measured_size, max_width):
                self.y += size
                self.text(MARGIN, part, classes)
                self.y += 5

    def axis(self, spans: list[tuple[float, float]]) -> None:
        """Add the time axis below the lanes, with grid lines through them.

        Args:
            spans: per panel, the top and bottom of its lanes.
        """
        line_y = self.y
        self.parts.append(
            f'<path class="axis" d="M{n(self.left)} {n(line_y)}H{n(self.left + self.plot)}"/>'
        )
        self.y += 16
        self.text(self.left - 8, axis_title(self.clock), "s e")
        for moment in self._tick_moments():
            x, label = self.x(moment), self.clock.tick_number(moment)
            for top, bottom in spans:
                self.behind.append(f'<path class="grid" d="M{n(x)} {n(top)}V{n(bottom)}"/>')
            self.parts.append(f'<path class="axis" d="M{n(x)} {n(line_y)}v4"/>')
            if x + text_width(label, SMALL) / 2 <= self.width:
                self.text(x, label, "s c")
        self.y += 12

    def _tick_moments(self) -> list[float]:
        """Return the times of the ticks, with the smallest step at which labels do not touch."""
        for step in self.clock.steps(self.seconds / self.plot or 1.0):
            moments = [i * step for i in range(int(self.seconds / step + 1e-9) + 1)]
            label_width = text_width(self.clock.tick_number(moments[-1]), SMALL)
            distance = self.x(step) - self.left
            if len(moments) == 1 or distance >= max(label_width + 14, 36):
                break
        return moments

    def entries(self, entries: list[tuple[str, str]]) -> None:
        """Add a legend on as many lines as needed.

        Args:
            entries: per entry its sign, an SVG element of 18 by 12 points or nothing, and its text.
        """
        sign_widths = [24 if sign else 0 for sign, _ in entries]
        widths = [
            sign_width + text_width(text, SMALL)
            for sign_width, (_, text) in zip(sign_widths, entries, strict=True)
        ]
        for indices in flow_lines(widths, 14, self.width - 2 * MARGIN):
            x = MARGIN
            self.y += 14
            for index in indices:
                sign, text = entries[index]
                if sign:
                    self.parts.append(
                        f'<g transform="translate({n(x)} {n(self.y - 10)})">{sign}</g>'
                    )
                self.text(x + sign_widths[index], text, "s")
                x += widths[index] + 14
            self.y += 6

    def document(self, label: str) -> str:
        """Return the finished SVG.

        Args:
            label: escaped name of the drawing for screen readers.
        """
        width, height = n(self.width), n(self.y + MARGIN)
        markers = "".join(
            f'<marker id="penstock-{name}" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" '
            'markerHeight="6" orient="auto" markerUnits="userSpaceOnUse">'
            f'<path class="head{classes}" d="M0 .5L6 3L0 5.5z"/></marker>'
            for name, classes in (("on", ""), ("back", " r"), ("pass", " p"))
        )
        elements = "\n".join([*self.behind, *self.parts])
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" class="penstock" '
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f'aria-label="{label}">\n'
            f"<style>{light_style(link_waits=self.link_waits)}{_STYLE}</style>\n<defs>{markers}</defs>\n"
            f'<rect class="bg" width="{width}" height="{height}"/>\n'
            f"{elements}\n</svg>\n"
        )


def _longest_number(panel: Timeline) -> str:
    """Return the number in the box of the highest micro-batch, an empty string without ops."""
    ops = panel.log.ops
    rows = np.flatnonzero(~ops.of_kind(Kind.U))
    if not len(rows):
        return ""
    highest = int(rows[np.argmax(ops.micro_batch[rows])])
    return op_number(panel, ops.op(highest))


def axis_title(clock: Clock) -> str:
    """Return the title of the time axis: `time, ms`."""
    return f"time, {clock.unit}" if clock.unit else "time"

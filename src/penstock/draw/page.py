"""A figure in the making: where things go, and the words, axis and frame around the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from penstock.draw.facts import op_number
from penstock.draw.palette import light_style
from penstock.draw.scale import Clock, horizon, number, work_seconds
from penstock.draw.stage_order import Ways
from penstock.draw.text_size import flowing, text_width, wrapped
from penstock.event import Timeline
from penstock.schedule.op import Kind
from penstock.units import format_bytes

MARGIN, RIGHT = 16.0, 28.0
NARROWEST, WIDEST = 520.0, 1600.0
TITLE, LABEL, SMALL, FINE, TINY = 15.0, 12.0, 11.0, 9.5, 8.0
#: Points around a number in its box.
AROUND = 1.6
#: Points for a short op, where the whole then is neither too narrow nor too wide: two digits fit.
_OP = 16.0
_STYLE = (
    ".penstock text{font-family:sans-serif;pointer-events:none}"
    f".penstock .h{{font-size:{TITLE:g}px;font-weight:600}}.penstock .l{{font-size:{LABEL:g}px}}"
    f".penstock .s,.penstock .n{{font-size:{SMALL:g}px}}.penstock .o{{font-size:{FINE:g}px}}.penstock .m{{font-size:{TINY:g}px}}"
    ".penstock .n,.penstock .o,.penstock .m,.penstock .c{text-anchor:middle}.penstock .e{text-anchor:end}"
    ".penstock .grid{stroke-width:.6}.penstock .axis,.penstock .t{stroke-width:1}.penstock .t,.penstock .axis{fill:none}"
    ".penstock .many{stroke-width:.5;stroke-opacity:.5}.penstock .box rect{stroke-width:.8}.penstock .held{stroke-width:.6}"
    ".penstock .box.fine rect,.penstock .box .z{stroke:none}"
)
#: Class and size of numbers in boxes, largest first.
NUMBERS = (("n", SMALL), ("o", FINE), ("m", TINY))


def n(value: float) -> str:
    """A length or place as the file has it."""
    return number(value, 2)


@dataclass
class Page:
    """What is drawn so far, and `y`, where the next thing goes. Lengths in points."""

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

    @classmethod
    def of(cls, panels: Sequence[Timeline]) -> Page:
        """An empty page, wide enough for the numbers in the boxes where that is possible."""
        whole, clock = horizon(panels), Clock.of(panels)
        lengths = work_seconds(panels)
        short = float(np.quantile(lengths, 0.25)) if len(lengths) else whole
        longest = max((_longest_number(panel) for panel in panels), key=len, default="")
        each = max(_OP, text_width(longest, SMALL) + AROUND)
        plot = min(WIDEST, max(NARROWEST, each * whole / short)) if short > 0 else NARROWEST
        labels = [text_width(axis_title(clock), SMALL)]
        for panel in panels:
            labels += [text_width(f"rank {panel.ranks - 1}", LABEL)]
            labels += [text_width(words, SMALL) for words in Ways.of(panel).names()]
        peaks = [curve.peak for panel in panels for curve in panel.memory or ()]
        labels += [text_width(format_bytes(peak), SMALL) for peak in peaks]
        return cls(clock, whole, MARGIN + max(labels) + 10, plot, max(peaks, default=0))

    @property
    def width(self) -> float:
        """Of the whole figure."""
        return self.left + self.plot + RIGHT

    def x(self, seconds: float) -> float:
        """Where a moment stands; moments after the end of the axis at its end."""
        return self.left + (self.plot * min(1.0, seconds / self.seconds) if self.seconds else 0.0)

    def text(self, x: float, words: str, classes: str) -> None:
        """Words with their baseline at `y`."""
        self.parts.append(
            f'<text class="{classes}" x="{n(x)}" y="{n(self.y)}">{escape(words)}</text>'
        )

    def paragraph(self, items: list[str], classes: str, size: float) -> None:
        """Items from the left margin with commas between, broken between items where that is
        possible.
        """
        room = self.width - 2 * MARGIN
        measured = 1.12 * size if classes == "h" else size  # bold letters are wider
        between = text_width(", ", measured)
        for line in flowing([text_width(item, measured) for item in items], between, room):
            for part in wrapped(", ".join(items[index] for index in line), measured, room):
                self.y += size
                self.text(MARGIN, part, classes)
                self.y += 5

    def axis(self, places: list[tuple[float, float]]) -> None:
        """The time axis below everything drawn so far, its ticks going up through the lanes at
        `places`.
        """
        line = self.y
        self.parts.append(
            f'<path class="axis" d="M{n(self.left)} {n(line)}H{n(self.left + self.plot)}"/>'
        )
        self.y += 16
        self.text(self.left - 8, axis_title(self.clock), "s e")
        for step in self.clock.steps(self.seconds / self.plot or 1.0):
            moments = [i * step for i in range(int(self.seconds / step + 1e-9) + 1)]
            broadest = text_width(self.clock.tick_number(moments[-1]), SMALL)
            if len(moments) == 1 or self.x(step) - self.left >= max(broadest + 14, 36):
                break
        for moment in moments:
            x, words = self.x(moment), self.clock.tick_number(moment)
            for top, bottom in places:
                self.behind.append(f'<path class="grid" d="M{n(x)} {n(top)}V{n(bottom)}"/>')
            self.parts.append(f'<path class="axis" d="M{n(x)} {n(line)}v4"/>')
            if x + text_width(words, SMALL) / 2 <= self.width:
                self.text(x, words, "s c")
        self.y += 12

    def entries(self, entries: list[tuple[str, str]]) -> None:
        """A legend: signs of 18 by 12 points with their names, in as many lines as it takes."""
        widths = [(24 if sign else 0) + text_width(name, SMALL) for sign, name in entries]
        for line in flowing(widths, 14, self.width - 2 * MARGIN):
            x = MARGIN
            self.y += 14
            for index in line:
                sign, name = entries[index]
                if sign:
                    self.parts.append(
                        f'<g transform="translate({n(x)} {n(self.y - 10)})">{sign}</g>'
                    )
                self.text(x + (24 if sign else 0), name, "s")
                x += widths[index] + 14
            self.y += 6

    def document(self, label: str) -> str:
        """The finished file; `label` is escaped and names the drawing to who cannot see it."""
        width, height = n(self.width), n(self.y + MARGIN)
        heads = "".join(
            f'<marker id="penstock-{name}" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto" '
            f'markerUnits="userSpaceOnUse"><path class="head{classes}" d="M0 .5L6 3L0 5.5z"/></marker>'
            for name, classes in (("on", ""), ("back", " r"), ("pass", " p"))
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="penstock" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{label}">\n<style>{light_style()}{_STYLE}</style>\n<defs>{heads}</defs>\n'
            f'<rect class="bg" width="{width}" height="{height}"/>\n'
            + "\n".join([*self.behind, *self.parts])
            + "\n</svg>\n"
        )


def _longest_number(panel: Timeline) -> str:
    ops = panel.log.ops
    rows = np.flatnonzero(~ops.of_kind(Kind.U))
    return (
        op_number(panel, ops.op(int(rows[np.argmax(ops.micro_batch[rows])]))) if len(rows) else ""
    )


def axis_title(clock: Clock) -> str:
    """`time, ms`."""
    return f"time, {clock.unit}" if clock.unit else "time"

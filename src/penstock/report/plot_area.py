"""The drawing of a chart: legend, axes, and the SVG around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from penstock.draw.facts import clean
from penstock.draw.scale import format_number
from penstock.draw.text_size import flow_lines, text_width, wrap_text
from penstock.report.axis import Axis, tick_text
from penstock.report.chart_style import (
    fill_class,
    light_chart_style,
    line_attributes,
    marker,
)

# Font sizes and margins in points.
LABEL, SMALL = 12.0, 11.0
MARGIN = 14.0
#: Width of a sign in the legend.
_SIGN = 26.0
#: Free points between two labels of an axis.
_LABEL_GAP = 16.0


def coordinate(value: float) -> str:
    """Return a coordinate as it is written into the SVG: with at most one decimal."""
    return format_number(value, 1)


@dataclass
class Plot:
    """A chart that is drawn from top to bottom.

    Attributes:
        width: of the drawing, in points.
        y: where the next element goes.
        left, right: ends of the horizontal axis.
        grid: lines behind everything.
        parts: elements above them.
    """

    width: float
    y: float = 6.0
    left: float = MARGIN
    right: float = 0.0
    grid: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.right = self.width - MARGIN

    def text(self, x: float, y: float, text: str, classes: str = "") -> None:
        """Add a text.

        Args:
            x, y: of its baseline, at its start unless a class changes that.
            text: not escaped.
            classes: `soft`, `centre` or `end`.
        """
        attribute = f' class="{classes}"' if classes else ""
        self.parts.append(
            f'<text{attribute} x="{coordinate(x)}" y="{coordinate(y)}">{escape(text)}</text>'
        )

    def legend(self, names: Sequence[str], kind: str) -> None:
        """Add a legend on as many rows as needed.

        Args:
            names: of the series.
            kind: of the chart.
        """
        texts = [self._shortened(clean(name), self.width - 2 * MARGIN - _SIGN) for name in names]
        widths = [_SIGN + text_width(text, SMALL) for text in texts]
        for row in flow_lines(widths, MARGIN, self.width - 2 * MARGIN):
            x = MARGIN
            self.y += 14
            for index in row:
                self._add_sign(index, x, kind)
                self.text(x + _SIGN, self.y, texts[index], "soft")
                x += widths[index] + MARGIN
            self.y += 4
        self.y += 8

    def _add_sign(self, index: int, x: float, kind: str) -> None:
        """Add the sign of a series before its name in the legend."""
        middle = coordinate(self.y - 4)
        if kind == "bar":
            self.parts.append(
                f'<rect class="{fill_class(index)}" x="{coordinate(x)}" '
                f'y="{coordinate(self.y - 9)}" width="20" height="10"/>'
            )
            return
        if kind == "line":
            line = f'd="M{coordinate(x)} {middle}h20"'
            self.parts.append(f"<path {line_attributes(index)} {line}/>")
        self.parts.append(marker(index, coordinate(x + 10), middle, radius=3.6))

    def _shortened(self, text: str, width: float) -> str:
        """Return the part of a text that fits into a width."""
        if text_width(text, SMALL) <= width:
            return text
        while text and text_width(f"{text}…", SMALL) > width:
            text = text[:-1]
        return f"{text}…"

    def caption(self, text: str) -> None:
        """Add the name of the vertical axis above it; it is horizontal, so that it can be read."""
        for line in wrap_text(clean(text), SMALL, self.width - 2 * MARGIN):
            self.y += SMALL
            self.text(MARGIN, self.y, line, "soft")
            self.y += 4
        self.y += 6

    def vertical_axis(self, axis: Axis, top: float, bottom: float) -> None:
        """Add grid lines and their labels, and set the left end of the horizontal axis."""
        labels = [tick_text(value, axis) for value in axis.ticks]
        widest = max((text_width(label, SMALL) for label in labels), default=0.0)
        self.left = MARGIN + widest + 6
        for value, label in zip(axis.ticks, labels, strict=True):
            y = bottom - (bottom - top) * axis.share(value)
            self.grid.append(
                f'<path class="grid" d="M{coordinate(self.left)} {coordinate(y)}'
                f'H{coordinate(self.right)}"/>'
            )
            self.text(self.left - 6, y + 4, label, "soft end")

    def horizontal_axis(self, axis: Axis, bottom: float, label: str, *, grid_top: float) -> None:
        """Add the horizontal axis, its ticks and its name.

        Args:
            axis: its scale.
            bottom: its y.
            label: its name.
            grid_top: top of vertical grid lines; `bottom` for none.
        """
        self.grid.append(
            f'<path class="axis" d="M{coordinate(self.left)} {coordinate(bottom)}'
            f'H{coordinate(self.right)}"/>'
        )
        end_of_last = -_LABEL_GAP
        for value in axis.ticks:
            x = self.left + (self.right - self.left) * axis.share(value)
            if grid_top < bottom:
                self.grid.append(
                    f'<path class="grid" d="M{coordinate(x)} {coordinate(grid_top)}'
                    f'V{coordinate(bottom)}"/>'
                )
            self.grid.append(f'<path class="axis" d="M{coordinate(x)} {coordinate(bottom)}v4"/>')
            text = tick_text(value, axis)
            half = text_width(text, SMALL) / 2
            # The label of a tick at the right edge ends there.
            centre = min(x, self.width - half)
            if centre - half >= end_of_last + _LABEL_GAP / 2:
                self.text(centre, bottom + 17, text, "soft centre")
                end_of_last = centre + half
        self.y = bottom + 20
        for line in wrap_text(clean(label), SMALL, self.right - self.left):
            self.y += SMALL + 4
            self.text((self.left + self.right) / 2, self.y, line, "soft centre")
        self.y += 8

    def tick_count(self, length: float, label_length: float) -> int:
        """Return how many labels of a length fit on an axis."""
        return max(2, int(length / (label_length + _LABEL_GAP)))

    def document(self, label: str) -> str:
        """Return the finished SVG.

        Args:
            label: escaped description for screen readers.
        """
        width, height = coordinate(self.width), coordinate(self.y)
        elements = "\n".join([*self.grid, *self.parts])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{label}">\n'
            f"<style>{light_chart_style()}</style>\n"
            f'<rect class="bg" width="{width}" height="{height}"/>\n{elements}\n</svg>\n'
        )

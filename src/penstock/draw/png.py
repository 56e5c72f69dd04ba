"""Timelines as a PNG: the SVG, shape by shape, on Matplotlib's canvas, so that both look the same.

Matplotlib is an optional dependency; it brings a font of its own, so that numbers appear on
machines that have none.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from penstock.draw.svg import svg
from penstock.errors import MissingExtra, SettingError
from penstock.event import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Pixels per point: numbers of 8 points stay readable on a screen of today.
SCALE = 2.0
#: Agg's own limit is 2^16 pixels a side.
_MOST_PIXELS = 60_000
_NAMESPACE = "{http://www.w3.org/2000/svg}"
#: SVG's user units and Matplotlib's points, of which 72 make an inch.
_DPI = 72.0
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_STEP = re.compile(r"([MLHVvZ])\s*([^MLHVvZ]*)")

Style = dict[str, str]


def png(panels: Sequence[Timeline], note: str = "") -> bytes:
    """Draw timelines as `svg` does, with two pixels per point.

    Raises:
        MissingExtra: Matplotlib is not installed.
        SettingError: the drawing would have more than 60,000 pixels a side.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "draw", "a drawing as .png") from error
    root = ET.fromstring(svg(panels, note))  # noqa: S314 - see above
    wide, high = float(root.get("width", "0")), float(root.get("height", "0"))
    if max(wide, high) * SCALE > _MOST_PIXELS:
        raise SettingError(
            f"a PNG of {wide * SCALE:.0f} by {high * SCALE:.0f} pixels is too large to open; draw .svg or .html"
        )
    figure = Figure(figsize=(wide / _DPI, high / _DPI), dpi=_DPI * SCALE)
    FigureCanvasAgg(figure)
    shapes = _Shapes(root)
    shapes.onto(figure, wide, high)
    held = io.BytesIO()
    # No date and no version: the same timeline gives the same bytes.
    figure.savefig(held, format="png", dpi=_DPI * SCALE, metadata={"Software": None})
    return held.getvalue()


@dataclass
class _Shapes:
    """The drawing's shapes with what its style sheet says of them."""

    root: ET.Element
    rules: list[tuple[int, tuple[frozenset[str], ...], Style]] = field(default_factory=list)

    def __post_init__(self) -> None:
        sheet = self.root.find(f"{_NAMESPACE}style")
        for selectors, body in _RULE.findall("" if sheet is None else sheet.text or ""):
            style = dict(part.split(":", 1) for part in body.split(";") if part)
            for selector in selectors.split(","):
                words = tuple(
                    frozenset(re.findall(r"\.?[\w-]+", word)) for word in selector.split()
                )
                weight = sum(10 if name.startswith(".") else 1 for word in words for name in word)
                self.rules.append((weight, words, style))
        self.rules.sort(key=lambda rule: rule[0])  # stable: of equal weight the later one counts

    def style(self, line: Sequence[frozenset[str]]) -> Style:
        """What holds for the last of these elements, given as their tags and classes from the root
        down.
        """
        found: Style = {}
        for _, words, style in self.rules:
            if words[-1] <= line[-1] and all(
                any(word <= element for element in line) for word in words[:-1]
            ):
                found |= style
        return found

    def walk(
        self,
        element: ET.Element,
        line: tuple[frozenset[str], ...],
        dx: float,
        dy: float,
        given: Style,
    ) -> Iterator[tuple[ET.Element, Style, float, float]]:
        """Every shape with its style and its shift, in order of drawing. Groups hand their style
        down.
        """
        for child in element:
            tag = child.tag.removeprefix(_NAMESPACE)
            if tag in ("style", "defs", "title"):
                continue
            here = (
                *line,
                frozenset([tag, *(f".{name}" for name in child.get("class", "").split())]),
            )
            style = given | self.style(here)
            if child.get("marker-end"):
                style["marker"] = "yes"
            if tag == "g":
                shift = re.findall(r"-?[\d.]+", child.get("transform", "0 0"))
                yield from self.walk(child, here, dx + float(shift[0]), dy + float(shift[1]), style)
            else:
                yield child, style, dx, dy

    def onto(self, figure: Figure, wide: float, high: float) -> None:
        """Draw everything; places count from the upper left, as in the SVG."""
        from matplotlib.collections import PathCollection
        from matplotlib.path import Path

        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, wide), ylim=(high, 0))
        axes.set_axis_off()
        top = (frozenset(["svg", ".penstock"]),)
        layers: list[tuple[tuple[Any, ...], list[Path]]] = []
        for order, (element, style, dx, dy) in enumerate(self.walk(self.root, top, 0.0, 0.0, {})):
            tag = element.tag.removeprefix(_NAMESPACE)
            if tag == "text":
                axes.text(
                    float(element.get("x", "0")) + dx,
                    float(element.get("y", "0")) + dy,
                    (element.text or "").replace("$", r"\$"),
                    ha=_ANCHORS[style.get("text-anchor", "start")],
                    va="baseline",
                    color=style.get("fill", "black"),
                    fontsize=float(style.get("font-size", "11px").removesuffix("px")),
                    family="DejaVu Sans",
                    fontweight="bold" if int(style.get("font-weight", "400")) >= 600 else "normal",
                    zorder=order,
                )
                continue
            vertices = _rectangle(element) if tag == "rect" else _path(element.get("d", ""))
            moved = [(x + dx, y + dy) for x, y in vertices]
            closed = tag == "rect" or element.get("d", "").endswith("Z")
            looks = (
                style.get("fill", "black") if closed else "none",
                style.get("stroke", "none"),
                float(style.get("stroke-width", "1")),
                float(style.get("stroke-opacity", "1")),
            )
            if not layers or layers[-1][0] != looks:
                layers.append((looks, []))
            layers[-1][1].append(
                Path(moved, closed=False) if not closed else Path([*moved, moved[0]], closed=True)
            )
            if style.get("marker") and not closed:
                head = ((style["stroke"], "none", 0.0, 1.0), [Path(_head(moved), closed=True)])
                layers.append(head)
        for order, ((fill, stroke, width, alpha), paths) in enumerate(layers):
            axes.add_collection(
                PathCollection(
                    paths,
                    facecolors=fill,
                    edgecolors=stroke,
                    linewidths=width if stroke != "none" else 0,
                    alpha=alpha if alpha < 1 else None,
                    zorder=order - len(layers),
                )
            )


def _rectangle(element: ET.Element) -> list[tuple[float, float]]:
    x, y, wide, high = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
    return [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)]


def _path(steps: str) -> list[tuple[float, float]]:
    """The corners of a path of straight lines, which is all that the SVG has."""
    x = y = 0.0
    corners = []
    for command, words in _STEP.findall(steps):
        numbers = [float(word) for word in words.replace(",", " ").split()]
        if command in "ML":
            x, y = numbers
        elif command == "H":
            x = numbers[0]
        elif command == "V":
            y = numbers[0]
        elif command == "v":
            y += numbers[0]
        else:
            continue
        corners.append((x, y))
    return corners


def _head(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The arrow head at a line's end: the SVG's marker."""
    (x1, y1), (x2, y2) = line[-2:]
    long = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
    ahead, aside = (x2 - x1) / long, (y2 - y1) / long
    return [
        (x2 - 6 * ahead + w * 2.5 * aside, y2 - 6 * aside - w * 2.5 * ahead) for w in (1, -1)
    ] + [(x2, y2)] * 2

"""Timelines as a PNG: the SVG drawn shape by shape with Matplotlib, so that both look the same.

Matplotlib is an optional dependency. It includes a font, so numbers also appear on machines without
fonts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from penstock.draw.svg import svg
from penstock.errors import MissingExtra, SettingError
from penstock.event import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

#: Pixels per point: numbers of 8 points stay readable on a high-resolution screen.
SCALE = 2.0
#: Agg's own limit is 2^16 pixels a side.
_MAX_PIXELS = 60_000
_NAMESPACE = "{http://www.w3.org/2000/svg}"
#: An SVG user unit is drawn as one Matplotlib point, of which 72 make an inch.
_DPI = 72.0
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_STEP = re.compile(r"([MLHVvZ])\s*([^MLHVvZ]*)")

Style = dict[str, str]
#: Tag and classes of an element, classes with a dot before them, as in a selector.
Labels = frozenset[str]
Point = tuple[float, float]
#: Fill, stroke, stroke width in points, opacity.
Look = tuple[str, str, float, float]


def png(panels: Sequence[Timeline], note: str = "") -> bytes:
    """Return timelines drawn as in `svg`, with two pixels per point.

    Raises:
        MissingExtra: Matplotlib is not installed.
        SettingError: the drawing would have more than 60,000 pixels a side.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "draw", "a drawing as .png") from error
    root = ET.fromstring(svg(panels, note))  # noqa: S314 - our own SVG, not a foreign file
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    if max(width, height) * SCALE > _MAX_PIXELS:
        raise SettingError(
            f"a PNG of {width * SCALE:.0f} by {height * SCALE:.0f} pixels is too large to open "
            f"(limit {_MAX_PIXELS} a side); draw .svg or .html"
        )
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI * SCALE)
    FigureCanvasAgg(figure)
    _SvgPainter(root).paint(figure, width, height)
    buffer = io.BytesIO()
    # No date and no version: the same timeline gives the same bytes.
    figure.savefig(buffer, format="png", dpi=_DPI * SCALE, metadata={"Software": None})
    return buffer.getvalue()


@dataclass
class _SvgPainter:
    """Draws the shapes of an SVG on a Matplotlib figure, with the styles of its style sheet.

    Attributes:
        root: the SVG.
        rules: specificity, selector (one set of labels per level) and style of each rule, in
            ascending order of precedence.
    """

    root: ET.Element
    rules: list[tuple[int, tuple[Labels, ...], Style]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Parse the style sheet."""
        sheet = self.root.find(f"{_NAMESPACE}style")
        css = "" if sheet is None else sheet.text or ""
        for selectors, body in _RULE.findall(css):
            style = dict(part.split(":", 1) for part in body.split(";") if part)
            for selector in selectors.split(","):
                levels = tuple(_selector_labels(part) for part in selector.split())
                self.rules.append((sum(map(_specificity, levels)), levels, style))
        # The sort is stable: of rules with the same specificity the later one takes precedence.
        self.rules.sort(key=lambda rule: rule[0])

    def style(self, ancestry: Sequence[Labels]) -> Style:
        """Return the style that the rules give an element, without what it inherits.

        Args:
            ancestry: labels of the elements from the root down to the element itself.
        """
        combined: Style = {}
        for _, levels, style in self.rules:
            if _matches(levels, ancestry):
                combined |= style
        return combined

    def shapes(
        self,
        parent: ET.Element,
        ancestry: tuple[Labels, ...],
        shift: Point,
        inherited: Style,
    ) -> Iterator[tuple[ET.Element, Style, Point]]:
        """Yield all shapes below an element with their style and shift, in drawing order.

        Args:
            parent: the element.
            ancestry: labels of the elements from the root down to it.
            shift: its position.
            inherited: its style, which the elements below inherit.
        """
        for child in parent:
            tag = child.tag.removeprefix(_NAMESPACE)
            if tag in ("style", "defs", "title"):
                continue
            classes = child.get("class", "").split()
            child_ancestry = (*ancestry, frozenset([tag, *(f".{name}" for name in classes)]))
            style = inherited | self.style(child_ancestry)
            if child.get("marker-end"):
                style["marker"] = "yes"
            if tag == "g":
                translation = re.findall(r"-?[\d.]+", child.get("transform", "0 0"))
                x, y = shift[0] + float(translation[0]), shift[1] + float(translation[1])
                yield from self.shapes(child, child_ancestry, (x, y), style)
            else:
                yield child, style, shift

    def paint(self, figure: Figure, width: float, height: float) -> None:
        """Draw everything; coordinates count from the upper left, as in the SVG."""
        from matplotlib.path import Path

        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        top = (frozenset(["svg", ".penstock"]),)
        # Consecutive paths that look alike share a collection.
        layers: list[tuple[Look, list[Path]]] = []
        for order, (element, style, shift) in enumerate(self.shapes(self.root, top, (0, 0), {})):
            if element.tag.removeprefix(_NAMESPACE) == "text":
                _draw_text(axes, element, style, shift, order)
                continue
            vertices, closed = _outline(element, shift)
            look = _look(style, closed)
            if not layers or layers[-1][0] != look:
                layers.append((look, []))
            corners = [*vertices, vertices[0]] if closed else vertices
            layers[-1][1].append(Path(corners, closed=closed))
            if style.get("marker") and not closed:
                arrow_look = (style["stroke"], "none", 0.0, 1.0)
                layers.append((arrow_look, [Path(_arrow_head(vertices), closed=True)]))
        for order, (look, paths) in enumerate(layers):
            # Below all texts, which have the orders from 0 on.
            _draw_paths(axes, paths, look, order - len(layers))


def _draw_paths(axes: Axes, paths: Sequence[Path], look: Look, order: int) -> None:
    """Draw paths that look alike.

    Args:
        axes: where to draw.
        paths: the paths.
        look: their colours and line.
        order: their place in the drawing order.
    """
    from matplotlib.collections import PathCollection

    fill, stroke, line_width, opacity = look
    axes.add_collection(
        PathCollection(
            paths,
            facecolors=fill,
            edgecolors=stroke,
            linewidths=line_width if stroke != "none" else 0,
            alpha=opacity if opacity < 1 else None,
            zorder=order,
        )
    )


def _selector_labels(part: str) -> Labels:
    """Return the tag and classes that one part of a selector asks for."""
    return frozenset(re.findall(r"\.?[\w-]+", part))


def _specificity(labels: Labels) -> int:
    """Return the CSS specificity of one part of a selector: classes outweigh tags."""
    return sum(10 if name.startswith(".") else 1 for name in labels)


def _matches(levels: Sequence[Labels], ancestry: Sequence[Labels]) -> bool:
    """Return whether a selector matches the last element of `ancestry`.

    The order of ancestors is not checked; no rule of our style sheets depends on it.
    """
    if not levels[-1] <= ancestry[-1]:
        return False
    return all(_in_any(level, ancestry) for level in levels[:-1])


def _in_any(level: Labels, ancestry: Sequence[Labels]) -> bool:
    """Return whether any element has all of the labels of one part of a selector."""
    return any(level <= labels for labels in ancestry)


def _draw_text(axes: Axes, element: ET.Element, style: Style, shift: Point, order: int) -> None:
    """Draw a text element.

    Args:
        axes: where to draw.
        element: the element.
        style: its style.
        shift: position of its group.
        order: its place in the drawing order.
    """
    axes.text(
        float(element.get("x", "0")) + shift[0],
        float(element.get("y", "0")) + shift[1],
        (element.text or "").replace("$", r"\$"),  # Matplotlib reads $ as mathematics
        ha=_ANCHORS[style.get("text-anchor", "start")],
        va="baseline",
        color=style.get("fill", "black"),
        fontsize=float(style.get("font-size", "11px").removesuffix("px")),
        family="DejaVu Sans",
        fontweight="bold" if int(style.get("font-weight", "400")) >= 600 else "normal",
        zorder=order,
    )


def _look(style: Style, closed: bool) -> Look:
    """Return the colours and line of a shape; an open path has no fill."""
    return (
        style.get("fill", "black") if closed else "none",
        style.get("stroke", "none"),
        float(style.get("stroke-width", "1")),
        float(style.get("stroke-opacity", "1")),
    )


def _outline(element: ET.Element, shift: Point) -> tuple[list[Point], bool]:
    """Return the corners of a rectangle or path, and whether it is closed."""
    if element.tag.removeprefix(_NAMESPACE) == "rect":
        vertices, closed = _rectangle(element), True
    else:
        steps = element.get("d", "")
        vertices, closed = _path(steps), steps.endswith("Z")
    return [(x + shift[0], y + shift[1]) for x, y in vertices], closed


def _rectangle(element: ET.Element) -> list[Point]:
    """Return the corners of an SVG rectangle."""
    x, y = float(element.get("x", "0")), float(element.get("y", "0"))
    width, height = float(element.get("width", "0")), float(element.get("height", "0"))
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _path(steps: str) -> list[Point]:
    """Return the corners of a path of straight lines; our SVG has no other paths."""
    x = y = 0.0
    corners = []
    for command, arguments in _STEP.findall(steps):
        numbers = [float(text) for text in arguments.replace(",", " ").split()]
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


def _arrow_head(line: Sequence[Point]) -> list[Point]:
    """Return the corners of the arrow head at a line's end, as the SVG's marker draws it."""
    (x1, y1), (x2, y2) = line[-2:]
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
    # Unit vector along the line.
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    base = [(x2 - 6 * dx + side * 2.5 * dy, y2 - 6 * dy - side * 2.5 * dx) for side in (1, -1)]
    return [*base, (x2, y2), (x2, y2)]

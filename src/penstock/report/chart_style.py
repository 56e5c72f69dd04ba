"""Colours, dashes and markers of charts."""

from __future__ import annotations

#: Colours of series on a light and on a dark background: the hues of the drawings, tuned so that
#: under simulated colour blindness any two stay 25 or more apart in CIELAB
#: (tests/report/test_chart_style.py). Markers and dashes tell them apart as well.
COLOURS = (
    ("#3050d4", "#5179fe"),
    ("#c18000", "#f8da3c"),
    ("#009869", "#78f8b0"),
    ("#5c0a80", "#a17fbe"),
    ("#8c0a0a", "#ea8450"),
    ("#9171a5", "#c7dfeb"),
)
#: Dashes of lines: the colours repeat with the next of them.
DASHES = ("", "7 3", "2 3", "9 3 2 3")
#: Markers with a radius of 1, as SVG paths: circle, square, triangle, diamond, cross, inverted
#: triangle.
MARKERS = (
    "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0-1 0Z",
    "M-.9-.9H.9V.9H-.9Z",
    "M0-1.1L1.1.9H-1.1Z",
    "M0-1.3L1.1 0L0 1.3L-1.1 0Z",
    "M-1-.4H-.4V-1H.4V-.4H1V.4H.4V1H-.4V.4H-1Z",
    "M0 1.1L1.1-.9H-1.1Z",
)
#: Selector, property, colour on a light and on a dark background, of all but the series.
_RULES = (
    (".bg", "fill", "#ffffff", "#14181e"),
    ("text", "fill", "#1d2530", "#e4e9f0"),
    (".soft", "fill", "#4a5563", "#a9b4c2"),
    (".grid", "stroke", "#e2e6eb", "#2b333e"),
    (".axis", "stroke", "#5b6675", "#8e9aab"),
    (".rim", "stroke", "#ffffff", "#14181e"),
)
_SHAPES = (
    ".chart text{font-family:sans-serif;font-size:12px}"
    ".chart .soft{font-size:11px}"
    ".chart .centre{text-anchor:middle}.chart .end{text-anchor:end}"
    ".chart .grid,.chart .axis{fill:none;stroke-width:1}"
    ".chart .line{fill:none;stroke-width:1.8;stroke-linejoin:round}"
    ".chart .band{stroke:none;fill-opacity:.16}"
    ".chart .whisker{fill:none;stroke-width:1.4}"
    ".chart .rim{stroke-width:.8}"
)


def light_chart_style() -> str:
    """Return the style sheet of a stand-alone chart: plain rules, for viewers other than browsers."""
    rules = [f".chart {selector}{{{key}:{light}}}" for selector, key, light, _ in _RULES]
    for index, (light, _) in enumerate(COLOURS):
        rules += _series_rules(".chart", index, light)
    return _SHAPES + "".join(rules)


def dark_chart_style() -> str:
    """Return the rules of a page for a dark background, see `palette.dark_style`."""
    rules = [f"main .chart {selector}{{{key}:{dark}}}" for selector, key, _, dark in _RULES]
    for index, (_, dark) in enumerate(COLOURS):
        rules += _series_rules("main .chart", index, dark)
    return "".join(rules)


def _series_rules(scope: str, index: int, colour: str) -> list[str]:
    """Return the rules of the lines (c0, c1, …) and areas (f0, f1, …) of a series."""
    return [
        f"{scope} .c{index}{{stroke:{colour}}}",
        f"{scope} .f{index}{{fill:{colour}}}",
    ]


def line_attributes(index: int) -> str:
    """Return the attributes of the line of series `index`."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="line {line_class(index)}"{dashes}'


def line_class(index: int) -> str:
    """Return the class of lines of series `index`."""
    return f"c{index % len(COLOURS)}"


def fill_class(index: int) -> str:
    """Return the class of areas of series `index`."""
    return f"f{index % len(COLOURS)}"


def marker(index: int, x: str, y: str, radius: float, title: str = "") -> str:
    """Return the marker of a point of series `index`.

    Args:
        index: of the series.
        x, y: its position, as text.
        radius: its size.
        title: escaped text for the pointer.
    """
    # The second series of a colour has another marker.
    shape = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
    tooltip = f"<title>{title}</title>" if title else ""
    return (
        f'<path class="{fill_class(index)}" transform="translate({x} {y}) scale({radius:g})" '
        f'd="{shape}">{tooltip}</path>'
    )

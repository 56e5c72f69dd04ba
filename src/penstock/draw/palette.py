"""The colours of SVG and HTML drawings."""

from __future__ import annotations

from penstock.schedule.op import Kind

#: Fill colours by kind, for the first and the second shade. Under simulated red and green blindness
#: (Machado et al. 2009) any two kinds stay 18 or more apart in CIELAB, and 12 or more under blue
#: blindness; lightness then tells them apart: B, U and E are dark.
FILLS = {
    Kind.F: ("#7eb0e8", "#4f86c6"),
    Kind.B: ("#17744a", "#4aa37a"),
    Kind.I: ("#b5e08c", "#d8f0c0"),
    Kind.W: ("#e99a1f", "#be6d0c"),
    Kind.U: ("#5b2a73", "#5b2a73"),
    Kind.E: ("#87101e", "#87101e"),
    Kind.L: ("#eda3b8", "#eda3b8"),
}
#: Fills on which numbers are white.
DARK_FILLS = ("#17744a", "#5b2a73", "#87101e")
WHITE, BLACK = "#ffffff", "#10151c"

#: Replacements for fills that are hard to see on a dark background.
FILLS_ON_DARK = {Kind.U: "#9a5fbd", Kind.E: "#c2394d"}

#: Style rules of elements that are not ops: selector, property, colour on a light background,
#: colour on a dark background.
_RULES = (
    (".bg", "fill", "#ffffff", "#14181e"),
    ("text", "fill", "#1d2530", "#e4e9f0"),
    (".s", "fill", "#4a5563", "#a9b4c2"),
    (".lane", "fill", "#eef0f3", "#242b35"),
    (".grid", "stroke", "#d3d8df", "#3a4452"),
    (".axis", "stroke", "#5b6675", "#8e9aab"),
    (".box rect", "stroke", "#ffffff", "#14181e"),
    (".t", "stroke", "#3a5f86", "#9cc3ee"),
    (".t.r", "stroke", "#9a4a10", "#f0b070"),
    (".head", "fill", "#3a5f86", "#9cc3ee"),
    (".head.r", "fill", "#9a4a10", "#f0b070"),
    (".t.p", "stroke", "#87101e", "#f0a0b4"),
    (".head.p", "fill", "#87101e", "#f0a0b4"),
    (".link", "fill", "#e6c3c8", "#5e3840"),
    (".held", "fill", "#c3c9d2", "#46515f"),
    (".held", "stroke", "#7b8695", "#8e9aab"),
)


def number_colours(kind: Kind) -> tuple[str, ...]:
    """Return the colours of numbers on the two fills of a kind."""
    return tuple(WHITE if fill in DARK_FILLS else BLACK for fill in FILLS[kind])


def fill_class(kind: Kind, second_shade: bool) -> str:
    """Return the CSS class of a box."""
    return f"{kind}2" if second_shade else str(kind)


def light_style(*, link_waits: bool = False) -> str:
    """Return the style sheet of a stand-alone drawing.

    It has plain rules only: few SVG viewers other than browsers support variables and media
    queries.

    Args:
        link_waits: whether the drawing has times of waiting for a link.
    """
    rules = [
        f".penstock {selector}{{{key}:{light}}}"
        for selector, key, light, _ in _RULES
        if link_waits or selector != ".link"
    ]
    for kind, (first, second) in FILLS.items():
        rules.append(f".penstock .{kind}{{fill:{first}}}")
        rules.append(f".penstock .{kind}2{{fill:{second}}}")
    rules.append(f".penstock .k{{fill:{BLACK}}}.penstock .v{{fill:{WHITE}}}")
    return "".join(rules)


def dark_style() -> str:
    """Return the rules of a page for a dark background.

    The selector `main` before each gives it precedence over the light rule.
    """
    rules = [f"main .penstock {selector}{{{key}:{dark}}}" for selector, key, _, dark in _RULES]
    rules.append(f"main .penstock .k{{fill:{BLACK}}}main .penstock .v{{fill:{WHITE}}}")
    for kind, fill in FILLS_ON_DARK.items():
        rules.append(f"main .penstock .{kind},main .penstock .{kind}2{{fill:{fill}}}")
    return "".join(rules)

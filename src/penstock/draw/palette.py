"""The colours of SVG and HTML drawings."""

from __future__ import annotations

from penstock.schedule.op import Kind

#: By kind, the colours of a rank's even and odd stages. Under simulated red and green blindness
#: (Machado et al. 2009) any two
#: kinds stay 18 or more apart in CIELAB, and 12 under blue blindness; lightness then tells them
#: apart: B, U and E are dark.
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
DARK = ("#17744a", "#5b2a73", "#87101e")
WHITE, BLACK = "#ffffff", "#10151c"

#: Fills that dark grounds would swallow, and what stands for them there.
ON_DARK = {Kind.U: "#9a5fbd", Kind.E: "#c2394d"}

#: Rules for what is not an op: selector, property, colour on light ground, colour on dark ground.
_GROUND = (
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
    (".held", "fill", "#c3c9d2", "#46515f"),
    (".held", "stroke", "#7b8695", "#8e9aab"),
)


def inks(kind: Kind) -> tuple[str, ...]:
    """The colours of numbers on the two fills of a kind."""
    return tuple(WHITE if fill in DARK else BLACK for fill in FILLS[kind])


def fill_class(kind: Kind, odd: bool) -> str:
    """The class of a box."""
    return f"{kind}2" if odd else str(kind)


def light_style() -> str:
    """Style sheet of a drawing on its own: plain rules, since few viewers but browsers know
    variables and media queries.
    """
    rules = [f".penstock {selector}{{{key}:{light}}}" for selector, key, light, _ in _GROUND]
    rules += [
        f".penstock .{kind}{suffix}{{fill:{fill}}}"
        for kind, fills in FILLS.items()
        for suffix, fill in zip(("", "2"), fills, strict=True)
    ]
    return "".join([*rules, f".penstock .k{{fill:{BLACK}}}.penstock .v{{fill:{WHITE}}}"])


def dark_style(scope: str) -> str:
    """Rules for dark grounds, for within `scope`, a selector that makes them outweigh the light
    ones.
    """
    rules = [f"{scope} .penstock {selector}{{{key}:{dark}}}" for selector, key, _, dark in _GROUND]
    rules += [f"{scope} .penstock .k{{fill:{BLACK}}}{scope} .penstock .v{{fill:{WHITE}}}"]
    rules += [
        f"{scope} .penstock .{kind},{scope} .penstock .{kind}2{{fill:{fill}}}"
        for kind, fill in ON_DARK.items()
    ]
    return "".join(rules)

"""The figure of a page: what `viewer.js` draws on a canvas, as data, and the frame around it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from penstock.draw.box_shades import Shades
from penstock.draw.facts import KIND_NAMES, heading, kinds, op_name, op_number
from penstock.draw.memory import held_by, steps
from penstock.draw.pairs import by_rank, halves
from penstock.draw.palette import FILLS, ON_DARK, inks
from penstock.draw.scale import Clock, horizon
from penstock.draw.stage_order import Ways
from penstock.event import Event, MemoryCurve, Timeline
from penstock.schedule.op import ACTIVATION_MOVES, Kind

#: More ops than this would make a page of tens of megabytes: it then has the still figure, with
#: columns in place of boxes.
MOST_OPS = 300_000

_BUTTONS = (
    ("in", "+", "zoom in"),
    ("out", "\N{MINUS SIGN}", "zoom out"),
    ("all", "all", "the whole timeline"),
    ("left", "←", "earlier"),
    ("right", "→", "later"),
)


def viewer(panels: Sequence[Timeline], label: str, still: str) -> str:
    """The figure with its data and its script.

    Args:
        panels: the timelines, on one time scale.
        label: what the figure shows, escaped.
        still: a picture for readers whose viewer runs no scripts; may be empty.
    """
    buttons = "".join(
        f'<button type="button" data-do="{do}" title="{name}" aria-label="{name}">{sign}</button>'
        for do, sign, name in _BUTTONS
    )
    hint = "wheel or + \N{MINUS SIGN} 0: zoom · drag, shift + wheel or ← →: move · point at a box for its numbers"
    script = files("penstock.draw").joinpath("viewer.js").read_text(encoding="utf-8")
    return (
        f'<figure id="penstock-figure"><div class="tools">{buttons}<span>{hint}</span>'
        f'<span class="summed" hidden>too many ops in view for a box each: heights are shares of time</span></div>'
        f'<div class="frame"><div class="inner"><canvas tabindex="0" role="img" aria-label="{label}"></canvas></div></div>'
        f'<div class="tip" role="status" hidden></div><div class="legend">{_legend(panels)}</div>'
        f'<noscript><p>This figure zooms where scripts may run.</p><div class="still">{still}</div></noscript></figure>\n'
        f'<script id="penstock-data" type="application/json">{_json(panels)}</script>\n<script>{script}</script>'
    )


def _legend(panels: Sequence[Timeline]) -> str:
    staged = any(Ways.of(panel).several for panel in panels)
    meanings = sorted({Shades.of(panel).meaning for panel in panels} - {""})
    entries = []
    for kind in kinds(panels):
        one, other = FILLS[kind]
        ground = f"linear-gradient(90deg,{one} 50%,{other} 50%)" if meanings else one
        entries.append((f'<i style="background:{ground}"></i>', f"{kind} {KIND_NAMES[kind]}"))
    entries.append(('<i style="background:var(--lane)"></i>', "idle"))
    if any(panel.memory for panel in panels):
        entries.append(
            (
                '<i style="background:var(--held);border-bottom:1px solid var(--edge)"></i>',
                "memory, its peak before it",
            )
        )
    entries += [("", meaning) for meaning in meanings]
    cut = ".slice" * any(panel.slicing is not None for panel in panels)
    entries.append(("", f"numbers: micro-batch{cut}{', s: stage' if staged else ''}"))
    if any(halves(row) for panel in panels for row in by_rank(panel)):
        entries.append(("", "half boxes: two ops that run as one"))
    return "".join(f"<span>{sign}{escape(name)}</span>" for sign, name in entries)


def _json(panels: Sequence[Timeline]) -> str:
    clock = Clock.of(panels)
    data = {
        "clock": {"unit": clock.unit, "factor": clock.factor},
        "seconds": _short(horizon(panels)),
        "most": max((curve.peak for panel in panels for curve in panel.memory or ()), default=0),
        "kinds": {
            str(kind): {
                "name": KIND_NAMES[kind],
                "fills": FILLS[kind],
                "dark": ON_DARK.get(kind, ""),
                "inks": inks(kind),
            }
            for kind in kinds(panels)
        },
        "panels": [_panel(panel) for panel in panels],
    }
    # In a script element only "</" and "<!--" are not text.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _panel(panel: Timeline) -> dict[str, object]:
    ways, curves, rows = Ways.of(panel), steps(panel), by_rank(panel)
    joined = [halves(row) for row in rows]
    names, shades = ways.names(), Shades.of(panel, ways)
    sizes = {
        (event.rank, event.op): event.bytes
        for event in panel.events
        if event.to_rank is not None and event.bytes
    }
    return {
        "title": heading(panel),
        "makespan": _short(panel.makespan),
        "several": ways.several,
        "paired": any(joined),
        "sent": _sent(
            panel,
            [
                event
                for event in panel.events
                if event.to_rank is not None and event.end > event.start
            ],
        ),
        "ranks": [
            {
                "name": f"rank {rank}",
                "held": names[rank],
                "own": ways.stages[rank][0] if len(ways.stages[rank]) == 1 else -1,
                "t": [_short(event.start) for event in row],
                "e": [_short(event.end) for event in row],
                "k": "".join(str(event.op.kind) for event in row),
                "s": [event.op.stage for event in row],
                "n": _numbers(panel, row),
                "z": "".join("1" if shades.odd(rank, event.op) else "0" for event in row),
                "h": "".join(
                    str(1 + joined[rank][place]) if place in joined[rank] else "0"
                    for place in range(len(row))
                ),
                "b": [event.bytes or sizes.get((rank, event.op), 0) for event in row]
                if sizes or any(e.bytes for e in row)
                else None,
                "memory": None if curves is None else _memory(panel, rank, curves[rank]),
            }
            for rank, row in enumerate(rows)
        ],
    }


def _numbers(panel: Timeline, row: Sequence[Event]) -> list[int] | list[str]:
    words = [op_number(panel, event.op) for event in row]
    return words if any("." in word for word in words) else list(map(int, words))


def _memory(panel: Timeline, rank: int, curve: MemoryCurve) -> dict[str, object]:
    whole = panel.memory[rank] if panel.memory is not None else curve
    return {
        "t": list(map(_short, curve.seconds.tolist())),
        "b": curve.bytes.tolist(),
        "peak": whole.peak,
        "at": _short(whole.peak_at),
        "by": held_by(panel, rank),
    }


def _sent(panel: Timeline, transfers: Sequence[Event]) -> dict[str, object]:
    return {
        "t": [_short(event.start) for event in transfers],
        "e": [_short(event.end) for event in transfers],
        "f": [event.rank for event in transfers],
        "to": [event.to_rank for event in transfers],
        "o": [op_name(panel, event.op) for event in transfers],
        "w": "".join(
            "p" if event.op.kind in ACTIVATION_MOVES else "f" if event.op.kind is Kind.F else "b"
            for event in transfers
        ),
        "b": [event.bytes for event in transfers],
    }


def _short(seconds: float) -> float:
    """Nine digits are a nanosecond in a second; more only swell the page."""
    value = float(f"{seconds:.9g}")
    return int(value) if value == int(value) else value

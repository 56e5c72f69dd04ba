"""The figure of an HTML page that zooms: its frame and the data that `viewer.js` draws on a canvas.

`viewer.js` reads the data by the keys that are set here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from penstock.draw.box_shades import BoxShades
from penstock.draw.facts import KIND_NAMES, heading, kinds_in, op_name, op_number
from penstock.draw.lanes import timed_transfers, transfer_direction
from penstock.draw.memory import holders_at_peak, memory_steps
from penstock.draw.pairs import events_by_rank, pair_halves
from penstock.draw.palette import FILLS, FILLS_ON_DARK, number_colours
from penstock.draw.scale import Clock, axis_seconds
from penstock.draw.stage_order import StageOrder
from penstock.event import Event, MemoryCurve, Timeline
from penstock.schedule.op import Op

#: With more ops than this the page would have tens of megabytes; it then has a static figure with
#: columns instead of boxes.
MAX_VIEWER_OPS = 300_000

#: Letter of each transfer direction in the data.
_DIRECTION_LETTERS = {"on": "f", "back": "b", "pass": "p"}
#: Action in `viewer.js`, sign on the button, tooltip.
_BUTTONS = (
    ("in", "+", "zoom in"),
    ("out", "\N{MINUS SIGN}", "zoom out"),
    ("all", "all", "the whole timeline"),
    ("left", "←", "earlier"),
    ("right", "→", "later"),
)
_HINT = (
    "wheel or + \N{MINUS SIGN} 0: zoom · drag, shift + wheel or ← →: move · "
    "point at a box for its numbers"
)


def viewer(panels: Sequence[Timeline], label: str, static: str) -> str:
    """Return the figure with its data and its script, as HTML.

    Args:
        panels: the timelines, on a common time scale.
        label: escaped description of the figure.
        static: an SVG for browsers that run no scripts; may be empty.
    """
    buttons = "".join(
        f'<button type="button" data-do="{action}" title="{name}" aria-label="{name}">'
        f"{sign}</button>"
        for action, sign, name in _BUTTONS
    )
    script = files("penstock.draw").joinpath("viewer.js").read_text(encoding="utf-8")
    return (
        f'<figure id="penstock-figure"><div class="tools">{buttons}<span>{_HINT}</span>'
        '<span class="summed" hidden>'
        "too many ops in view for a box each: heights are shares of time</span></div>"
        '<div class="frame"><div class="inner">'
        f'<canvas tabindex="0" role="img" aria-label="{label}"></canvas></div></div>'
        f'<div class="tip" role="status" hidden></div><div class="legend">{_legend(panels)}</div>'
        "<noscript><p>This figure zooms where scripts may run.</p>"
        f'<div class="still">{static}</div></noscript></figure>\n'
        f'<script id="penstock-data" type="application/json">{_data(panels)}</script>\n'
        f"<script>{script}</script>"
    )


def _legend(panels: Sequence[Timeline]) -> str:
    """Return the legend: colours of kinds, and what numbers, shades and half boxes mean."""
    meanings = sorted({BoxShades.of(panel).meaning for panel in panels} - {""})
    entries = []
    for kind in kinds_in(panels):
        first, second = FILLS[kind]
        gradient = f"linear-gradient(90deg,{first} 50%,{second} 50%)"
        sign = _colour_sign(gradient if meanings else first)
        entries.append((sign, f"{kind} {KIND_NAMES[kind]}"))
    entries.append((_colour_sign("var(--lane)"), "idle"))
    if any(panel.memory for panel in panels):
        sign = _colour_sign("var(--held);border-bottom:1px solid var(--edge)")
        entries.append((sign, "memory, its peak before it"))
    entries += [("", meaning) for meaning in meanings]
    entries.append(("", _number_text(panels)))
    if any(_has_pairs(panel) for panel in panels):
        entries.append(("", "half boxes: pairs of ops"))
    return "".join(f"<span>{sign}{escape(text)}</span>" for sign, text in entries)


def _number_text(panels: Sequence[Timeline]) -> str:
    """Return the legend's text on the numbers in boxes."""
    text = "numbers: micro-batch"
    if any(panel.slicing is not None for panel in panels):
        text += ".slice"
    if any(StageOrder.of(panel).has_shared_ranks for panel in panels):
        text += ", s: stage"
    return text


def _colour_sign(background: str) -> str:
    """Return a small box with a CSS background."""
    return f'<i style="background:{background}"></i>'


def _has_pairs(panel: Timeline) -> bool:
    """Return whether two ops run as one on any rank."""
    return any(pair_halves(row) for row in events_by_rank(panel))


def _data(panels: Sequence[Timeline]) -> str:
    """Return the data of `viewer.js` as JSON, safe within a script element."""
    clock = Clock.of(panels)
    peaks = [curve.peak for panel in panels for curve in panel.memory or ()]
    kinds = {
        str(kind): {
            "name": KIND_NAMES[kind],
            "fills": FILLS[kind],
            "dark": FILLS_ON_DARK.get(kind, ""),
            "inks": number_colours(kind),
        }
        for kind in kinds_in(panels)
    }
    data = {
        "clock": {"unit": clock.unit, "factor": clock.factor},
        "seconds": _compact(axis_seconds(panels)),
        "most": max(peaks, default=0),
        "kinds": kinds,
        "panels": [_panel_data(panel) for panel in panels],
    }
    # In a script element only "</" and "<!--" are not text.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _panel_data(panel: Timeline) -> dict[str, object]:
    """Return the data of one timeline."""
    stage_order = StageOrder.of(panel)
    shades = BoxShades.of(panel, stage_order)
    curves = memory_steps(panel)
    labels = stage_order.rank_labels()
    transfers = [event for event in panel.events if event.to_rank is not None]
    transfer_bytes = {(event.rank, event.op): event.bytes for event in transfers if event.bytes}
    ranks: list[dict[str, object]] = []
    for rank, row in enumerate(events_by_rank(panel)):
        stages = stage_order.stages[rank]
        rank_data: dict[str, object] = {
            "name": f"rank {rank}",
            "held": labels[rank],
            "own": stages[0] if len(stages) == 1 else -1,
            **_op_columns(panel, rank, row, shades),
            "b": _sent_bytes(rank, row, transfer_bytes),
            "memory": None if curves is None else _memory_data(panel, rank, curves[rank]),
        }
        ranks.append(rank_data)
    return {
        "title": heading(panel),
        "makespan": _compact(panel.makespan),
        "several": stage_order.has_shared_ranks,
        "paired": _has_pairs(panel),
        "sent": _transfer_data(panel),
        "ranks": ranks,
    }


def _sent_bytes(
    rank: int, row: Sequence[Event], transfer_bytes: Mapping[tuple[int, Op], int]
) -> list[int] | None:
    """Return the bytes that each op of a rank sends, or None if no bytes are known.

    Args:
        rank: the rank.
        row: its events, which may have bytes of their own.
        transfer_bytes: bytes of the transfers that have any, by rank and op.
    """
    if not transfer_bytes and not any(event.bytes for event in row):
        return None
    return [event.bytes or transfer_bytes.get((rank, event.op), 0) for event in row]


def _op_columns(
    panel: Timeline, rank: int, row: Sequence[Event], shades: BoxShades
) -> dict[str, object]:
    """Return the ops of a rank, as one list or string for each of their properties.

    The keys are t and e, start and end in seconds; k, the kind; s, the stage; n, the number in the
    box; z, 1 for the second shade; h, 1 or 2 for the first or second op of a pair, otherwise 0.
    """
    halves = pair_halves(row)
    half_digits = [str(1 + halves[index]) if index in halves else "0" for index in range(len(row))]
    return {
        "t": [_compact(event.start) for event in row],
        "e": [_compact(event.end) for event in row],
        "k": "".join(str(event.op.kind) for event in row),
        "s": [event.op.stage for event in row],
        "n": _numbers(panel, row),
        "z": "".join("1" if shades.is_second(rank, event.op) else "0" for event in row),
        "h": "".join(half_digits),
    }


def _numbers(panel: Timeline, row: Sequence[Event]) -> list[int] | list[str]:
    """Return the numbers in the boxes of a rank: integers, or text if there are slices."""
    texts = [op_number(panel, event.op) for event in row]
    return texts if any("." in text for text in texts) else [int(text) for text in texts]


def _memory_data(panel: Timeline, rank: int, steps: MemoryCurve) -> dict[str, object]:
    """Return a rank's memory over time, its peak, and what occupies the memory then.

    Args:
        panel: the timeline.
        rank: the rank.
        steps: its curve with one step per moment. The full curve has the exact peak.
    """
    curve = panel.memory[rank] if panel.memory is not None else steps
    return {
        "t": [_compact(seconds) for seconds in steps.seconds.tolist()],
        "b": steps.bytes.tolist(),
        "peak": curve.peak,
        "at": _compact(curve.peak_at),
        "by": holders_at_peak(panel, rank),
    }


def _transfer_data(panel: Timeline) -> dict[str, object]:
    """Return the transfers that take time, as one list or string for each of their properties.

    The keys are t and e, start and end in seconds; f and to, the sending and the receiving rank; o,
    the op; w, the direction: f for activations, b for gradients, p for activations that another
    rank stores; b, bytes.
    """
    transfers = timed_transfers(panel)
    return {
        "t": [_compact(event.start) for event in transfers],
        "e": [_compact(event.end) for event in transfers],
        "f": [event.rank for event in transfers],
        "to": [event.to_rank for event in transfers],
        "o": [op_name(panel, event.op) for event in transfers],
        "w": "".join(_DIRECTION_LETTERS[transfer_direction(event)] for event in transfers),
        "b": [event.bytes for event in transfers],
    }


def _compact(seconds: float) -> float:
    """Round to nine digits, a nanosecond in a second; more would only make the page larger."""
    value = float(f"{seconds:.9g}")
    return int(value) if value == int(value) else value
